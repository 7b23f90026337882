"""Spans, key masks, the validation of calls, and the capabilities of backends."""

import pytest
import torch

from kerple.attention import FULL, Attention, Documents, Span, attend, position_tables
from kerple.attention.backends import sdpa
from kerple.attention.call import Backend, Requirements
from kerple.positional import ModelShape, TableJacobian, XPos, build, primary_names
from tests.support.attention import SPANS, dense_attention, random_states, upstream_gradient, visible_pairs


@pytest.mark.parametrize("span", [FULL, Span(window=3), Span(block=4)])
def test_mask_and_first_key_follow_the_definition(span):
    visible = visible_pairs(11, span)
    mask = span.mask(range(5, 11), range(2, 11), "cpu")
    assert torch.equal(~mask, visible[5:, 2:])
    first_keys = [span.first_key(position) for position in range(11)]
    assert first_keys == visible.int().argmax(dim=1).tolist() == span.first_key(torch.arange(11)).tolist()
    assert visible.sum(dim=1).max() <= span.max_kv_len(11)
    assert span.mask(range(3), range(3), "meta").device.type == "meta"


def test_a_block_sees_from_half_to_all_of_the_training_length():
    """LEX, section 3.2: with blocks of l / 2, from l / 2 + 1 to l keys."""
    span = Span(block=8)
    visible = [position + 1 - span.first_key(position) for position in range(8, 100)]
    assert (min(visible), max(visible)) == (9, 16)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"window": 2, "block": 3}, r"window \(2\) and block \(3\) are both set"),
        ({"block": 0}, "block must be at least 1"),
        ({"block": 2, "causal": False}, "causal"),
        ({"window": -1}, "window must be at least 1"),
    ],
)
def test_invalid_spans_are_rejected(sizes, message):
    states = torch.randn(1, 1, 4, 2)
    with pytest.raises(ValueError, match=message):
        Span(**sizes)
    with pytest.raises(ValueError, match=message):
        attend(states, states, states, **sizes)


def jacobian(*shape: int) -> TableJacobian:
    return TableJacobian(torch.ones(2, 1), torch.ones(shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"key": torch.randn(1, 2, 6, 5)},
            r"query \[1, 2, 6, 4\], key \[1, 2, 6, 5\] and value .* do not fit together",
        ),
        ({"key": torch.randn(2, 2, 6, 4), "value": torch.randn(2, 2, 6, 4)}, "do not fit together"),
        ({"query": torch.randn(2, 6, 4)}, r"query \[2, 6, 4\].* 4 dimensions"),
        (
            {
                **{name: torch.randn(1, 6, 2, 4) for name in ("query", "key", "value")},
                "bias_table": torch.zeros(2, 6),
            },
            r"query \[1, 6, 2, 4\] .*transpose\(1, 2\)",
        ),
        ({"value": torch.randn(1, 1, 6, 4)}, r"key \[1, 2, 6, 4\] and value \[1, 1, 6, 4\] do not fit together"),
        (
            {"key": torch.randn(1, 3, 6, 4), "value": torch.randn(1, 3, 6, 4)},
            "2 query heads cannot share 3 key/value heads: the number of key/value heads must divide",
        ),
        ({"key": torch.randn(1, 0, 6, 4), "value": torch.randn(1, 0, 6, 4)}, "cannot share 0 key/value heads"),
        ({"value": torch.randn(1, 2, 5, 4)}, "do not fit together"),
        ({"query": torch.randn(1, 2, 7, 4)}, "7 queries for 6 keys"),
        ({"query": torch.randn(1, 2, 6, 4).bfloat16()}, "differ in dtype: torch.bfloat16, torch.float32"),
        ({"dropout_p": 1.0}, "dropout_p must be at least 0 and below 1; got 1.0"),
        ({"bias_table": torch.zeros(2, 2, 6)}, r"bias_table \[2, 2, 6\]"),
        ({"bias_table": torch.zeros(3, 2, 6), "causal": False}, r"bias_table \[3, 2, 6\]"),
        ({"query": torch.randn(1, 2, 7, 4), "causal": False, "window": 3}, "7 queries for 6 keys"),
        ({"decay_sums": torch.zeros(1, 2, 6), "causal": False}, "decay_sums"),
        (
            {"query": torch.randn(1, 2, 5, 4), "document_ids": torch.zeros(1, 6, dtype=torch.long), "causal": False},
            "document_ids",
        ),
        ({"bias_table": torch.zeros(2, 5)}, r"bias_table \[2, 5\] must be \[2, at least 6\]"),
        ({"weight_table": torch.zeros(3, 6)}, r"weight_table \[3, 6\] must be \[2, at least 6\]"),
        (
            {"table": torch.zeros(2, 5), "modify_scores": lambda scores, *_: scores},
            r"table \[2, 5\] must be \[..., at least 6\]: pass score_table\(method, 6, device\)",
        ),
        ({"key_mask": torch.ones(1, 5, dtype=torch.bool)}, r"key_mask .*\[1, 5\] must be bool \[1, 6\]"),
        ({"key_mask": torch.ones(1, 6)}, "key_mask torch.float32"),
        ({"bias_jacobian": jacobian(2, 1, 5)}, r"bias_jacobian .* must be \[2, p\] and \[2, p, at least 6\]"),
        ({"bias_jacobian": jacobian(2, 2, 6)}, "bias_jacobian has coefficients"),
        ({"weight_jacobian": jacobian(1, 1, 6)}, "weight_jacobian has coefficients"),
    ],
)
def test_invalid_arguments_are_named(change, message):
    states = {name: torch.randn(1, 2, 6, 4) for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=message):
        attend(**{**states, **change})


