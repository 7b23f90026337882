"""The attention layer: grouped-query attention, qk norm and sliding window."""

import pytest
import torch

from kerple.attention import AttentionMode, Span
from kerple.positional import build
from megatron.model.attention import SelfAttention
from megatron.model.layers import split_heads
from tests.support.language_models import model_settings


def layer(**changes) -> SelfAttention:
    settings = model_settings(**{"num_layers": 1, "hidden_size": 12, "head_size": 6, **changes})
    attention = SelfAttention(settings, build(settings.config.pos_emb, settings.config.shape))
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    return attention.double()


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
