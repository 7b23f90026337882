"""Attention as several calls, against formulas and against attention without them."""

import pytest
import torch

from kerple.attention import Attention, Span, attend
from tests.support.attention import DecayingXPos, attend_arguments, run_attend, upstream_gradient
from tests.support.attention import random_states as float64_states


@pytest.mark.parametrize(("backend", "s"), [("reference", 40), ("chunked", 30), ("sdpa", 5)])
def test_decays_in_blocks(backend, s):
    """Against the mask of all pairs, with gradients; complete blocks and others."""
    span, (query, key, value) = Span(block=8), float64_states(2, 4, 40)
    sums = (-torch.rand(2, 2, 40, dtype=torch.float64)).cumsum(-1).requires_grad_()
    scores = query @ key.transpose(-1, -2) / 2 + sums[..., :, None] - sums[..., None, :]
    masked = scores.masked_fill(span.mask(range(40), range(40), "cpu"), float("-inf"))
    expected = (masked.softmax(-1) @ value)[:, :, -s:]
    actual = attend(query[:, :, -s:], key, value, decay_sums=sums, block=8, backend=backend)
    upstream, leaves = upstream_gradient(expected), [query, key, value, sums]
    grads = (torch.autograd.grad(context, leaves, upstream) for context in (actual, expected))
    for left, right in ((actual, expected), *zip(*grads, strict=True)):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


def test_decays_with_scaled_queries_and_keys():
    """The sums of each segment of queries are those of its keys."""
    query, key, value = float64_states(2, 4, 10)
    sums = (-torch.rand(2, 2, 10, dtype=torch.float64)).cumsum(-1)
    contexts = []
    for scale_base in (1.0, 1e9):  # segments of 4 queries, and one segment
        method = DecayingXPos(4, scale_base=scale_base)
        attention = Attention("reference", method)
        contexts.append(attention(query, key, value, decay_sums=sums, window=3))
        method.scale_qk = lambda query, key, *positions: (query, key)
        contexts.append(attention(query, key, value, decay_sums=sums, window=3))
    torch.testing.assert_close(contexts[1], contexts[3], rtol=1e-9, atol=1e-11)
    assert not torch.allclose(contexts[0], contexts[1])


def blockwise_reference(arguments: dict, block: int) -> torch.Tensor:
    """Softmax over the pairs that the definition allows: keys in the query's block or in the previous one."""
    query, key, value, bias, weight, _ = arguments.values()
    s, t = query.shape[2], key.shape[2]
    query_position, key_position = torch.arange(t - s, t)[:, None], torch.arange(t)
    blocks_behind = query_position // block - key_position // block
    visible = (key_position <= query_position) & (blocks_behind <= 1)
    distance = (query_position - key_position).clamp(min=0, max=2 * block - 1)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    scores = scores if weight is None else scores * weight[:, distance]
    scores = scores if bias is None else scores + bias[:, distance]
    return scores.masked_fill(~visible, float("-inf")).softmax(dim=-1) @ value


@pytest.mark.parametrize(
    ("s", "t"), [(40, 40), (1, 40), (1, 48), (7, 40), (9, 64), (30, 64), (33, 49), (16, 16), (5, 5)]
)
@pytest.mark.parametrize("block", [1, 8, 16, 100])
@pytest.mark.parametrize(("method", "backends"), [("none", ("auto", "sdpa")), ("kerple_power_ap_ap", ("chunked",))])
def test_blockwise_attention(method, backends, block, s, t):
    arguments = attend_arguments(method, 2, 3, s, t, 4, window=min(t, 2 * block))
    arguments["window"] = None
    expected = blockwise_reference(arguments, block)
    leaves = [leaf for leaf in arguments.values() if isinstance(leaf, torch.Tensor)]
    expected = [expected, *torch.autograd.grad(expected, leaves, upstream_gradient(expected))]
    for backend in ("reference", *backends):
        for actual, expected_tensor in zip(run_attend(backend, arguments, block=block), expected, strict=True):
            torch.testing.assert_close(actual, expected_tensor, rtol=1e-9, atol=1e-11)
