"""The key-value cache: which tokens it returns, and how large its buffers are."""

import pytest
import torch

from kerple.attention import FULL
from megatron.model.cache import KVCache, LayerCache


@pytest.mark.parametrize("max_length", [None, 70])
def test_append_returns_all_tokens_in_order(max_length):
    key, value = torch.randn(2, 2, 3, 70, 4).unbind()
    cache = LayerCache(max_length)
    for start, end in ((0, 1), (1, 60), (60, 65), (65, 70)):
        keys, values = cache.append(key[:, :, start:end], value[:, :, start:end])
        assert torch.equal(keys, key[:, :, :end])
        assert torch.equal(values, value[:, :, :end])
    assert cache.length == 70


def test_a_window_bounds_the_buffer():
    """Each call returns the new tokens and the window's other tokens, in a buffer that does not
    grow with the text.
    """
    key, value = torch.randn(2, 2, 3, 500, 4).unbind()
    cache = LayerCache(500, window=8)
    start = 0
    for new in (20, 1, 1, 30, *[1] * 200, 40):
        keys, values = cache.append(
            key[:, :, start : start + new], value[:, :, start : start + new]
        )
        first = max(0, start - 7)
        start += new
        assert torch.equal(keys, key[:, :, first:start])
        assert torch.equal(values, value[:, :, first:start])
        assert cache.length == start
        assert keys.untyped_storage().nbytes() <= (7 + 40 + 8) * 2 * 3 * 4 * 4


def test_select():
    """Keys, values, and the prefix sums of a decay, of more heads and in another dtype."""
    states, sums = torch.randn(3, 2, 10, 4), torch.randn(3, 4, 10, 1, dtype=torch.float64)
    cache = KVCache([FULL] * 2)
    for layer in cache.layers:
        assert layer.last() is None
        layer.append(states[:, :, :4], states[:, :, :4], sums[:, :, :4])
    cache.select(torch.tensor([2, 0]))
    assert cache.length == 4
    assert torch.equal(cache.layers[1].last()[2], sums[[2, 0], :, 3:4])
    keys, _, all_sums = cache.layers[1].append(
        *(part[[2, 0], :, 4:6] for part in (states, states, sums))
    )
    assert torch.equal(keys, states[[2, 0], :, :6])
    assert torch.equal(all_sums, sums[[2, 0], :, :6])


@pytest.mark.parametrize("sinks", [0, 1, 3, 20])
def test_sinks_stay_in_front_of_the_window(sinks):
    (states,) = torch.randn(1, 2, 3, 60, 4)
    cache = LayerCache(window=5, sinks=sinks)
    start = 0
    for new in (1, 1, 2, 9, *[1] * 20, 7):
        (kept,) = cache.append(states[:, :, start : start + new])
        first = max(0, start - 4)
        start += new
        expected = torch.cat((states[:, :, : min(sinks, first)], states[:, :, first:start]), 2)
        assert torch.equal(kept, expected)
