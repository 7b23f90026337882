"""The front door."""

import pytest
import torch
from torch import nn

import kerple
from kerple import Attention, KerpleLog, Rotary, XPos, attend
from kerple.attention import Documents, document_positions, tables
from kerple.positional import ModelShape, primary_names

SHAPE = ModelShape(num_heads=2, head_size=4, hidden_size=8, num_layers=1, max_positions=16)


def random_states(batch=1, length=9):
    """Query, key and value `[b, 2, s, 4]`."""
    return torch.randn(3, batch, 2, length, 4).unbind()


def test_a_model_with_attention_has_the_parameters_of_the_method():
    method = KerpleLog(num_heads=2)
    model = nn.ModuleDict({"attention": Attention(method)})
    parameters = dict(model.named_parameters())
    assert set(parameters) == {"attention.positional.bias_p", "attention.positional.bias_a"}
    context = model["attention"](*random_states())
    context.square().sum().backward()
    for parameter in parameters.values():
        assert parameter.grad.abs().min() > 0


def test_it_equals_attention_with_the_method_s_tables():
    method = KerpleLog(num_heads=2)
    states = random_states()
    bias, _ = tables(method, 9, "cpu")
    expected = attend(*states, bias_table=bias)
    torch.testing.assert_close(Attention(method)(*states), expected)


@pytest.mark.parametrize("s", [9, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_queries_and_keys_are_rotated_at_their_positions(s, causal):
    """The queries are the last positions; if attention is not causal, the first ones."""
    method = Rotary(4)
    query, key, value = random_states()
    positions = torch.arange(9)
    queries = positions[:s]
    if causal:
        queries = positions[-s:]
    query = query[:, :, queries]
    rotated = method.rotate(query, key, queries, positions)
    expected = attend(*rotated, value, causal=causal)
    context = Attention(method)(query, key, value, causal=causal)
    torch.testing.assert_close(context, expected)


def test_the_positions_of_documents_are_those_in_the_documents():
    """The tokens of the first document have those of the second one between them."""
    attention = Attention(Rotary(4))
    ids = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    assert document_positions(ids)[0].tolist() == [0, 1, 0, 1, 2, 2, 3]
    states = random_states(batch=2, length=7)
    context = attention(*states, documents=ids)
    assert torch.equal(context, attention(*states, documents=Documents(ids)))

    # Each document on its own.
    for row, number in ((0, 0), (0, 1), (1, 0)):
        tokens = ids[row] == number
        part = [state[row, None][:, :, tokens] for state in states]
        torch.testing.assert_close(context[row, None][:, :, tokens], attention(*part))


def test_misplaced_arguments_are_named():
    without_batch = torch.randn(3, 2, 6, 4)
    with pytest.raises(ValueError, match=r"query\[None\]"):
        Attention(KerpleLog(2))(*without_batch)
    with pytest.raises(TypeError, match="'chunked'"):
        Attention("chunked", KerpleLog(2))


@pytest.mark.parametrize("method", [KerpleLog(2), Rotary(4), XPos(4)])
def test_documents_of_other_tokens_are_rejected(method):
    """Before the rotation, in which they would be broadcast."""
    attention = Attention(method)
    query, key, value = random_states(batch=2, length=7)
    ids = torch.zeros(2, 7, dtype=torch.long)
    for other_ids in (ids[:, :6], ids[:1]):
        with pytest.raises(ValueError, match=r"document_ids .* must be \[2, 7\]"):
            attention(query, key, value, documents=other_ids)
    with pytest.raises(ValueError, match="as many queries as keys"):
        attention(query[:, :, :1], key, value, documents=ids, causal=False)
    with pytest.raises(ValueError, match="int64"):
        attention(query.long(), key.long(), value.long())

    # An empty batch is not rejected.
    empty = random_states(batch=0, length=7)
    assert attention(*empty, documents=ids[:0]).shape == (0, 2, 7, 4)


def test_the_package_offers_attention_and_all_methods():
    assert kerple.KerpleLog is KerpleLog
    offered = set(dir(kerple.positional))
    for name in primary_names():
        method = kerple.build(name, SHAPE)
        assert type(method).__name__ in offered
    with pytest.raises(AttributeError, match="KerpelLog"):
        kerple.KerpelLog  # noqa: B018
