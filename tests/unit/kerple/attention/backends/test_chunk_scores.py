"""Scores that are too small for float32's normal numbers."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kerple.attention import attend
from tests.support.attention import float64_arguments, upstream_gradient


class DenormalOperands(TorchDispatchMode):
    """Counts the denormal numbers among the operands of matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "bmm" in str(function):
            for operand in args[-2:]:
                size = operand.double().abs()
                self.count += int(((size > 0) & (size < torch.finfo(torch.float32).tiny)).sum())
        return function(*args, **(kwargs or {}))


def steep_arguments(with_weight: bool) -> dict[str, torch.Tensor]:
    """With a bias as steep as ALiBi's first slope, at 400 keys, probabilities are below float32's
    smallest normal number, with which a CPU multiplies thirty times slower.
    """
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 400, 16) for _ in range(3))
    distance = torch.arange(400).float()
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "bias_table": -torch.tensor([[0.5], [0.01]]) * distance,
    }
    if with_weight:
        arguments["weight_table"] = torch.exp(-torch.tensor([[0.4], [0.02]]) * distance)
    return {name: tensor.requires_grad_() for name, tensor in arguments.items()}


def run_with_small_gradient(backend: str, arguments: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The upstream gradient is as small as that of a mean over a batch."""
    result = attend(backend=backend, **arguments)
    return [
        result.detach(),
        *torch.autograd.grad(result, list(arguments.values()), 1e-6 * upstream_gradient(result)),
    ]


@pytest.mark.parametrize("with_weight", [False, True])
def test_no_denormal_number_is_multiplied(with_weight):
    with DenormalOperands() as denormals:
        run_with_small_gradient("reference", steep_arguments(with_weight))
    assert denormals.count > 1000
    with DenormalOperands() as denormals:
        run_with_small_gradient("chunked", steep_arguments(with_weight))
    assert denormals.count == 0


@pytest.mark.parametrize("with_weight", [False, True])
def test_avoiding_denormal_numbers_loses_no_precision(with_weight):
    arguments = steep_arguments(with_weight)
    expected = run_with_small_gradient("reference", float64_arguments(arguments))
    for actual, expected_tensor in zip(
        run_with_small_gradient("chunked", arguments), expected, strict=True
    ):
        assert (actual.double() - expected_tensor).norm() <= 1e-6 * expected_tensor.norm()
