"""Spans, key masks, the validation of calls, and the capabilities of backends."""

import pytest
import torch

from kerple.attention import (
    FULL,
    Attention,
    Documents,
    PositionTables,
    Span,
    attend,
    position_tables,
)
from kerple.attention.backends import sdpa
from kerple.attention.call import AttentionCall
from kerple.attention.parts import run_blocks
from kerple.positional import ModelShape, TableJacobian, XPos, build, primary_names
from tests.support.attention import (
    attend_with,
    dense_attention,
    random_states,
    upstream_gradient,
    visible_pairs,
)
from tests.support.methods import VARIANTS


def jacobian(*shape: int) -> TableJacobian:
    return TableJacobian(torch.ones(2, 1), torch.ones(shape))


INTEGERS = torch.zeros(1, 6, dtype=torch.long)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.randn(1, 2, 6, 5)}, r"query \[1, 2, 6, 4\], key \[1, 2, 6, 5\]"),
        ({"query": torch.randn(2, 6, 4)}, r"query \[2, 6, 4\]"),
        (
            {"query": torch.randn(1, 6, 2, 4), "bias_table": torch.zeros(2, 6)},
            r"\[1, 6, 2, 4\] .*transpose\(1, 2\)",
        ),
        ({"value": torch.randn(1, 1, 6, 4)}, r"key \[1, 2, 6, 4\] and value \[1, 1, 6, 4\]"),
        (
            {name: torch.randn(1, 3, 6, 4) for name in ("key", "value")},
            r"key \[1, 3, 6, 4\] .*g divides h",
        ),
        (
            {name: torch.randn(1, 0, 6, 4) for name in ("key", "value")},
            r"key \[1, 0, 6, 4\] .*g divides h",
        ),
        (
            {name: torch.randn(2, 2, 6, 4) for name in ("key", "value")},
            r"query \[1, 2, 6, 4\], key \[2, 2, 6, 4\]",
        ),
        ({"query": torch.randn(1, 2, 7, 4)}, "7 queries for 6 keys"),
        ({"query": torch.randn(1, 2, 0, 4)}, "0 queries for 6 keys"),
        (
            {"causal": False} | {name: torch.randn(1, 2, 0, 4) for name in ("key", "value")},
            "6 queries for 0 keys",
        ),
        ({"query": torch.randn(1, 2, 7, 4), "causal": False, "window": 3}, "7 queries for 6 keys"),
        ({"query": torch.randn(1, 2, 6, 4).bfloat16()}, "dtype: torch.bfloat16, torch.float32"),
        ({"value": torch.randn(1, 2, 6, 4).double()}, "dtype: .*float32, torch.float64"),
        (
            {name: torch.ones(1, 2, 6, 4).long() for name in ("query", "key", "value")},
            "int64.* floating-point",
        ),
        ({"dropout_p": 1.0}, r"dropout_p .* 1\.0"),
        ({"dropout_p": -0.5}, r"dropout_p .* -0\.5"),
        ({"scale": 0.0}, r"scale .* 0\.0"),
        ({"scale": -0.25}, r"scale .* -0\.25"),
        ({"scale": float("inf")}, "scale .* inf"),
        ({"scale": float("nan"), "backend": "reference"}, "scale .* nan"),
        ({"window": 1.5}, r"window .* 1\.5"),
        ({"block": 2.0}, r"block .* 2\.0"),
        ({"decay_sums": torch.zeros(1, 2, 6), "causal": False}, "decay_sums"),
        (
            {"query": torch.randn(1, 2, 5, 4), "document_ids": INTEGERS, "causal": False},
            "document_ids",
        ),
        ({"bias_table": torch.zeros(2, 5)}, r"bias_table \[2, 5\] must be \[2, at least 6\]"),
        ({"bias_table": torch.zeros(2, 6, 6)}, r"bias_table \[2, 6, 6\] must be \[2, at least 6\]"),
        ({"bias_table": torch.zeros(2, 2, 6)}, r"bias_table \[2, 2, 6\] must be"),
        ({"bias_table": torch.zeros(2, 6, 6), "causal": False}, r"bias_table \[2, 6, 6\] .* pair"),
        ({"bias_table": torch.zeros(3, 2, 6), "causal": False}, r"bias_table \[3, 2, 6\]"),
        ({"weight_table": torch.zeros(3, 6)}, r"weight_table \[3, 6\]"),
        (
            {"key_mask": torch.ones(1, 5, dtype=torch.bool)},
            r"key_mask .*\[1, 5\] must be bool \[1, 6\]",
        ),
        ({"key_mask": torch.ones(1, 6)}, "key_mask torch.float32"),
        ({"bias_jacobian": jacobian(2, 1, 5)}, r"bias_jacobian .* \[2, 1, 5\]"),
        ({"weight_jacobian": jacobian(1, 1, 6)}, "weight_jacobian"),
        ({"bias_jacobian": TableJacobian(torch.ones(3, 1), torch.ones(3, 1, 6))}, "bias_jacobian"),
    ],
)
def test_invalid_arguments_are_named(change, message):
    states = {name: torch.randn(1, 2, 6, 4) for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=message):
        attend_with(**{**states, **change})


