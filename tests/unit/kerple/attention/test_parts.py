"""Attention as several calls, against formulas and against attention without them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kerple.attention import (
    FULL,
    Attention,
    AttentionCall,
    Documents,
    Span,
    attend,
    parts,
    position_tables,
    run,
)
from kerple.positional import ModelShape, XPos, build, decay_sums, primary_names
from tests.support.attention import (
    DecayingXPos,
    attend_arguments,
    dense_attention,
    upstream_gradient,
    visible_pairs,
)
from tests.support.attention import random_states as float64_states
from tests.support.methods import VARIANTS


def test_decays_with_scaled_queries_and_keys():
    """The sums of each segment of queries are those of its keys."""
    query, key, value = float64_states(2, 4, 10)
    sums = (-torch.rand(2, 2, 10, dtype=torch.float64)).cumsum(-1)
    contexts = []
    for scale_base in (1.0, 1e9):  # segments of 4 queries, and one segment
        method = DecayingXPos(4, scale_base=scale_base)
        attention = Attention(method, "reference")
        contexts.append(attention(query, key, value, decay_sums=sums, window=3))
        method.scale_qk = lambda query, key, *positions: (query, key)
        contexts.append(attention(query, key, value, decay_sums=sums, window=3))
    torch.testing.assert_close(contexts[1], contexts[3], rtol=1e-9, atol=1e-11)
    assert not torch.allclose(contexts[0], contexts[1])


@pytest.mark.parametrize(("s", "t"), [(1, 48), (9, 64), (33, 49)])
@pytest.mark.parametrize("block", [1, 8, 100])
@pytest.mark.parametrize(
    ("name", "backends"), [("none", ("auto", "sdpa")), ("kerple_power_ap_ap", ("chunked",))]
)
def test_blockwise_attention(name, backends, block, s, t):
    method = build(name, SHAPE).double()
    query, key, value = leaves = float64_states(4, 6, t)
    leaves = [*leaves, *method.parameters()]
    mask = ~visible_pairs(t, Span(block=block))[None, None, -s:]
    expected = dense_attention(method, query[:, :, -s:], key, value, mask)
    grads = torch.autograd.grad(expected, leaves, upstream_gradient(expected))
    for backend in ("reference", *backends):
        tables = position_tables(method, t, query.device)
        actual = Attention(method, backend)(
            query[:, :, -s:], key, value, block=block, tables=tables
        )
        actual_grads = torch.autograd.grad(actual, leaves, upstream_gradient(expected))
        exact = (actual, *actual_grads[:3]), (expected, *grads[:3])
        torch.testing.assert_close(*exact, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(
            actual_grads[3:], grads[3:], rtol=1e-5, atol=1e-6
        )  # tables are float32


# Ragged documents; of equal size; with padding on both sides; with padding inside, as after
# right-padded prompts.
IDS = torch.tensor(
    [
        [0] * 3 + [1] * 7 + [2] * 5 + [3] * 2,
        [0] * 7 + [1] * 7 + [2] * 3,
        [-1] * 4 + [5] * 9 + [-1] * 4,
        [8] * 5 + [-1] * 6 + [8] * 6,
    ]
)
BATCH, LENGTH = IDS.shape
SHAPE = ModelShape(num_heads=4, head_size=6, hidden_size=24, num_layers=1, max_positions=LENGTH)


@pytest.mark.parametrize("name", ["kerple_log", "fire", "xpos"])
def test_blocks_of_dropped_keys(name):
    """Blocks are those of the text, so the first key must start one."""
    method = build(name, SHAPE)
    query, key, value = (torch.randn(1, SHAPE.num_heads, 20, SHAPE.head_size) for _ in range(3))
    expected = Attention(method)(query, key, value, block=4)[:, :, -3:]
    rotated = method.rotate(query[:, :, -3:], key, torch.arange(17, 20), torch.arange(20))

    def without_first(dropped):
        return run(
            AttentionCall(
                query=rotated[0],
                key=rotated[1][:, :, dropped:],
                value=value[:, :, dropped:],
                scale=SHAPE.head_size**-0.5,
                method=method,
                tables=position_tables(method, 20, "cpu"),
                span=Span(block=4),
                dropped=dropped,
            )
        )

    torch.testing.assert_close(without_first(8), expected)
    with pytest.raises(ValueError, match=r"block 4.*6"):
        without_first(6)


# Methods with each way of using positions, for the calls with a window or blocks.
SPANNED = ("kerple_power_ap_ap", "rotary", "xpos", "dape_v2_kerple", "forgetting")


def by_document(method, states, decays, s, span):
    """Attention `[b, h, s, d]` of the last s queries, document by document, each at positions from
    0 on; zero for padding.
    """
    context = torch.zeros_like(states[0])
    for row in range(BATCH):
        for number in IDS[row].unique().tolist():
            if number < 0:
                continue
            tokens = (IDS[row] == number).nonzero().flatten()
            query, key, value = (part[row : row + 1, :, tokens] for part in states)
            sums = None if decays is None else decay_sums(decays[row : row + 1, :, tokens])
            options = {"window": span.window, "block": span.block, "decay_sums": sums}
            part = Attention(method, "reference")(query, key, value, **options)
            index = torch.zeros(LENGTH, dtype=torch.long)
            index[tokens] = torch.arange(len(tokens))
            is_token = (IDS[row] == number)[None, :, None]
            context = torch.where(
                (torch.arange(BATCH) == row)[:, None, None, None] & is_token,
                part[:, :, index],
                context,
            )
    return context[:, :, LENGTH - s :]


def backends(method, s):
    """All that support the method; flex, which is slow, for a few queries."""
    names = ["auto", "reference", "chunked"]
    if "modify_scores" not in method.hooks:
        names += [] if "weight" in method.hooks else ["sdpa"]
        names += ["flex"] if s == 3 else []
    return names


@pytest.mark.parametrize(
    ("name", "span", "s"),
    [
        *((name, FULL, LENGTH) for name in primary_names() if name not in VARIANTS),
        *((name, span, 3) for name in SPANNED for span in (FULL, Span(window=3))),
        *((name, Span(block=2), LENGTH) for name in SPANNED),
        ("kerple_power_ap_ap", Span(block=2), 4),
    ],
)
def test_a_document_is_attended_to_as_if_it_were_alone(name, s, span):
    """Values, and gradients of the states and the method's parameters (not in flex), of complete
    rows and with a KV cache. Tables and angles are float32.
    """
    torch.manual_seed(0)
    method = build(name, SHAPE).double()
    states = float64_states(4, 6, LENGTH, batch=BATCH, kv_heads=2)
    is_text = (IDS >= 0)[:, None]
    decays = None
    if "decay" in method.hooks:
        decays = -torch.rand(BATCH, 4, LENGTH, dtype=torch.float64) * is_text
    expected = by_document(method, states, decays, s, span)
    upstream = upstream_gradient(expected) * is_text[:, :, LENGTH - s :, None]
    leaves = [*states, *method.parameters()]
    expected_grads = torch.autograd.grad(expected, leaves, upstream, allow_unused=True)

    options = {"window": span.window, "block": span.block, "documents": Documents(IDS)}
    options["decay_sums"] = None if decays is None else decay_sums(decays)
    for backend in backends(method, s):
        parts = states[0][:, :, LENGTH - s :], *states[1:]
        if backend == "flex":  # it has no gradients on a CPU
            parts = [part.detach() for part in parts]
        with torch.set_grad_enabled(backend != "flex"):
            context = Attention(method, backend)(*parts, **options)
        is_query = is_text[:, :, LENGTH - s :, None]
        torch.testing.assert_close(context * is_query, expected * is_query, rtol=1e-5, atol=1e-6)
        assert context.isfinite().all()
        if backend == "flex":
            continue
        grads = torch.autograd.grad(context, leaves, upstream, retain_graph=True, allow_unused=True)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            if expected_grad is not None:
                torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("s", [LENGTH, 3])
@pytest.mark.parametrize("method", ["kerple_log", "kerple_power_ap_ap"])
def test_it_follows_the_definition(method, s):
    """softmax(weight * q.k / sqrt(d) + bias) v with an explicit mask; in flex without gradients."""
    arguments = attend_arguments(method, BATCH, 4, s, LENGTH, 8, kv_heads=4)
    query, key, value, bias, weight, _ = arguments.values()
    positions = torch.tensor([[(row[:i] == row[i]).sum() for i in range(LENGTH)] for row in IDS])
    distance = positions[:, LENGTH - s :, None] - positions[:, None]
    mask = (IDS[:, LENGTH - s :, None] != IDS[:, None]) | (distance < 0)
    distance = distance.clamp(min=0)
    scores = query @ key.transpose(2, 3) / 8**0.5
    if weight is not None:
        scores = scores * weight[:, distance].transpose(0, 1)
    scores = scores + bias[:, distance].transpose(0, 1)
    expected = scores.masked_fill(mask[:, None], float("-inf")).softmax(-1) @ value
    is_text = (IDS[:, LENGTH - s :] >= 0)[:, None, :, None]
    leaves = [part for part in (query, key, value, bias, weight) if part is not None]
    upstream = upstream_gradient(expected) * is_text
    expected_grads = torch.autograd.grad(expected, leaves, upstream)
    supported = ["reference", "chunked"] if weight is not None else ["reference", "chunked", "sdpa"]
    for backend in supported:
        actual = attend(backend=backend, document_ids=IDS, **arguments)
        torch.testing.assert_close(actual * is_text, expected * is_text, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(
            torch.autograd.grad(actual, leaves, upstream), expected_grads, rtol=1e-6, atol=1e-8
        )
    states = {
        name: part.detach() if isinstance(part, torch.Tensor) else part
        for name, part in arguments.items()
    }
    actual = attend(backend="flex", document_ids=IDS, **states)
    torch.testing.assert_close(actual * is_text, expected * is_text, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa", "flex"])
def test_a_window_counts_only_the_tokens_of_the_document(backend):
    """Its keys may be far away in the row."""
    ids = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]])
    query, key, value = (states.detach() for states in float64_states(2, 4, 8, batch=1))
    alone = (states[:, :, ids[0] == 0] for states in (query, key, value))
    expected = attend(*alone, window=3, backend="reference")[:, :, 2:]
    actual = attend(query[:, :, 6:], key, value, window=3, document_ids=ids, backend=backend)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("s", [9, 3])
@pytest.mark.parametrize("method", ["kerple_log", "xpos", "dape_kerple"])
def test_one_document_per_row_changes_nothing(method, s, monkeypatch):
    """The states are not copied, so it costs nothing; also with a KV cache."""
    monkeypatch.setattr(parts, "run_documents", None)
    attention = Attention(build(method, SHAPE).double())
    query, key, value = float64_states(4, 6, 9, batch=2)
    states = query[:, :, 9 - s :], key, value
    documents = Documents(torch.tensor([[4] * 9, [0] * 9]))
    torch.testing.assert_close(attention(*states, documents=documents), attention(*states))
    if s == 9:
        assert torch.equal(attention(*states, documents=documents), attention(*states))


@pytest.mark.parametrize("method", ["none", "kerple_power_ap_ap", "xpos", "forgetting"])
def test_padding_alone_has_gradients(method):
    attention, states = Attention(build(method, SHAPE)), float64_states(4, 6, 9)
    options = {"documents": Documents(torch.full((2, 9), -1))}
    if method == "forgetting":
        options["decay_sums"] = decay_sums(attention.positional.decay(torch.randn(2, 9, 24)))
    context = attention(*states, **options)
    assert torch.equal(context, torch.zeros_like(states[0]))
    grads = torch.autograd.grad(context.sum(), [*states, *attention.positional.parameters()])
    assert not any(grad.any() for grad in grads)


def test_documents_at_other_positions():
    """FIRE depends on the position of the query, not only on the distance. Rows begin at different
    positions.
    """
    method, states = (
        build("fire", SHAPE),
        [part.float() for part in float64_states(4, 6, LENGTH, batch=2)],
    )
    positions = torch.arange(LENGTH) + torch.tensor([[0], [900]])
    documents = Documents(torch.zeros(2, LENGTH, dtype=torch.int64), positions)
    for s in (LENGTH, 3):
        query, key, value = states[0][:, :, LENGTH - s :], *states[1:]
        tables = position_tables(method, LENGTH, "cpu")
        actual = Attention(method, "chunked")(query, key, value, tables=tables, documents=documents)
        for row, dropped in enumerate((0, 900)):
            part = [part[row : row + 1] for part in (query, key, value)]
            names = dict(zip(("query", "key", "value"), part, strict=True))
            options = {
                "scale": SHAPE.head_size**-0.5,
                "method": method,
                "tables": tables,
                "dropped": dropped,
            }
            expected = run(AttentionCall(**names, **options), "chunked")
            torch.testing.assert_close(actual[row : row + 1], expected)
    assert not torch.allclose(actual[1:], Attention(method, "chunked")(*part))


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *((backend, "kerple_log") for backend in ("reference", "chunked", "sdpa", "flex")),
        *(
            ("chunked", name) for name in ("stick_breaking", "xpos")
        ),  # their documents have calls of their own
    ],
)
@torch.no_grad()
def test_queries_at_given_places(backend, name):
    """As in a static cache, which has unused places after the queries. In the second row, they are
    later keys.
    """
    torch.manual_seed(0)
    method = build(name, ModelShape(4, 8, 32, 1, 14))
    query, key, value = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64).unbind()
    expected = Attention(method, "chunked")(query[:, :, 6:], key, value)
    padded = [F.pad(states, (0, 0, 0, 5), value=7.0) for states in (key, value)]
    ids = torch.tensor([[0] * 9 + [-1] * 5, [0] * 14])
    documents = Documents(ids, queries=torch.arange(6, 9))
    actual = Attention(method, backend)(query[:, :, 6:], *padded, documents=documents)
    torch.testing.assert_close(actual, expected)
    apart = Documents(ids, queries=torch.tensor([3, 6, 7]))
    if name in ("stick_breaking", "xpos"):
        with pytest.raises(ValueError, match="follow each other"):
            Attention(method, "chunked")(query[:, :, 6:], *padded, documents=apart)


def test_xpos_in_both_directions_at_far_positions():
    """In half precision, the scales of keys at the other end of the text would overflow."""
    torch.manual_seed(0)
    method = XPos(4, scale_base=2.0)
    states = [part.requires_grad_() for part in torch.randn(3, 1, 1, 400, 4).half()]
    context = Attention(method)(*states, causal=False)
    rotated = *method.rotate(*states[:2], torch.arange(400), torch.arange(400)), states[2]
    expected = dense_attention(
        method, *(part.double() for part in rotated), torch.zeros(()).bool(), causal=False
    )
    torch.testing.assert_close(context.double(), expected, rtol=1e-2, atol=1e-3)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(context.sum(), states))


def masked_language_model_loss(causal: bool) -> float:
    """The last loss of a layer with xPos that fills in one token of a text of three tokens and
    their repetition.
    """
    torch.manual_seed(0)
    method = XPos(16, scale_base=8.0)
    embedding, query_key_value, output = nn.Embedding(9, 32), nn.Linear(32, 96), nn.Linear(32, 8)
    parameters = nn.ModuleList((embedding, query_key_value, output)).parameters()
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(300):
        text = torch.randint(8, (32, 3)).repeat(1, 2)
        masked = F.one_hot(torch.randint(6, (32,)), 6).bool()
        states = query_key_value(embedding(text.masked_fill(masked, 8))).view(32, 6, 3, 2, 16)
        query, key, value = states.permute(2, 0, 3, 1, 4)
        context = Attention(method)(query, key, value, causal=causal)
        loss = F.cross_entropy(output(context.transpose(1, 2).flatten(2))[masked], text[masked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.ci
def test_masked_language_modeling_with_xpos():
    """Causal attention does not see the repetition of the first three tokens, so it guesses half of
    them: ln(8) / 2.
    """
    assert masked_language_model_loss(causal=False) < 0.01
    assert masked_language_model_loss(causal=True) > 0.5
