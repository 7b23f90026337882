"""The front door."""

import pytest
import torch
from torch import nn

import kerple
from kerple import Attention, KerpleLog, Rotary, XPos, attend
from kerple.attention import Documents, document_positions, tables
from kerple.positional import ModelShape, primary_names

SHAPE = ModelShape(num_heads=2, head_size=4, hidden_size=8, num_layers=1, max_positions=16)


def test_a_model_with_attention_has_the_parameters_of_the_method():
    method = KerpleLog(num_heads=2)
    model = nn.ModuleDict({"attention": Attention(method)})
    assert set(model.state_dict()) == {"attention.positional.bias_p", "attention.positional.bias_a"}
    context = model["attention"](*torch.randn(3, 1, 2, 9, 4).unbind())
    context.square().sum().backward()
    assert all(parameter.grad.abs().min() > 0 for parameter in model.parameters())


def test_it_equals_attention_with_the_method_s_tables():
    method, states = KerpleLog(num_heads=2), torch.randn(3, 1, 2, 9, 4).unbind()
    bias, _ = tables(method, 9, "cpu")
    torch.testing.assert_close(Attention(method)(*states), attend(*states, bias_table=bias))


@pytest.mark.parametrize("s", [9, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_queries_and_keys_are_rotated_at_their_positions(s, causal):
    """The queries are the last positions; if attention is not causal, the first ones."""
    method = Rotary(4)
    query, key, value = torch.randn(3, 1, 2, 9, 4).unbind()
    positions = torch.arange(9)
    queries = positions[-s:] if causal else positions[:s]
    rotated = method.rotate(query[:, :, queries], key, queries, positions)
    expected = attend(*rotated, value, causal=causal)
    torch.testing.assert_close(
        Attention(method)(query[:, :, queries], key, value, causal=causal), expected
    )


def test_the_positions_of_documents_are_those_in_the_documents():
    """The tokens of the first document have those of the second one between them."""
    method = Rotary(4)
    ids = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    query, key, value = torch.randn(3, 2, 2, 7, 4).unbind()
    context = Attention(method)(query, key, value, documents=ids)
    assert torch.equal(context, Attention(method)(query, key, value, documents=Documents(ids)))
    for row, number in ((0, 0), (0, 1), (1, 0)):
        tokens = ids[row] == number
        part = [states[row : row + 1, :, tokens] for states in (query, key, value)]
        torch.testing.assert_close(context[row : row + 1, :, tokens], Attention(method)(*part))
    assert document_positions(ids)[0].tolist() == [0, 1, 0, 1, 2, 2, 3]


def test_misplaced_arguments_are_named():
    with pytest.raises(ValueError, match=r"query\[None\]"):
        Attention(KerpleLog(2))(*torch.randn(3, 2, 6, 4))
    with pytest.raises(TypeError, match="'chunked'"):
        Attention("chunked", KerpleLog(2))


@pytest.mark.parametrize("method", [KerpleLog(2), Rotary(4), XPos(4)])
def test_documents_of_other_tokens_are_rejected(method):
    """Before the rotation, in which they would be broadcast."""
    query, key, value = torch.randn(3, 2, 2, 7, 4).unbind()
    for ids in (torch.zeros(2, 6, dtype=torch.long), torch.zeros(1, 7, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"document_ids .* must be \[2, 7\]"):
            Attention(method)(query, key, value, documents=ids)
    ids = torch.zeros(2, 7, dtype=torch.long)
    with pytest.raises(ValueError, match="as many queries as keys"):
        Attention(method)(query[:, :, :1], key, value, documents=ids, causal=False)
    empty = torch.randn(3, 0, 2, 7, 4).unbind()
    assert Attention(method)(*empty, documents=ids[:0]).shape == (0, 2, 7, 4)
    with pytest.raises(ValueError, match="int64"):
        Attention(method)(query.long(), key.long(), value.long())


def test_the_package_offers_attention_and_all_methods():
    assert kerple.KerpleLog is KerpleLog
    assert {type(kerple.build(name, SHAPE)).__name__ for name in primary_names()} <= set(
        dir(kerple.positional)
    )
    with pytest.raises(AttributeError, match="KerpelLog"):
        kerple.KerpelLog  # noqa: B018