@pytest.mark.parametrize(
    ("capabilities", "requirements", "reason"),
    [
        ({"noncausal": False}, {"causal": False}, "only causal"),
        ({"weight": False}, {"weight": True}, "cannot multiply scores by a weight"),
        ({}, {"modify_scores": True}, "does not support positional methods with modify_scores"),
        ({"dropout": False}, {"dropout": True}, "does not support attention dropout"),
        ({"value_sizes": False}, {"head_size": 8, "value_size": 9}, "value heads of the size of key heads, 8, not 9"),
        ({"key_mask": False}, {"key_mask": True}, "does not support a key mask"),
        ({"dtypes": (torch.float16,)}, {"dtype": torch.float64}, "supports torch.float16, not torch.float64"),
        ({"max_head_size": 64}, {"head_size": 65}, "supports head sizes up to 64, not 65"),
        ({"max_batch_heads": 4}, {"batch_heads": 5}, "supports up to 4 for batch size times heads, not 5"),
        (
            {"training_on_cpu": False},
            {"training": True, "device": torch.device("cpu")},
            "cannot compute gradients on a CPU",
        ),
        ({"unavailable_reason": lambda requirements: "is broken"}, {"device": torch.device("cpu")}, "is broken"),
    ],
)
def test_unsupported_requirements_have_a_reason(capabilities, requirements, reason):
    backend = Backend("test", lambda call: call.query, **capabilities)
    assert reason in backend.unsupported_reason(Requirements(**requirements))
    assert backend.unsupported_reason(Requirements()) is None


# Methods with each way of using positions.
SPANNED = ("kerple_power_ap_ap", "xpos", "dape_v2_kerple", "fire", "forgetting")
# Keys that take part: with padding on the left (longer than a window and a block) and on the right, and with a hole.
KEYS = torch.ones(3, 17, dtype=torch.bool)
KEYS[0, :6], KEYS[1, 11:], KEYS[2, 5:8] = False, False, False
SHAPE = ModelShape(num_heads=4, head_size=6, hidden_size=24, num_layers=1, max_positions=17)


@pytest.mark.parametrize("s", [17, 1])
@pytest.mark.parametrize(
    ("name", "span"),
    [
        ("rotary", FULL),
        *((name, span) for name in SPANNED for span in (FULL, Span(window=3), Span(block=4))),
    ],
)
def test_keys_that_take_no_part(name, s, span):
    """Values and gradients in each backend, in flex without gradients; zero for queries without a visible key."""
    torch.manual_seed(0)
    method = build(name, SHAPE).double()
    leaves = random_states(4, 6, 17, batch=3, kv_heads=2)
    query, key = method.rotate(*leaves[:2], torch.arange(17), torch.arange(17))
    query, value, sums = query[:, :, -s:], leaves[2], None
    if "decay" in method.hooks:
        sums = (-torch.rand(3, 4, 17, dtype=torch.float64)).cumsum(-1).requires_grad_()
        leaves.append(sums)
    leaves += method.parameters()
    mask = ~(visible_pairs(17, span)[-s:] & KEYS[:, None, None])
    expected = dense_attention(method, query, key, value, mask, sums)
    upstream = upstream_gradient(expected)
    expected_grads = torch.autograd.grad(expected, leaves, upstream, allow_unused=True, retain_graph=True)
    options = {"decay_sums": sums, "window": span.window, "block": span.block, "key_mask": KEYS}
    chunks_only = "modify_scores" in method.hooks
    backends = ["auto", "reference", "chunked"]
    if not chunks_only and "weight" not in method.hooks:
        backends.append("sdpa")
    for backend in backends:
        actual = Attention(backend, method)(query, key, value, **options)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        grads = torch.autograd.grad(actual, leaves, upstream, allow_unused=True, retain_graph=True)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            if expected_grad is not None:
                torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)
    if not chunks_only:
        with torch.no_grad():
            actual = Attention("flex", method)(query.detach(), key.detach(), value.detach(), **options)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_key_mask_in_each_document():
    ids = torch.tensor([[0] * 5 + [1] * 12]).expand(3, -1)
    query, key, value = random_states(4, 6, 17, batch=3)
    actual = attend(query, key, value, document_ids=ids, key_mask=KEYS)
    parts = []
    for document in (slice(0, 5), slice(5, 17)):
        parts.append(attend(*(states[:, :, document] for states in (query, key, value)), key_mask=KEYS[:, document]))
    torch.testing.assert_close(actual, torch.cat(parts, dim=2), rtol=1e-9, atol=1e-11)
    masked = attend(query[:, :, -3:], key, value, document_ids=ids, key_mask=KEYS)  # with one mask
    torch.testing.assert_close(masked, actual[:, :, -3:], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("s", "t", "span"), SPANS)