def assert_backends_compute(method, states, arguments, expected, leaves):
    """Compare values and gradients of each backend that supports the method; flex has no gradients
    on a CPU.
    """
    upstream = upstream_gradient(expected)
    grads = torch.autograd.grad(expected, leaves, upstream, allow_unused=True, retain_graph=True)
    backends = ["auto", "reference", "chunked"]
    # xPos in both directions computes the products itself.
    has_products = "scale_qk" in method.hooks and not arguments.get("causal", True)
    if "modify_scores" not in method.hooks and not has_products:
        backends += [] if "weight" in method.hooks else ["sdpa"]
        backends += [] if arguments.get("block") else ["flex"]  # blocks are many slow calls
    for backend in backends:
        if backend == "flex":
            with torch.no_grad():
                actual = Attention(method, "flex")(*(part.detach() for part in states), **arguments)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
            continue
        actual = Attention(method, backend)(*states, **arguments)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        actual_grads = torch.autograd.grad(
            actual, leaves, upstream, allow_unused=True, retain_graph=True
        )
        for grad, expected_grad in zip(actual_grads, grads, strict=True):
            if expected_grad is not None:
                torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)


# Methods with each way of using positions.
SPANNED = ("kerple_power_ap_ap", "xpos", "dape_v2_kerple", "fire", "forgetting")
# Keys that take part: with padding on the left (longer than a window and a block) and on the right,
# and with a hole.
KEYS = torch.ones(3, 17, dtype=torch.bool)
KEYS[0, :6], KEYS[1, 11:], KEYS[2, 5:8] = False, False, False
SHAPE = ModelShape(num_heads=4, head_size=6, hidden_size=24, num_layers=1, max_positions=17)


@pytest.mark.parametrize("key_mask", [KEYS, None])
@pytest.mark.parametrize(
    ("name", "s", "span"),
    [
        *(
            (name, s, span)
            for name in SPANNED
            for s, span in ((17, FULL), (1, Span(window=3)), (9, Span(block=4)))
        ),
        *(("rotary", 17, FULL), ("rotary", 1, FULL), ("kerple_power_ap_ap", 17, Span(window=3))),
    ],
)
def test_values_and_gradients(name, s, span, key_mask):
    """In each backend, in flex without gradients: grouped queries, value heads of another size, and
    keys that take no part, with zero for queries without a visible key.
    """
    torch.manual_seed(0)
    method = build(name, SHAPE).double()
    leaves = random_states(4, 6, 17, batch=3, kv_heads=2)
    leaves[2] = torch.randn(3, 2, 17, 9, dtype=torch.float64, requires_grad=True)
    query, key = method.rotate(*leaves[:2], torch.arange(17), torch.arange(17))
    query, value, sums = query[:, :, -s:], leaves[2], None
    states = leaves[0][:, :, -s:], leaves[1], value
    if "decay" in method.hooks:
        sums = (-torch.rand(3, 4, 17, dtype=torch.float64)).cumsum(-1).requires_grad_()
        leaves.append(sums)
    leaves += method.parameters()
    visible = visible_pairs(17, span)[-s:]
    mask = ~(visible.expand(3, 1, s, 17) if key_mask is None else visible & key_mask[:, None, None])
    expected = dense_attention(method, query, key, value, mask, sums)
    arguments = {
        "decay_sums": sums,
        "window": span.window,
        "block": span.block,
        "key_mask": key_mask,
    }
    assert_backends_compute(method, states, arguments, expected, leaves)


def test_a_key_mask_in_each_document():
    ids = torch.tensor([[0] * 5 + [1] * 12]).expand(3, -1)
    query, key, value = random_states(4, 6, 17, batch=3)
    actual = attend(query, key, value, document_ids=ids, key_mask=KEYS)
    parts = []
    for document in (slice(0, 5), slice(5, 17)):
        parts.append(
            attend(
                *(states[:, :, document] for states in (query, key, value)),
                key_mask=KEYS[:, document],
            )
        )
    torch.testing.assert_close(actual, torch.cat(parts, dim=2), rtol=1e-9, atol=1e-11)
    masked = attend(query[:, :, -3:], key, value, document_ids=ids, key_mask=KEYS)  # with one mask
    torch.testing.assert_close(masked, actual[:, :, -3:], rtol=1e-9, atol=1e-11)


