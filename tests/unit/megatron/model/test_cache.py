"""The key-value cache: order of the tokens, growth, and selection of rows."""

import pytest
import torch

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


def test_truncate_and_select():
    states = torch.randn(3, 2, 10, 4)
    cache = KVCache(2)
    for layer in cache.layers:
        layer.append(states, states)
    cache.truncate(4)
    cache.select(torch.tensor([2, 0]))
    assert cache.length == 4
    keys, _ = cache.layers[1].append(states[[2, 0], :, 4:6], states[[2, 0], :, 4:6])
    assert torch.equal(keys, states[[2, 0], :, :6])
