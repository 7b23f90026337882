"""Splits and blends."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.data.splits import part_span, split_spans
from tests.support.errors import assert_rejected

_SHARES = st.lists(st.floats(0, 1000) | st.integers(0, 1000), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(shares=_SHARES.filter(lambda shares: sum(shares) > 1e-6), sequences=st.integers(1, 10**7))
def test_split_equals_megatron_cores(shares, sequences):
    split = ",".join(np.format_float_positional(share) for share in shares)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    expected = [
        span and (round(span[0] * float(sequences)), round(span[1] * float(sequences)))
        for span in matrix
    ]
    assert split_spans(split, sequences) == expected
    present = [span for span in expected if span is not None]
    assert (present[0][0], present[-1][1]) == (0, sequences)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(present))


def test_part_span():
    assert split_spans("969, 30, 1", 1000) == [(0, 969), (969, 999), (999, 1000)]
    assert part_span("9,1,0", "valid", 20, "c") == (18, 20)
    assert part_span(None, "valid", 20, "c") == (0, 20)
    assert_rejected("'9,1,0'.*20", part_span, "9,1,0", "test", 20, "c")
    assert_rejected("leaves no documents for valid", part_span, "999,1", "valid", 20, "c")
