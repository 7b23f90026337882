"""Spans, the validation of calls, and the capabilities of backends."""

import pytest
import torch

from kerple.attention import FULL, PositionTables, Span, attend
from kerple.attention.call import AttentionCall, Backend, Requirements
from kerple.positional import TableJacobian
from tests.support.attention import visible_pairs


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
        ({"bias_table": torch.zeros(2, 5)}, r"bias_table \[2, 5\] must be \[2, at least 6\]"),
        ({"weight_table": torch.zeros(3, 6)}, r"weight_table \[3, 6\] must be \[2, at least 6\]"),
        (
            {"table": torch.zeros(2, 5), "modify_scores": lambda scores, *_: scores},
            r"table \[2, 5\] must be \[..., at least 6\]: pass score_table\(method, 6, device\)",
        ),
        ({"bias_jacobian": jacobian(2, 1, 5)}, r"bias_jacobian .* must be \[2, p\] and \[2, p, at least 6\]"),
        ({"bias_jacobian": jacobian(2, 2, 6)}, "bias_jacobian has coefficients"),
        ({"weight_jacobian": jacobian(1, 1, 6)}, "weight_jacobian has coefficients"),
    ],
)
def test_invalid_arguments_are_named(change, message):
    states = {name: torch.randn(1, 2, 6, 4) for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=message):
        attend(**{**states, **change})


def test_requirements_of_a_call():
    query = torch.randn(2, 3, 4, 8, requires_grad=True)
    tables = PositionTables(weight=torch.ones(3, 4))
    call = AttentionCall(query=query, key=query, value=query, scale=1.0, tables=tables, dropout_p=0.1)
    expected = Requirements(
        weight=True,
        dropout=True,
        training=True,
        dtype=torch.float32,
        head_size=8,
        batch_heads=6,
        device=torch.device("cpu"),
    )
    assert call.requirements == expected
    with torch.no_grad():
        assert not call.requirements.training


@pytest.mark.parametrize(
    ("capabilities", "requirements", "reason"),
    [
        ({"weight": False}, {"weight": True}, "cannot multiply scores by a weight"),
        ({}, {"modify_scores": True}, "does not support positional methods with modify_scores"),
        ({"dropout": False}, {"dropout": True}, "does not support attention dropout"),
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
