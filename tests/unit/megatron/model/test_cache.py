"""The key-value cache: which tokens it returns, and how large its buffers are."""

import pytest
import torch

from kerple.attention import FULL
from megatron.model.cache import KVCache, LayerCache


@pytest.mark.parametrize("max_length", [None, 70])
def test_append_returns_all_tokens_in_order(max_length):
    key, value = torch.randn(2, 2, 3, 70, 4)
    cache = LayerCache(max_length)
    for start, end in ((0, 1), (1, 60), (60, 65), (65, 70)):
        new = slice(start, end)
        keys, values = cache.append(key[:, :, new], value[:, :, new])
        assert torch.equal(keys, key[:, :, :end])
        assert torch.equal(values, value[:, :, :end])
    assert cache.length == 70


def test_a_window_bounds_the_buffer():
    """Each call returns the new tokens and the window's other tokens, in a buffer that does not
    grow with the text.
    """
    key, value = torch.randn(2, 2, 3, 500, 4)
    cache = LayerCache(500, window=8)
    start = 0
    for count in (20, 1, 1, 30, *[1] * 200, 40):
        end = start + count
        new = slice(start, end)
        keys, values = cache.append(key[:, :, new], value[:, :, new])
        expected = slice(max(0, start - 7), end)
        assert torch.equal(keys, key[:, :, expected])
        assert torch.equal(values, value[:, :, expected])
        assert cache.length == end
        assert keys.untyped_storage().nbytes() <= (7 + 40 + 8) * 2 * 3 * 4 * 4
        start = end


def test_select():
    """Keys, values, and the prefix sums of a decay, of more heads and in another dtype."""
    states = torch.randn(3, 2, 10, 4)
    sums = torch.randn(3, 4, 10, 1, dtype=torch.float64)
    cache = KVCache([FULL] * 2)
    for layer in cache.layers:
        assert layer.last() is None
        layer.append(states[:, :, :4], states[:, :, :4], sums[:, :, :4])

    # Two rows, in another order.
    rows = torch.tensor([2, 0])
    cache.select(rows)
    states, sums = states[rows], sums[rows]
    assert cache.length == 4
    layer = cache.layers[1]
    assert torch.equal(layer.last()[2], sums[:, :, 3:4])
    new = slice(4, 6)
    keys, _, all_sums = layer.append(states[:, :, new], states[:, :, new], sums[:, :, new])
    assert torch.equal(keys, states[:, :, :6])
    assert torch.equal(all_sums, sums[:, :, :6])


@pytest.mark.parametrize("sinks", [0, 1, 3, 20])
def test_sinks_stay_in_front_of_the_window(sinks):
    states = torch.randn(2, 3, 60, 4)
    cache = LayerCache(window=5, sinks=sinks)
    start = 0
    for count in (1, 1, 2, 9, *[1] * 20, 7):
        end = start + count
        (kept,) = cache.append(states[:, :, start:end])
        # The sinks that the window has left, and the window.
        first = max(0, start - 4)
        in_front = states[:, :, : min(sinks, first)]
        expected = torch.cat((in_front, states[:, :, first:end]), dim=2)
        assert torch.equal(kept, expected)
        start = end