@pytest.mark.parametrize("name", SPANNED)
def test_value_heads_of_another_size(name, s, t, span):
    torch.manual_seed(0)
    method = build(name, SHAPE).double()
    query, key, _ = random_states(4, 6, t, kv_heads=2)
    value = torch.randn(2, 2, t, 9, dtype=torch.float64, requires_grad=True)
    sums = (-torch.rand(2, 4, t, dtype=torch.float64)).cumsum(-1) if "decay" in method.hooks else None
    mask = ~visible_pairs(t, span)[None, None, -s:]
    expected = dense_attention(method, query[:, :, -s:], key, value, mask, sums)
    upstream, leaves = upstream_gradient(expected), [query, key, value, *method.parameters()]
    expected_grads = torch.autograd.grad(expected, leaves, upstream, allow_unused=True)
    others = ["sdpa"] if name in ("xpos", "forgetting") else []
    for backend in ("reference", "chunked", *others):
        actual = Attention(backend, method)(
            query[:, :, -s:], key, value, decay_sums=sums, window=span.window, block=span.block
        )
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        grads = torch.autograd.grad(actual, leaves, upstream, allow_unused=True)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            if expected_grad is not None:
                torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)
    if "modify_scores" not in method.hooks:
        with torch.no_grad():
            states = [part.detach() for part in (query[:, :, -s:], key, value)]
            actual = Attention("flex", method)(*states, decay_sums=sums, window=span.window, block=span.block)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def methods_in_both_directions():
    methods = [build(name, SHAPE) for name in primary_names()]
    names = [(name, {}) for name, method in zip(primary_names(), methods, strict=True) if not method.causal_only]
    return [*names, ("rpe", {"bidirectional": True})]


OTHER_CALLS = [(17, 17, 3, "key_mask"), (17, 17, None, "documents"), (5, 17, None, "key_mask"), (9, 6, None, "")]


@pytest.mark.parametrize(
    ("name", "options", "s", "t", "window", "extra"),
    [
        *((*method, 17, 17, None, "") for method in methods_in_both_directions()),
        *(
            (name, {}, *call)
            for name in ("kerple_power_ap_ap", "xpos", "dape_v2_kerple", "fire")
            for call in OTHER_CALLS
        ),
        *(("rpe", {"bidirectional": True}, *call) for call in OTHER_CALLS),
    ],
)
def test_attention_in_both_directions(name, options, s, t, window, extra, monkeypatch):
    """Values and gradients in each backend, in flex without gradients, also in chunks of queries, with other numbers
    of queries than keys, grouped queries and value heads of another size.
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
    query, _ = method.rotate(query[:, :, :s], key[:, :, :0], torch.arange(s), torch.arange(0))
    _, key = method.rotate(query[:, :, :0], key[:, :, :t], torch.arange(0), torch.arange(t))
    states = query, key, value[:, :, :t]

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
            contexts.append(dense_attention(method, *part, mask[:, :, :length, :length], causal=False))
        expected = torch.cat(contexts, dim=2)
    else:
        expected = dense_attention(method, *states, mask, causal=False)
    upstream = upstream_gradient(expected)
    expected_grads = torch.autograd.grad(expected, leaves, upstream, allow_unused=True, retain_graph=True)
    has_products = "modify_scores" in method.hooks or name == "xpos"
    backends = ["auto", "reference", "chunked"]
    if not has_products and "weight" not in method.hooks:
        backends.append("sdpa")
    for backend in backends:
        actual = Attention(backend, method)(*states, **arguments)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        grads = torch.autograd.grad(actual, leaves, upstream, allow_unused=True, retain_graph=True)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            if expected_grad is not None:
                torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)
    if not has_products:
        with torch.no_grad():
            actual = Attention("flex", method)(*(part.detach() for part in states), **arguments)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["cope", "stick_breaking", "forgetting", "cable"])
def test_methods_without_a_meaning_in_both_directions(name):
    method, states = build(name, SHAPE), random_states(4, 6, 5)
    with pytest.raises(ValueError, match=rf"{type(method).__name__} .*kerple_log"):
        Attention(positional=method)(*states, causal=False)


def test_tables_of_one_direction_are_rejected():
    method = build("rpe", SHAPE, bidirectional=True)
    for causal in (False, True):
        tables = position_tables(method, 17, "cpu", causal=not causal)
        with pytest.raises(ValueError, match=f"causal={causal}"):
            Attention(positional=method)(*random_states(4, 6, 17), tables=tables, causal=causal)