OTHER_CALLS = [
    (17, 17, 3, "key_mask"),
    (17, 17, None, "documents"),
    (5, 17, None, "key_mask"),
    (9, 6, None, ""),
]
BIDIRECTIONAL = [
    name for name in primary_names() if name not in VARIANTS and not build(name, SHAPE).causal_only
]


@pytest.mark.parametrize(
    ("name", "options", "s", "t", "window", "extra"),
    [
        *((name, {}, 17, 17, None, "") for name in BIDIRECTIONAL),
        *((name, {}, *call) for name in ("xpos", "fire") for call in OTHER_CALLS),
        *(("rpe", {"bidirectional": True}, *call) for call in ((17, 17, None, ""), *OTHER_CALLS)),
    ],
)
def test_attention_in_both_directions(name, options, s, t, window, extra, monkeypatch):
    """Values and gradients in each backend, in flex without gradients, also in chunks of queries,
    with other numbers of queries than keys, grouped queries and value heads of another size.
    """
    for limit in ("MODIFY_MIN_ROWS", "MODIFY_MAX_ROWS"):
        monkeypatch.setattr(f"kerple.attention.backends.chunk_plan.{limit}", 5)
    monkeypatch.setattr(sdpa, "MASK_ROWS", 5)
    monkeypatch.setattr(XPos, "segment", 4)
    torch.manual_seed(0)
    method = build(name, SHAPE, **options).double()
    query, key, value = random_states(4, 6, 17, batch=3, kv_heads=2)
    value = torch.cat((value, value), dim=-1)[..., :9]
    leaves = [query, key, value, *method.parameters()]
    unrotated = query[:, :, :s], key[:, :, :t], value[:, :, :t]
    states = *method.rotate(*unrotated[:2], torch.arange(s), torch.arange(t)), unrotated[2]

    distance = torch.arange(s)[:, None] - torch.arange(t)
    mask = (distance.abs() >= (window or 17)).expand(3, 1, s, t)
    arguments = {"window": window, "causal": False}
    if extra == "key_mask":
        mask, arguments["key_mask"] = mask | ~KEYS[:, None, None], KEYS
    if extra == "documents":
        parts = [slice(0, 6), slice(6, 17)]
        arguments["documents"] = Documents((torch.arange(17) >= 6).long().expand(3, -1))
        alone = [[part[:, :, tokens] for part in states] for tokens in parts]
        contexts = []
        for part, length in zip(alone, (6, 11), strict=True):
            contexts.append(
                dense_attention(method, *part, mask[:, :, :length, :length], causal=False)
            )
        expected = torch.cat(contexts, dim=2)
    else:
        expected = dense_attention(method, *states, mask, causal=False)
    assert_backends_compute(method, unrotated, arguments, expected, leaves)


BIDIRECTIONAL = build("rpe", SHAPE, bidirectional=True)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        (
            build("alibi", SHAPE),
            {"tables": torch.zeros(4, 17)},
            r"tables .*Tensor.*position_tables",
        ),
        *(
            (build(name, SHAPE), {"causal": False}, f"{class_name} .*kerple_log")
            for name, class_name in (
                ("cope", "Cope"),
                ("stick_breaking", "StickBreaking"),
                ("forgetting", "Forgetting"),
                ("cable", "Cable"),
            )
        ),
        *(
            (
                BIDIRECTIONAL,
                {
                    "tables": position_tables(BIDIRECTIONAL, 17, "cpu", causal=not causal),
                    "causal": causal,
                },
                f"causal={causal}",
            )
            for causal in (False, True)
        ),
    ],
)
def test_arguments_that_do_not_fit_the_method(method, arguments, message):
    with pytest.raises(ValueError, match=message):
        Attention(method)(*random_states(4, 6, 17), **arguments)


@pytest.mark.parametrize(
    ("dropped", "span", "documents", "message"),
    [
        (2, Span(causal=False), None, "dropped"),
        (2, FULL, Documents(torch.zeros(1, 6, dtype=torch.long)), "dropped"),
        (3, Span(block=2), None, "block 2.*3"),
        (0, Span(window=4, sinks=1), None, "sinks=1.*attend_in_mode"),
        (4, Span(block=2), None, None),
        (3, Span(window=4), None, None),
    ],
)
def test_spans_and_dropped_keys(dropped, span, documents, message):
    query, key, value = torch.randn(3, 1, 2, 6, 4)
    states = {"query": query, "key": key, "value": value}
    call = AttentionCall(**states, scale=1.0, span=span, documents=documents, dropped=dropped)
    if message is None:
        assert call.validate() is call
        return
    with pytest.raises(ValueError, match=message):
        call.validate()


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (FULL, slice(0, 5)),
        (Span(causal=False), slice(0, 9)),
        (Span(window=2), slice(2, 5)),
        (Span(window=2, causal=False), slice(2, 6)),
        (Span(window=9, causal=False), slice(0, 9)),
    ],
)
def test_keys_of_some_queries(span, expected):
    query, key, value = torch.randn(3, 1, 2, 9, 4)
    call = AttentionCall(query=query, key=key, value=value, scale=1.0, span=span)
    assert call.keys(slice(3, 5)) == expected


