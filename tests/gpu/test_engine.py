"""Training through `Engine` and DeepSpeed on a simulated CUDA device, with both recipes as shipped."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.config import load_config
from tests.support.simulated_cuda import ROOT, SimulatedCuda, move_to_cuda

FEW_LAYERS = ("num-layers=2", "pos-emb=kerple_log")
VOCABULARY = 1024  # initial weights are drawn on the CPU
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture(scope="module", autouse=True)
def process_group():
    """One rank whose collectives do nothing."""
    with SimulatedCuda():
        import deepspeed

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)
    yield
    dist.destroy_process_group()


def third_step(recipe: str, *overrides: str) -> SimulatedCuda:
    """The records of the third training step of a recipe with two layers."""
    from megatron.training.distributed import Layout
    from megatron.training.engine import Engine

    config = load_config([recipe], ROOT / "configs", [*FEW_LAYERS, *overrides])
    dtype = DTYPES[config.precision.dtype]

    def to_device(module: torch.nn.Module, *_: object, **__: object) -> torch.nn.Module:
        on_device = all(parameter.device.type == "cuda" for parameter in module.parameters())
        return module if on_device else move_to_cuda(module, dtype)

    layout = Layout(0, 1, 1, 1, 1, 0, 0, 0, torch.device("cuda"))
    casts = {name: (lambda module: module) for name in ("bfloat16", "half", "float")}
    with SimulatedCuda() as device, patch.multiple(torch.nn.Module, to=to_device, **casts):
        engine = Engine(config, VOCABULARY, layout, lambda line: None)
        tokens = torch.zeros(engine.micro_batch, config.model.seq_length, dtype=torch.long, device="cuda")
        batches = iter(lambda: {"tokens": tokens, "labels": tokens}, None)
        for iteration in range(3):
            device.reset()
            engine.train_step(batches, 1e-4, iteration)
    return device


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("small_bf16.yml", ()),
        ("small_bf16.yml", ("checkpoint-activations=true",)),
        ("small_bf16.yml", ("checkpoint-activations=false",)),
        ("small_bf16.yml", ("gradient_accumulation_steps=2", "train_micro_batch_size_per_gpu=16")),
        ("small_bf16.yml", ("fp16.enabled=false", "precision=fp32")),
    ],
)
def test_a_step_does_not_wait_for_the_device(recipe, overrides):
    device = third_step(recipe, *overrides)
    assert device.synchronizations == []
    assert device.blocking_copies == []


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_2_and_3(stage):
    """DeepSpeed waits in these stages (see docs/benchmarks/gpu.md); no tensor is on the wrong device."""
    overrides = (f"zero_optimization.stage={stage}", "pipe-parallel-size=0")
    # DeepSpeed compares the lengths of lists across ranks, with a collective that does nothing here.
    with patch("deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks"):
        assert third_step("small_bf16.yml", *overrides).kernels["triton.forward_kernel"]


def test_fp16():
    """Dynamic loss scaling reads the overflow flag on the host, once per step."""
    device = third_step("1-3B.yml", "model-parallel-size=1", "pipe-parallel-size=1")
    assert len(device.synchronizations) <= 2
    assert device.blocking_copies == []
