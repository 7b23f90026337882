"""Splits and blends."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.data.splits import Blend, part_span, split_spans
from megatron.utils.errors import UserError
from tests.support.errors import assert_rejected

# --- splits


_SHARES = st.lists(st.floats(0, 1000) | st.integers(0, 1000), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(shares=_SHARES.filter(lambda shares: sum(shares) > 1e-6), sequences=st.integers(1, 10**7))
def test_split_equals_megatron_cores(shares, sequences):
    split = ",".join(np.format_float_positional(share) for share in shares)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    expected = [span and (round(span[0] * float(sequences)), round(span[1] * float(sequences))) for span in matrix]
    assert split_spans(split, sequences) == expected
    present = [span for span in expected if span is not None]
    assert (present[0][0], present[-1][1]) == (0, sequences)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(present))


@settings(max_examples=200, deadline=None)
@given(shares=st.lists(st.floats(0, 1e6), min_size=1, max_size=3).filter(any), documents=st.integers(0, 10**7))
def test_split_arithmetic(shares, documents):
    """Spans are adjacent, cover all documents, and each is within one document of its share."""
    spans = split_spans(",".join(map(repr, shares)), documents)
    present = [span for span in spans if span is not None]
    assert present[0][0] == 0
    assert present[-1][1] == documents
    assert all(left[1] == right[0] for left, right in itertools.pairwise(present))
    for share, span in zip(shares, spans, strict=False):
        size = 0 if span is None else span[1] - span[0]
        assert size >= 0
        assert abs(size - share / sum(shares) * documents) <= 1 + 1e-6 * documents


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "1,nan", "949 50 1", "inf,1"])
def test_invalid_split(split):
    assert_rejected("TRAIN,VALID,TEST.*949,50,1", split_spans, split, 10)


def test_part_span():
    assert split_spans("969, 30, 1", 1000) == [(0, 969), (969, 999), (999, 1000)]
    assert part_span("9,1,0", "valid", 20, "c") == (18, 20)
    assert part_span(None, "valid", 20, "c") == (0, 20)
    assert_rejected("'9,1,0'.*20", part_span, "9,1,0", "test", 20, "c")
    with pytest.raises(UserError, match="leaves no documents for valid"):
        part_span("999,1", "valid", 20, "c")
    assert_rejected("'dev'.*train, valid, test", part_span, "9,1,0", "dev", 20, "c")


@pytest.mark.parametrize(
    ("prefixes", "weights", "message"),
    [
        (("a", "b"), (1,), r"1 weights for 2 data paths \(a, b\)"),
        (("a", "b"), (1, 0), r"must be positive numbers, not \[1, 0\]"),
        (("a",), (float("nan"),), "must be positive numbers"),
        ((), None, "a list of data paths is empty"),
    ],
)
def test_invalid_blend(prefixes, weights, message):
    with pytest.raises(UserError, match=message):
        Blend(prefixes, weights)
