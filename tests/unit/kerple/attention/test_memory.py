"""No tensor of queries times keys, at evaluation nor in training."""

import pytest
import torch

from kerple.attention import attend
from tests.support.attention import LargestStorage


def states(s: int, t: int, heads: int = 2, size: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, length, size) for length in (s, t, t)]


def test_the_reference_is_seen_to_have_one():
    query, key, value = states(512, 4096)
    with LargestStorage() as largest:
        attend(query, key, value, backend="reference")
    assert largest.elements >= 2 * 512 * 4096


@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_evaluation_in_chunks_of_queries(backend, window, with_bias):
    query, key, value = states(512, 16_384)
    bias = -torch.rand(2, 16_384) if with_bias else None
    weight = torch.rand(2, 16_384) if backend == "chunked" else None
    with torch.no_grad(), LargestStorage() as largest:
        attend(query, key, value, bias_table=bias, weight_table=weight, window=window, backend=backend)
    # The pairs that 128 queries see, as int64 where distances are looked up.
    seen = 16_384 if window is None else window + 127
    assert largest.elements <= 2 * 128 * seen


def test_training():
    length = 2048
    query, key, value = (tensor.requires_grad_() for tensor in states(length, length))
    bias, weight = (-torch.rand(2, length)).requires_grad_(), torch.rand(2, length).requires_grad_()
    with LargestStorage() as largest:
        attend(query, key, value, bias_table=bias, weight_table=weight, backend="chunked").sum().backward()
    assert bias.grad.shape == weight.grad.shape == (2, length)
    assert largest.elements <= 2 * 128 * length