STATES = {name: torch.randn(1, 2, 6, 4) for name in ("query", "key", "value")}
TABLE, SUMS = torch.zeros(2, 6), torch.zeros(1, 2, 6)


def tables(bias=TABLE, weight=None, dense=None):
    jacobian = None if dense is None else TableJacobian(torch.ones(2, 1), TABLE[:, None], dense)
    return {"tables": PositionTables(bias=bias, weight=weight, bias_jacobian=jacobian)}


@pytest.mark.parametrize(
    ("before", "change"),
    [
        *(({}, {name: state[..., :3]}) for name, state in STATES.items()),
        *(({}, {name: state[:, :, :5]}) for name, state in STATES.items()),
        *(({}, {name: state.clone().requires_grad_()}) for name, state in STATES.items()),
        ({}, {name: state.double() for name, state in STATES.items()}),
        *(({}, {"span": span}) for span in (Span(4), Span(block=4), Span(causal=False))),
        (tables(weight=TABLE), tables(weight=TABLE.clone().requires_grad_())),
        *(
            (tables(), tables(**other))
            for other in (
                {"bias": None},
                {"bias": TABLE.clone().requires_grad_()},
                {"weight": TABLE},
                {"dense": 0},
            )
        ),
        (tables(dense=0), tables(dense=3)),
        ({"decay_sums": SUMS}, {"decay_sums": SUMS.clone().requires_grad_()}),
        ({}, {"decay_sums": SUMS}),
        ({}, {"method": build("rotary", SHAPE)}),
        ({}, {"key_mask": torch.ones(1, 6, dtype=torch.bool)}),
        ({}, {"dropout_p": 0.1}),
        ({}, {"products": lambda query, key, *rest: query @ key.transpose(-1, -2)}),
    ],
)
def test_calls_of_different_kinds(before, change):
    """Their backends are chosen one by one. The kind does not depend on values."""
    arguments = {**STATES, "scale": 1.0, **before}
    kind = AttentionCall(**arguments).kind
    same = {name: torch.randn(1, 2, 6, 4) for name in STATES}
    assert AttentionCall(**{**arguments, **same}).kind == kind
    assert AttentionCall(**{**arguments, **change}).kind != kind


@pytest.mark.parametrize("s", [1, 3, 7])
def test_queries_whose_biases_are_all_infinite(s):
    """They get zero, and finite gradients, in each backend; flex has no gradients on a CPU."""
    bias = torch.randn(2, 7).index_fill(0, torch.tensor([0]), float("-inf"))
    for backend in ("reference", "chunked", "sdpa", "flex"):
        states = [
            torch.randn(1, 2, length, 4, requires_grad=backend != "flex") for length in (s, 7, 7)
        ]
        context = attend(*states, bias_table=bias, backend=backend)
        assert torch.equal(context[0, 0], torch.zeros(s, 4))
        assert context[0, 1].abs().min() > 0
        if backend != "flex":
            grads = torch.autograd.grad(context.sum(), states)
            assert all(grad.isfinite().all() and not grad[0, 0].any() for grad in grads)


@pytest.mark.parametrize("batch", [0, 2])
def test_blocks_beyond_the_grid_of_a_gpu(batch, monkeypatch):
    """Several calls, each of at most the largest number of rows and heads; also for an
    empty batch.
    """
    states = torch.randn(3, batch, 2, 30, 4)
    expected = attend(*states.unbind(), block=4, backend="chunked")
    monkeypatch.setattr("kerple.attention.parts.MAX_BATCH_HEADS", 8)
    torch.testing.assert_close(attend(*states.unbind(), block=4, backend="chunked"), expected)
    assert expected.shape == (batch, 2, 30, 4)
    rows = []

    def compute(part):
        rows.append(part.query.shape[0] * part.query.shape[1])
        return part.query

    query, key, value = states
    call = AttentionCall(query=query, key=key, value=value, scale=1.0, span=Span(block=4))
    assert torch.equal(run_blocks(call, 4, compute), query)
    assert max(rows) == 4 * batch
