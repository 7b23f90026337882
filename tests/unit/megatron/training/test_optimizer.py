"""Parameter groups, and the learning-rate schedule against the formulas of the release."""

import math

import pytest

from megatron.config import Config
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from megatron.training.loop import train
from megatron.training.optimizer import Schedule, parameter_groups
from tests.support.runs import metrics, training_settings

LR, T, W = 6e-4, 50_000, 500.0


@pytest.mark.parametrize("step", [0, 1, 250, 500, 501, 10_000, 49_499, 49_500, 49_501, 50_000, 80_000])
def test_cosine(step):
    schedule = Schedule(LR, "cosine", T, W)
    if step <= W:
        expected = LR * min(step, T - W) / W
    else:
        expected = LR / 2 * (1 + math.cos(math.pi * (min(step, T - W) - W) / T))
    assert schedule(step) == pytest.approx(expected, rel=1e-12)


def test_other_styles_halfway():
    assert Schedule(1.0, "linear", 100, 0)(50) == pytest.approx(0.5)
    assert Schedule(1.0, "exponential", 100, 0)(100) == pytest.approx(0.5, rel=1e-3)
    assert Schedule(1.0, "constant", 100, 10)(99) == 1.0
    assert Schedule(1.0, "constant", 100, 10)(5) == 0.5


def test_never_below_the_minimum():
    schedule = Schedule(1.0, "linear", 100, 0, min_lr=0.3)
    assert schedule(60) == pytest.approx(0.4)
    assert schedule(90) == 0.3


def test_learning_rate_follows_the_schedule(tmp_path, data_path):
    settings = training_settings(tmp_path, data_path, warmup=0.2, lr_decay_iters=10, train_iters=4, save=None)
    train(Config.from_flat(settings))
    assert metrics(tmp_path, "train/learning_rate") == pytest.approx(
        {1: 0.0, 2: 0.0025, 3: 0.005, 4: 0.005 * 0.97553}, rel=1e-3
    )


def test_only_matrices_of_a_method_have_weight_decay():
    shape = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "padded_vocab_size": 16, "max_positions": 8}
    for pos_emb, expected in (
        ("dape_kerple", {"first.weight", "second.weight"}),
        ("dape_v2", {"first.weight", "second.weight"}),
        ("fire", {"first.weight", "second.weight"}),
        ("transformer_xl", {"relative.weight"}),
        ("cope", set()),
        ("rpe", set()),
        ("kerple_log", set()),
    ):
        model = GPT(ModelSettings(**shape, pos_emb=pos_emb))
        decayed = {id(parameter) for parameter in parameter_groups(model, 0.1)[0]["params"]}
        names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
        assert {name.split(".rpe.")[1] for name in names if ".rpe." in name} == expected
