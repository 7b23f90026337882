"""The keys that a query attends to."""

import pytest
import torch

from kerple.attention import FULL, Span, attend
from tests.support.attention import visible_pairs


@pytest.mark.parametrize("span", [FULL, Span(window=3), Span(block=4)])
def test_mask_and_first_key_follow_the_definition(span):
    visible = visible_pairs(11, span)
    mask = span.mask(range(5, 11), range(2, 11), "cpu")
    assert torch.equal(~mask, visible[5:, 2:])
    first_keys = [span.first_key(position) for position in range(11)]
    assert (
        first_keys
        == visible.int().argmax(dim=1).tolist()
        == span.first_key(torch.arange(11)).tolist()
    )
    assert visible.sum(dim=1).max() == span.max_kv_len(11)
    assert span.mask(range(3), range(3), "meta").device.type == "meta"


@pytest.mark.parametrize("span", [Span(window=3, sinks=2), Span(window=3, causal=False)])
def test_sinks_and_windows_on_both_sides(span):
    query, key = torch.arange(11)[:, None], torch.arange(11)
    visible = (query - key).abs() < 3
    if span.causal:
        visible = (visible | (key < 2)) & (key <= query)
        assert visible.sum(dim=1).max() == span.max_kv_len(11)
    for queries, keys in ((slice(0, 11), slice(0, 11)), (slice(2, 9), slice(5, 11))):
        mask = span.mask(queries, keys, "cpu")
        assert torch.equal(~mask, visible[queries, keys])


@pytest.mark.parametrize(
    "sizes", [{"sinks": 1}, {"sinks": -1}, {"window": 3, "sinks": 1, "causal": False}]
)
def test_invalid_sinks_are_rejected(sizes):
    with pytest.raises(ValueError, match="sinks"):
        Span(**sizes)


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


@pytest.mark.parametrize(
    ("span", "window", "expected"),
    [
        (FULL, None, FULL),
        (FULL, 4, Span(window=4)),
        (Span(window=3), 4, Span(window=3)),
        (Span(window=5, sinks=1), 4, Span(window=4, sinks=1)),
        (Span(block=4), None, Span(block=4)),
    ],
)
def test_the_narrower_window_counts(span, window, expected):
    assert span.within(window) == expected
