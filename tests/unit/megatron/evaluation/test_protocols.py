"""Which tokens are scored."""

import math

import pytest

from megatron.evaluation.protocols import Segments, plan
from megatron.utils.errors import UserError


def scored_targets(segments: Segments) -> list[int]:
    """The stream positions of the targets, in the order in which they are scored."""
    return [start + position + 1 for start in segments.starts for position in range(segments.first, segments.length)]


def test_every_length_scores_the_same_targets():
    parts = plan("non-overlapping", 1000, [8, 16, 64], None)
    assert [part.length for part in parts] == [8, 16, 64]
    for part in parts:
        assert scored_targets(part) == list(range(1, 961))  # 960 = 15 * 64, the most that fits into 999
        assert part.targets == 960


@pytest.mark.parametrize(("available", "budget", "total"), [(1025, None, 1024), (1024, None, 960), (10_000, 500, 448)])
def test_the_last_token_is_a_target_and_the_budget_holds(available, budget, total):
    assert [part.targets for part in plan("non-overlapping", available, [32, 64], budget)] == [total, total]


def test_lengths_that_do_not_divide_the_longest_share_a_multiple():
    parts = plan("non-overlapping", 500, [12, 18, 24], None)
    assert {part.targets for part in parts} == {432}  # 6 * lcm(12, 18, 24)
    assert 432 % math.lcm(12, 18, 24) == 0
    assert scored_targets(parts[0]) == scored_targets(parts[1]) == scored_targets(parts[2])


def test_lengths_without_a_common_multiple_are_refused():
    with pytest.raises(
        UserError, match=r"7, 11, 13 cannot score the same tokens.*up to 999 \(the least one is 1,001\)"
    ):
        plan("non-overlapping", 1000, [7, 11, 13], None)


def test_too_few_tokens():
    with pytest.raises(UserError, match="64 tokens hold no segment of 64"):
        plan("non-overlapping", 64, [32, 64], None)
    assert plan("non-overlapping", 65, [32, 64], None)[1].targets == 64


def test_too_small_a_budget_is_told_from_too_little_text():
    with pytest.raises(UserError, match="a budget of 50 tokens holds no segment of 64: give at least 64"):
        plan("non-overlapping", 1000, [64], 50)


def test_unknown_protocol():
    with pytest.raises(UserError, match="'overlapping' is not known; choose non-overlapping, kerple"):
        plan("overlapping", 100, [4], None)
