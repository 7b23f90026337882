"""Methods that make the scores, xPos, kernels per layer: trained, checkpointed, resumed, in all layouts they have."""

import pytest
import torch

from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.inspection import describe
from megatron.config import Config
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from megatron.training.loop import train
from megatron.training.optimizer import parameter_groups
from tests.support.runs import go_back, metrics, training_settings, weights


def trained(folder, data_path, pos_emb, **keys):
    train(Config.from_flat(training_settings(folder, data_path, pos_emb=pos_emb, **keys)))
    return folder


@pytest.mark.parametrize("pos_emb", ["dape_alibi", "dape_v2_kerple", "dape_fire", "cope", "transformer_xl", "xpos"])
def test_training_moves_all_positional_parameters_and_lowers_the_loss(pos_emb, tmp_path, data_path):
    trained(tmp_path, data_path, pos_emb)
    losses = metrics(tmp_path)
    assert losses[6] < losses[1] - 0.05
    before, after = weights(tmp_path, 3), weights(tmp_path, 6)
    own = [name for name in after if "attention.rpe." in name]
    assert bool(own) == (pos_emb != "xpos")
    for name in own:
        assert not torch.equal(before[name], after[name]), name


def test_a_resumed_run_equals_the_unbroken_one(tmp_path, data_path):
    """Bit for bit, with dropout, recomputed activations and bfloat16."""
    keys = {
        "precision": "bfloat16",
        "attention_dropout": 0.1,
        "checkpoint_activations": True,
        "checkpoint_num_layers": 1,
    }
    whole = trained(tmp_path / "whole", data_path, "dape_kerple", **keys)
    go_back(whole, tmp_path / "resumed", 3)
    trained(tmp_path / "resumed", data_path, "dape_kerple", **keys)
    assert metrics(tmp_path / "resumed") == {step: loss for step, loss in metrics(whole).items() if step > 3}
    for name, tensor in weights(whole, 6).items():
        assert torch.equal(weights(tmp_path / "resumed", 6)[name], tensor), name


PER_LAYER = {"pos_emb_options": {"bias": "log + 0.5 power", "parameters": "per-layer"}}
RANDOM = {"pos_emb_options": {"scaling": "random", "random_range": 128}}


@pytest.mark.parametrize(
    ("pos_emb", "keys", "logged"),
    [
        ("dape_kerple", {}, ["bias_p", "bias_a"]),
        ("kerple", PER_LAYER, ["bias_1_log_a", "bias_2_power_p"]),
        ("rotary", {**RANDOM, "checkpoint_activations": True, "checkpoint_num_layers": 1}, []),
    ],
    ids=["dape_kerple", "kerple per layer", "random rotary"],
)
def test_two_stages_of_a_pipeline_train_and_resume_as_one_rank(pos_emb, keys, logged, ranks, tmp_path, data_path):
    """What belongs to a layer stays with it; what is drawn for a step is drawn alike for the layers of both."""
    trained(tmp_path / "one", data_path, pos_emb, **keys)
    stages = {"num_gpus": 2, "pipe_parallel_size": 2, "gradient_accumulation_steps": 2}
    for name in ("two", "resumed"):
        if name == "resumed":
            go_back(tmp_path / "two", tmp_path / name, 3)
        ranks.train(training_settings(tmp_path / name, data_path, pos_emb=pos_emb, **keys, **stages))
    names = [f"kernel/layer_{layer:02d}/{name}/mean" for layer in (2, 3) for name in logged]
    for name in ("train/loss", "train/grad_norm", "validation/loss", *names):
        one, two, resumed = (metrics(tmp_path / folder, name) for folder in ("one", "two", "resumed"))
        assert one
        assert two == pytest.approx(one, abs=1e-4), name
        assert resumed == {step: value for step, value in two.items() if step > 3}, name
    ours, theirs = weights(tmp_path / "two", 6), weights(tmp_path / "one", 6)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("pos_emb", "layout"),
    [
        ("transformer_xl", {"zero_optimization": {"stage": 3}}),
        ("xpos", {"model_parallel_size": 2, "padded_vocab_size": 512}),
    ],
    ids=["zero-3", "tensor"],
)
def test_two_ranks_train_as_one(pos_emb, layout, ranks, tmp_path, data_path):
    trained(tmp_path / "one", data_path, pos_emb)
    ranks.train(training_settings(tmp_path / "two", data_path, pos_emb=pos_emb, num_gpus=2, **layout))
    for name in ("train/loss", "train/grad_norm", "validation/loss"):
        assert metrics(tmp_path / "two", name) == pytest.approx(metrics(tmp_path / "one", name), abs=1e-4), name
    if pos_emb != "xpos":
        ours, theirs = weights(tmp_path / "two", 6), weights(tmp_path / "one", 6)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=0, msg=name)


def test_kernels_per_layer_in_slices_train_as_on_one_rank(ranks, tmp_path, data_path):
    trained(tmp_path / "one", data_path, "kerple", **PER_LAYER)
    slices = {"num_gpus": 2, "model_parallel_size": 2, "padded_vocab_size": 512}
    ranks.train(training_settings(tmp_path / "two", data_path, pos_emb="kerple", **PER_LAYER, **slices))
    kernels = ("kernel/layer_02/bias_1_log_a/mean", "kernel/layer_03/bias_2_power_p/max")
    for name in ("train/loss", "train/grad_norm", *kernels):
        assert metrics(tmp_path / "one", name)
        assert metrics(tmp_path / "one", name) == pytest.approx(metrics(tmp_path / "two", name), abs=1e-4), name
    step = tmp_path / "one" / "checkpoints" / "global_step6"
    described = describe(step, ModelSettings.from_config(checkpoint_config(step), 512))
    assert set(described["kernels"]) == {"layer 0", "layer 1"}
    assert described["parameters"] == sum(tensor.numel() for tensor in weights(tmp_path / "one", 6).values())


def test_weight_decay_spares_all_but_the_matrices_of_a_method():
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
