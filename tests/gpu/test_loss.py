"""The loss on a simulated CUDA device: its kernels and memory traffic at the shape of the 162M
recipe.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.model.loss import linear_cross_entropy, token_losses
from tests.support.simulated_cuda import SimulatedCuda
from tests.support.simulated_cuda.traffic import Cost

TOKENS, HIDDEN, VOCABULARY = 32 * 512, 768, 50304


class Device(SimulatedCuda):
    """Adds up the memory traffic of everything but matrix products."""

    def reset(self) -> None:
        super().reset()
        self.traffic = 0

    def record(self, name: str, launches: int, cost: Callable[[], Cost]) -> None:
        super().record(name, launches, cost)
        self.traffic += 0 if cost().flops else cost().bytes


def run_step(
    device: Device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokens: int = TOKENS,
    vocabulary: int = VOCABULARY,
    masked: bool = False,
    **options,
) -> list[torch.Tensor]:
    """The gradients of hidden states and weight."""
    hidden = torch.empty(tokens, HIDDEN, dtype=dtype, device="cuda", requires_grad=True)
    weight = torch.empty(vocabulary, HIDDEN, dtype=dtype, device="cuda", requires_grad=True)
    labels = torch.empty(tokens, dtype=torch.int64, device="cuda")
    mask = torch.empty(tokens, device="cuda") if masked else None
    device.reset()
    loss = linear_cross_entropy(hidden, weight, labels, mask, **options) / tokens
    gradients = torch.autograd.grad(loss, [hidden, weight])
    assert device.synchronizations == []
    assert device.blocking_copies == []
    assert all(gradient.dtype == dtype for gradient in gradients)
    return gradients


@pytest.mark.parametrize(("masked", "dtype"), [(False, torch.bfloat16), (True, torch.float16)])
def test_traffic_and_kernels_of_a_training_step(masked, dtype):
    """A read and a write of the logits, 3.3 GB, and a multiplication of each gradient by the
    upstream gradient.
    """
    with Device() as device:
        run_step(device, dtype, masked=masked)
        assert device.kernels["mm"] == 3
        assert device.kernels["triton.cross_entropy_kernel"] == 1
        assert sum(device.kernels.values()) <= 13
        assert 3.5e9 < device.traffic < 3.7e9
        # The logits and the weight's gradient in float32, besides tensors of the size of the
        # inputs.
        assert device.peak < 2.4e9


def test_chunks():
    """The logits of a chunk have at most 2 GiB. The weight's gradient is a float32 sum
    over chunks.
    """
    with Device() as device:
        run_step(device, tokens=4 * TOKENS)
        assert device.kernels["mm"] + device.kernels["addmm"] == 12
        assert device.kernels["triton.cross_entropy_kernel"] == 4
        assert device.traffic < 4 * 3.7e9
        assert device.peak < 3.3e9


def test_a_slice_of_the_vocabulary():
    """The ranks exchange two numbers per token before the gradient is computed."""
    with Device() as device:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        try:
            slice_size = VOCABULARY // 2
            run_step(
                device,
                vocabulary=slice_size,
                masked=True,
                first_token=slice_size,
                group=dist.group.WORLD,
            )
        finally:
            dist.destroy_process_group()
        assert device.kernels["triton.cross_entropy_kernel"] == 2
        assert sum(device.kernels.values()) <= 24


def test_losses_of_tokens_need_no_copy_of_the_logits():
    with Device() as device, torch.no_grad():
        logits = torch.empty(1, 1024, VOCABULARY, dtype=torch.bfloat16, device="cuda")
        labels = torch.empty(1, 1024, dtype=torch.int64, device="cuda")
        device.reset()
        assert token_losses(logits, labels).dtype == torch.float32
        assert device.kernels == {"triton.cross_entropy_kernel": 1, "sub": 1}
        assert device.peak < 1.1 * logits.nbytes
