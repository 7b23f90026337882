"""Parameter groups, and the learning-rate schedule against the formulas of the release."""

import math

import pytest
import torch

from megatron.config import Config
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from megatron.training.loop import train
from megatron.training.optimizer import Schedule, parameter_groups
from tests.support.runs import metrics, training_settings, weights

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


def test_parameters_with_the_same_bounds_are_a_group():
    shape = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "padded_vocab_size": 16, "max_positions": 8}
    model = GPT(ModelSettings(**shape, pos_emb="kerple_bias_wht"))
    names = {id(parameter): name.rpartition(".rpe.")[2] for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, 0.1)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    bounded = {group["bounds"]: {names[id(p)] for p in group["params"]} for group in groups if "bounds" in group}
    assert bounded == {(0.01, None): {"bias_a", "wei_a"}, (0.01, 2.0): {"bias_p", "wei_p"}}
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("precision", "zero_stage"), [("fp32", 0), ("fp32", 1), ("bfloat16", 0), ("fp16", 2), ("bfloat16", 3)]
)
def test_checkpoints_contain_parameters_within_their_bounds(precision, zero_stage, tmp_path, data_path):
    """The weights, and the fp32 master weights to which the optimizer adds steps of 0.8."""
    keys = {"pos_emb": "kerple_power", "precision": precision, "zero_optimization": {"stage": zero_stage}}
    keys |= {"optimizer": {"type": "Adam", "params": {"lr": 0.8}}, "warmup": 0.0, "gradient_clipping": 0.0}
    keys |= {"lr_decay_style": "constant", "pipe_parallel_size": 0, "load": None}
    train(Config.from_flat(training_settings(tmp_path, data_path, **keys)))
    optimizer = torch.load(tmp_path / "checkpoints/global_step6/optimizer_rank_00000.pt", weights_only=True)
    for name, high in (("bias_a", math.inf), ("bias_p", 2.0)):
        values = weights(tmp_path, 6)[f"layer_02-model_00-model_states.pt/attention.rpe.{name}"]
        master = optimizer["parameters"][f"positional.{name}"].get("master", values.flatten())
        assert ((master >= 0.01 - 1e-9) & (master <= high)).all()
        assert ((master - 0.01).abs() < 1e-8).any() or (master == high).any()
        torch.testing.assert_close(values.float().flatten(), master.to(values.dtype).float())
