"""Every optimizer on several ranks: the losses and weights of one rank, in every parallel layout
and across layouts.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.layers import merge_shards, open_layers
from tests.support.layouts import VOCABULARY, slow
from tests.support.ranks import Ranks
from tests.support.runs import copy_checkpoint, metrics, training_settings, unwrapped

OTHER_OPTIMIZERS: dict[str, dict[str, object]] = {
    "lion": {"optimizer": {"type": "lion", "params": {"lr": 0.001}}},
    "sgd": {"optimizer": {"type": "sgd", "params": {"lr": 0.001, "momentum": 0.9}}},
    "muon": {"optimizer": {"type": "muon", "params": {"lr": 0.001}}},
    "adafactor": {"optimizer": {"type": "adafactor", "params": {"lr": 0.001}}},
    "adam8bit": {"optimizer": {"type": "adam", "params": {"lr": 0.001}}, "use_bnb_optimizer": True},
}
WHOLE_PARAMETERS = ("muon", "adafactor", "adam8bit")
# Differences of rounding: Muon computes in bfloat16, 8-bit Adam rounds to codes, and Lion's steps
# are signs, also those of biases whose exact gradient is 0.
WEIGHT_TOLERANCES = {"muon": 3e-4, "adam8bit": 3e-4, "lion": float("inf")}


@pytest.fixture(scope="module")
def optimizer_run(trained, tmp_path_factory) -> Callable[..., Path]:
    """optimizer_run(name, layout, precision): the folder of a run with another optimizer, trained
    once.
    """
    folders: dict[tuple[str, ...], Path] = {}

    def run(name: str, layout: str, precision: str) -> Path:
        if (name, layout, precision) not in folders:
            folder = folders[name, layout, precision] = tmp_path_factory.mktemp(f"{name}-{layout}")
            trained(folder, layout, **OTHER_OPTIMIZERS[name], precision=precision, **OPTIMIZER_KEYS)
        return folders[name, layout, precision]

    return run


# Weight decay must not reach the kernel parameters, whose steps are ten times as large.
OPTIMIZER_KEYS = {"eval_iters": 0, "weight_decay": 0.1, "positional_lr_factor": 10.0}


def assert_same_merged_weights(folder: Path, expected: Path, tolerance: float) -> None:
    """Compare the weights after 6 iterations with those of one rank; joins the slices of
    tensor-parallel ranks.
    """
    steps = [open_layers(run / "checkpoints/global_step6") for run in (folder, expected)]
    for index, (layer,) in steps[1].items():
        for name, tensor in layer.items():
            merged = merge_shards(
                name, [shard[name] for shard in steps[0][index]], tensor.shape, folder
            )
            difference = float((merged - tensor).abs().max())
            assert difference <= tolerance, f"{index}.{name}"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "source", "target", "precision"),
    [
        slow("sgd", "pipeline", "zero-2", "fp32"),
        ("muon", "tensor", "zero-1", "fp32"),
        slow("lion", "tensor", "zero-3", "fp32"),
        slow("muon", "pipeline", "tensor", "bfloat16"),
        slow("adafactor", "zero-3", "tensor", "fp32"),
        *[
            slow(name, *layouts)
            for name in WHOLE_PARAMETERS
            for layouts in (
                ("tensor", "one", "fp32"),
                ("one", "tensor", "fp32"),
                ("zero-1", "one", "fp32"),
                ("pipeline", "tensor", "fp32"),
                ("zero-2", "pipeline", "fp32"),
                ("zero-3", "data", "fp32"),
                ("data", "zero-3", "fp32"),
                ("zero-1", "tensor", "bfloat16"),
                ("tensor", "zero-3", "bfloat16"),
                ("data", "zero-2", "bfloat16"),
                ("tensor", "data", "fp16"),
            )
        ],
    ],
)
def test_other_optimizers_in_every_layout(
    name, source, target, precision, optimizer_run, trained, tmp_path
):
    """Two ranks train like one, and resume in another layout."""
    one, two = optimizer_run(name, "one", precision), optimizer_run(name, source, precision)
    copy_checkpoint(two, tmp_path, 3)
    output = trained(
        tmp_path, target, **OTHER_OPTIMIZERS[name], precision=precision, **OPTIMIZER_KEYS
    )
    assert target == "one" or "resharding its state" in unwrapped(output)
    if name in WHOLE_PARAMETERS and target in ("tensor", "zero-3"):
        assert "are gathered for each step" in unwrapped(output)
    if name == "muon" and source == "tensor":
        files = [two / f"checkpoints/global_step6/optimizer_rank_0000{rank}.pt" for rank in (0, 1)]
        entries = [torch.load(file, weights_only=True)["parameters"].items() for file in files]
        owned = [{key for key, entry in items if "momentum_buffer" in entry} for items in entries]
        assert all(owned), "each rank owns matrices"
        assert not owned[0] & owned[1]
    loss = 1e-4 if precision == "fp32" else 5e-3
    expected = metrics(one)
    assert metrics(two) == pytest.approx(expected, abs=loss)
    assert metrics(tmp_path) == pytest.approx(
        {step: expected[step] for step in (4, 5, 6)}, abs=loss
    )
    weight = WEIGHT_TOLERANCES.get(name, 2e-5) if precision == "fp32" else 2e-2
    for folder in (two, tmp_path):
        assert_same_merged_weights(folder, one, weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"model_parallel_size": 2},
        {"model_parallel_size": 2, "zero_optimization": {"stage": 1}},
        {"model_parallel_size": 2, "precision": "bfloat16"},
        {"model_parallel_size": 2, "pipe_parallel_size": 2, "gradient_accumulation_steps": 2},
        {"zero_optimization": {"stage": 3, "sub_group_size": 6000}},
    ],
)
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_whole_parameters_on_four_ranks(
    name, layout, optimizer_run, fork_server, data_path, tmp_path
):
    """Two kinds of parallelism, and several exchanges of parameters per step."""
    keys = {
        "padded_vocab_size": VOCABULARY,
        "num_gpus": 4,
        **OTHER_OPTIMIZERS[name],
        **OPTIMIZER_KEYS,
        **layout,
    }
    constants = {"megatron.optimizers.whole_parameters:EXCHANGED_AT_ONCE": 10_000}
    output = Ranks(fork_server, 4).train(training_settings(tmp_path, data_path, **keys), constants)
    assert "4 ranks on cpu" in output
    is_fp32 = "precision" not in layout
    one = optimizer_run(name, "one", "fp32" if is_fp32 else "bfloat16")
    assert metrics(tmp_path) == pytest.approx(metrics(one), abs=1e-4 if is_fp32 else 5e-3)
    assert_same_merged_weights(
        tmp_path, one, WEIGHT_TOLERANCES.get(name, 2e-5) if is_fp32 else 2e-2
    )
