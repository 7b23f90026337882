"""The attention layer: layout of query_key_value, grouped-query attention, qk norm and sliding
window.
"""

import pytest
import torch

from kerple.attention import FULL, AttentionMode, Span
from kerple.positional import build
from megatron.model.attention import KVCache, LayerCache, SelfAttention, split_heads
from tests.support.language_models import model_settings


def layer(**changes) -> SelfAttention:
    settings = model_settings(**{"num_layers": 1, "hidden_size": 12, "head_size": 6, **changes})
    attention = SelfAttention(settings, build(settings.config.pos_emb, settings.config.shape))
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    return attention.double()


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_split_heads(groups):
    """Rows are numbered, so each result shows its place: per key head, its queries, the key and the
    value.
    """
    shared = 4 // groups
    rows = torch.arange(groups * (shared + 2) * 3.0)
    query, key, value = split_heads(rows.expand(2, 5, -1), 3, shared)
    assert (query.shape, key.shape, value.shape) == (
        (2, 4, 5, 3),
        (2, groups, 5, 3),
        (2, groups, 5, 3),
    )
    expected = rows.view(groups, shared + 2, 3)
    assert torch.equal(query[1, :, 4], expected[:, :shared].reshape(4, 3))
    assert torch.equal(key[1, :, 4], expected[:, shared])
    assert torch.equal(value[1, :, 4], expected[:, shared + 1])


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_layer_against_its_formula(groups, window, norm):
    changes = {
        "num_kv_heads": groups,
        "norm": norm,
        "use_qk_layernorm": True,
        "use_bias_in_attn_linear": False,
    }
    attention = layer(**changes, sliding_window_width=window and window - 1)
    assert {name for name, _ in attention.named_parameters() if "bias" in name} == (
        {"query_norm.bias", "key_norm.bias"} if norm == "layernorm" else set()
    )
    hidden = torch.randn(2, 7, 12, dtype=torch.float64)
    query, key, value = split_heads(hidden @ attention.query_key_value.weight.T, 6, 4 // groups)
    contexts = []
    for head in range(4):
        q = attention.query_norm(query[:, head])
        k = attention.key_norm(key[:, head * groups // 4])
        scores = q @ k.transpose(1, 2) / 6**0.5
        distance = torch.arange(7)[:, None] - torch.arange(7)
        hides = (distance < 0) | (distance >= (window or 7))
        contexts.append(
            scores.masked_fill(hides, -torch.inf).softmax(-1) @ value[:, head * groups // 4]
        )
    expected = torch.cat(contexts, -1) @ attention.dense.weight.T
    torch.testing.assert_close(attention(hidden), expected)


def test_the_narrower_of_two_windows_applies():
    hidden = torch.randn(1, 9, 12, dtype=torch.float64)
    attention = layer(sliding_window_width=2)
    assert torch.equal(attention(hidden, mode=AttentionMode(Span(window=5))), attention(hidden))
    narrower = attention(hidden, mode=AttentionMode(Span(window=2)))
    assert not torch.allclose(narrower, attention(hidden))
    attention.window = None
    assert torch.equal(narrower, attention(hidden, mode=AttentionMode(Span(window=2))))
    attention.window = 3
    with pytest.raises(ValueError, match=r"window \(3\) and block \(4\) are both set"):
        attention(hidden, mode=AttentionMode(Span(block=4)))


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
