"""Tensor parallelism on a simulated CUDA device: rank 0 of two, whose collectives do nothing."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.model import fused_block
from megatron.model.gpt import GPT
from megatron.model.settings import TensorParallel
from tests.gpu.test_methods import check_training, settings_for
from tests.support.simulated_cuda import SimulatedCuda, move_to_cuda


@pytest.fixture(scope="module", autouse=True)
def ranks():
    from megatron.core import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("method", "fused"), [("kerple_log", True), ("rotary", False), ("rpe", True)]
)
def test_training_step(method, fused):
    """Fused blocks and megatron-core's layers, with half of the heads, the MLP and the
    vocabulary.
    """
    settings = replace(settings_for(method), tp=TensorParallel(2, 0))
    with (
        SimulatedCuda() as device,
        patch.object(fused_block, "KERNEL_DEVICES", ["cuda"] if fused else []),
    ):
        with torch.device("meta"):
            model = GPT(settings)
        assert model.blocks[0].mlp.dense_h_to_4h.weight.shape == (4 * 768 // 2, 768)
        check_training(move_to_cuda(model, torch.bfloat16), device)
        assert bool(device.kernels["triton.norm_kernel"]) == fused
