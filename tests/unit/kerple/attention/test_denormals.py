"""Steep biases and weights: no denormal numbers on the way, and nothing lost that float32 can hold.

ALiBi's first slope at a few hundred keys is enough to make probabilities below 1.2e-38, on which a CPU multiplies
thirty times slower.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kerple.attention import attend

LENGTH = 400
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


class DenormalsMultiplied(TorchDispatchMode):
    """Counts the denormal numbers among the operands of matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "bmm" in str(function):
            for operand in args[-2:]:
                size = operand.double().abs()
                self.count += int(((size > 0) & (size < SMALLEST_NORMAL)).sum())
        return function(*args, **(kwargs or {}))


def arguments(with_weight: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, LENGTH, 16) for _ in range(3))
    distance = torch.arange(LENGTH).float()
    inputs = {"query": query, "key": key, "value": value, "bias_table": -torch.tensor([[0.5], [0.01]]) * distance}
    if with_weight:
        inputs["weight_table"] = torch.exp(-torch.tensor([[0.4], [0.02]]) * distance)
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def run(backend: str, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    result = attend(backend=backend, **inputs)
    # As small as the gradient of a mean over a batch is.
    upstream = 1e-6 * torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    return [result.detach(), *torch.autograd.grad(result, list(inputs.values()), upstream.to(result.dtype))]


@pytest.mark.parametrize("with_weight", [False, True])
def test_no_denormal_number_is_multiplied(with_weight):
    with DenormalsMultiplied() as seen:
        run("reference", arguments(with_weight))
    assert seen.count > 1000
    with DenormalsMultiplied() as seen:
        run("chunked", arguments(with_weight))
    assert seen.count == 0


@pytest.mark.parametrize("with_weight", [False, True])
def test_nothing_visible_is_lost(with_weight):
    inputs = arguments(with_weight)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    for found, expected in zip(run("chunked", inputs), run("reference", exact), strict=True):
        assert (found.double() - expected).norm() <= 1e-6 * expected.norm()
