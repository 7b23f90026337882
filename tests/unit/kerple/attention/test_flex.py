"""FlexAttention as a backend against the reference, forward: on a CPU it has no backward pass."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kerple.attention import attend, score_mod, tables
from kerple.positional import KerpleLog, ModelShape, NoPositions, Rotary, build, primary_names


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("s", "t"), [(1, 1), (7, 7), (128, 128), (100, 513)])
@pytest.mark.parametrize("method", ["none", "alibi", "kerple_log", "kerple_power__ap", "kerple_power_ap_ap", "rpe"])
def test_values(method, s, t, window):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, length, 16) for length in (s, t, t))
    with torch.no_grad():
        positional = build(method, ModelShape(2, 16, 32, 1, t))
        bias, weight = tables(positional, t if window is None else min(t, window), "cpu")
        found = attend(query, key, value, bias_table=bias, weight_table=weight, window=window, backend="flex")
        expected = attend(
            *(states.double() for states in (query, key, value)),
            bias_table=None if bias is None else bias.double(),
            weight_table=None if weight is None else weight.double(),
            window=window,
            backend="reference",
        )
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_what_it_cannot_serve_is_refused_by_name():
    states = [torch.randn(1, 1, 4, 8)] * 3
    with pytest.raises(NotImplementedError, match="'flex' cannot compute gradients on a CPU"):
        attend(states[0].requires_grad_(), *states[1:], backend="flex")
    with pytest.raises(NotImplementedError, match="'flex' does not support attention dropout"):
        attend(*states, dropout_p=0.5, backend="flex")


SHAPE = ModelShape(num_heads=4, head_size=8, hidden_size=32, num_layers=2, max_positions=64)
METHODS = {name: build(name, SHAPE) for name in primary_names()}


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.has_bias or method.has_weight])
@pytest.mark.parametrize("queries", [24, 5])
@torch.no_grad()
def test_score_mod_in_flex_attention(name, queries):
    torch.manual_seed(0)
    method, length = build(name, SHAPE), 24
    query, key, value = (torch.randn(2, 4, size, 8) for size in (queries, length, length))
    offset = length - queries
    mask = create_block_mask(
        lambda b, h, q, k: q + offset >= k, None, None, queries, length, device="cpu", BLOCK_SIZE=8
    )
    found = flex_attention(
        query, key, value, score_mod=score_mod(method, length, "cpu", offset=offset), block_mask=mask
    )
    bias, weight = tables(method, length, "cpu")
    bias, weight = (None if table is None else table.double() for table in (bias, weight))
    expected = attend(
        query.double(), key.double(), value.double(), bias_table=bias, weight_table=weight, backend="reference"
    )
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    plain = attend(query.double(), key.double(), value.double(), backend="reference")
    assert (plain - expected).abs().max() > 1e-3


def test_methods_without_tables_have_no_score_mod():
    with pytest.raises(ValueError, match=r"Rotary has no bias or weight .*apply its rotate to queries and keys"):
        score_mod(Rotary(8), 16, "cpu")
    with pytest.raises(ValueError, match="NoPositions has no bias or weight"):
        score_mod(NoPositions(), 16, "cpu")


def test_a_score_mod_is_differentiable():
    method = KerpleLog(2)
    modify = score_mod(method, 8, "cpu")
    score = torch.zeros(())
    head, query, key = torch.tensor(1), torch.tensor(7), torch.tensor(2)
    value = modify(score, torch.tensor(0), head, query, key)
    assert value == method.bias(torch.tensor([5.0]))[1, 0]
    value.backward()
    assert method.bias_p.grad[1] != 0
