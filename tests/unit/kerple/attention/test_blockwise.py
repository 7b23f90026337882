"""Blockwise causal attention against an explicit mask, in float64."""

from dataclasses import replace

import pytest
import torch

from kerple.attention import Span, attend, dispatch
from tests.unit.kerple.attention.test_backends import case, run, serving


def masked(arguments: dict, block: int) -> torch.Tensor:
    """softmax over the pairs that the definition allows: the same block of positions, or the key's the one before."""
    query, key, value, bias, weight, _ = arguments.values()
    s, t = query.shape[2], key.shape[2]
    position, other = torch.arange(t - s, t)[:, None], torch.arange(t)
    behind = position // block - other // block
    seen = (other <= position) & (behind <= 1)
    distance = (position - other).clamp(min=0, max=2 * block - 1)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    scores = scores if weight is None else scores * weight[:, distance]
    scores = scores if bias is None else scores + bias[:, distance]
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ value


@pytest.mark.parametrize(
    ("s", "t"), [(40, 40), (64, 64), (1, 40), (1, 48), (7, 40), (9, 64), (30, 64), (33, 49), (16, 16), (5, 5)]
)
@pytest.mark.parametrize("block", [1, 8, 16, 100])
@pytest.mark.parametrize("method", ["none", "kerple_log", "kerple_power_ap_ap"])
def test_values_and_gradients(method, block, s, t):
    arguments = case(method, 2, 3, s, t, 4, window=min(t, 2 * block))
    arguments["window"] = None
    expected = masked(arguments, block)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    leaves = [leaf for leaf in arguments.values() if isinstance(leaf, torch.Tensor)]
    expected = [expected, *torch.autograd.grad(expected, leaves, upstream)]
    for backend in ("reference", "auto", *serving(method)):
        for found, wanted in zip(run(backend, arguments, block=block), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_a_query_sees_from_half_to_all_of_the_training_length():
    """LEX, section 3.2: with blocks of l / 2, from l / 2 + 1 to l keys."""
    span = Span(block=8)
    seen = [position + 1 - span.first_key(position) for position in range(8, 100)]
    assert (min(seen), max(seen)) == (9, 16)


def test_whole_blocks_are_one_call(monkeypatch):
    """Memory and speed: 61 whole blocks of two samples go through the backend at once, with 2 B keys each."""
    shapes = []
    chunked = dispatch.BACKENDS["chunked"]

    def record(call):
        shapes.append((tuple(call.query.shape), tuple(call.key.shape)))
        return chunked.run(call)

    monkeypatch.setitem(dispatch.BACKENDS, "chunked", replace(chunked, run=record))
    states = torch.randn(2, 3, 1000, 4)
    attend(states[:, :, 5:], states, states, block=16, backend="chunked")
    assert shapes == [
        ((2, 3, 11, 4), (2, 3, 16, 4)),
        ((122, 3, 16, 4), (122, 3, 32, 4)),
        ((2, 3, 8, 4), (2, 3, 24, 4)),
    ]


def test_a_window_and_blocks_at_once_are_refused():
    states = torch.randn(1, 1, 4, 2)
    with pytest.raises(ValueError, match=r"window \(2\) and block \(3\) are both set"):
        attend(states, states, states, window=2, block=3)
    with pytest.raises(ValueError, match="block must be at least 1"):
        attend(states, states, states, block=0)
