"""Training through `Engine` and DeepSpeed on a simulated CUDA device, with both
recipes as shipped.
"""

from unittest.mock import patch

import pytest

from benchmarks.step_counts import StepCounter, count_step, rows
from tests.support.runs import ROOT
from tests.support.simulated_cuda import SimulatedCuda
from tests.support.simulated_cuda.training import SimulatedTraining, process_group

FEW_LAYERS = ("num-layers=2", "pos-emb=kerple_log")


@pytest.fixture(scope="module", autouse=True)
def ranks():
    with process_group():
        yield


def third_step(recipe: str, *overrides: str) -> SimulatedCuda:
    """The records of the third training step of a recipe with two layers."""
    with SimulatedCuda() as device:
        SimulatedTraining(device, [recipe], *FEW_LAYERS, *overrides).third_step()
    return device


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        pytest.param(
            *(
                "small_bf16.yml",
                ("gradient_accumulation_steps=2", "train_micro_batch_size_per_gpu=16"),
            ),
            marks=pytest.mark.ci,
        ),
        ("modern_162M.yml", ("use-qk-layernorm=true", "sliding-window-width=255")),
    ],
)
def test_a_step_does_not_wait_for_the_device(recipe, overrides):
    """`test_targets_of_the_162M_recipe` tests small_bf16.yml without overrides."""
    device = third_step(recipe, *overrides)
    assert device.synchronizations == []
    assert device.blocking_copies == []


@pytest.mark.ci
def test_the_bf16_optimizer_launches_few_kernels():
    """The optimizer does not launch several kernels per parameter (31). Large tensors need several
    foreach launches.
    """
    with StepCounter() as device:
        SimulatedTraining(device, ["small_bf16.yml"], *FEW_LAYERS).third_step()
    assert (
        sum(launch.cost.launches for launch in device.launches if launch.part == "optimizer") <= 50
    )


@pytest.mark.ci
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_2_and_3(stage):
    """DeepSpeed waits in these stages; no tensor is on the wrong device."""
    overrides = (f"zero_optimization.stage={stage}", "pipe-parallel-size=0")
    # DeepSpeed compares the lengths of lists across ranks, with a collective that does nothing
    # here.
    with patch(
        "deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks"
    ):
        assert third_step("small_bf16.yml", *overrides).kernels["triton.forward_kernel"]


@pytest.mark.ci
def test_fp16():
    """Dynamic loss scaling reads the overflow flag on the host, once per step."""
    device = third_step("1-3B.yml", "model-parallel-size=1", "pipe-parallel-size=1")
    assert len(device.synchronizations) == 1
    assert device.blocking_copies == []


@pytest.mark.ci
def test_targets_of_the_162M_recipe():
    """As counted by `benchmarks/step_counts.py`; docs/benchmarks/gpu.md has the numbers."""
    counts = count_step(["small_bf16.yml", "pos_emb/kerple_log.yml"])
    section = (
        (ROOT / "docs/benchmarks/gpu.md")
        .read_text()
        .partition("## Training step")[2]
        .partition("\n## ")[0]
    )
    documented = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")
    ][1:]
    assert len(documented) == 12
    assert {name: value for name, value in rows(counts) if name in dict(documented)} == dict(
        documented
    )
    assert counts["synchronizations"] == counts["blocking copies"] == []
    assert counts["kernels"]["total"] <= 900
    assert counts["MFU bound"]["H100"][0] >= 0.55
