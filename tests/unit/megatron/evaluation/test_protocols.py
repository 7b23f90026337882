"""Evaluation protocols: which tokens are scored, and with how much context."""

import numpy as np
import pytest

from megatron.evaluation.protocols import Segments, parse_protocol
from tests.support.errors import assert_rejected


def plan(protocol: str, *arguments) -> list[Segments]:
    return parse_protocol(protocol).plan(*arguments)


def scored_targets(segments: Segments) -> list[int]:
    """The stream positions of the targets, in the order in which they are scored."""
    return [
        start + position + 1
        for start in segments.starts
        for position in range(segments.first, segments.length)
    ]


def test_every_length_scores_the_same_targets():
    segments_by_length = plan("non-overlapping", 1000, [8, 16, 64], None)
    assert [segments.length for segments in segments_by_length] == [8, 16, 64]
    for segments in segments_by_length:
        assert scored_targets(segments) == list(
            range(1, 961)
        )  # 960 = 15 * 64, the most that fits into 999
        assert segments.targets == 960


@pytest.mark.parametrize("name", ["non-overlapping", "last-k@8", "sliding@8"])
def test_the_budget_limits_every_length_to_the_same_targets(name):
    targets = [sorted(scored_targets(segments)) for segments in plan(name, 700, [16, 32, 64], 200)]
    assert targets[0] == targets[1] == targets[2]
    assert 0 < len(targets[0]) <= 200
    assert len(set(targets[0])) == len(targets[0])


@pytest.mark.parametrize(
    ("available", "budget", "total"),
    [(1025, None, 1024), (1024, None, 960), (65, None, 64), (10_000, 500, 448)],
)
def test_the_last_token_is_a_target_and_the_budget_holds(available, budget, total):
    assert [part.targets for part in plan("non-overlapping", available, [32, 64], budget)] == [
        total,
        total,
    ]


def test_lengths_that_do_not_divide_the_longest_share_a_multiple():
    segments = plan("non-overlapping", 500, [12, 18, 24], None)
    assert {part.targets for part in segments} == {432}  # 6 * lcm(12, 18, 24)
    assert scored_targets(segments[0]) == scored_targets(segments[1]) == scored_targets(segments[2])


def test_ranks_share_the_segments():
    segments = plan("non-overlapping", 1000, [8], None)[0]
    shares = [segments.shard(rank, 3) for rank in range(3)]
    assert sorted(start for share in shares for start in share.starts) == list(segments.starts)
    assert list(shares[1].starts[:2]) == [8, 32]


@pytest.mark.parametrize(
    ("name", "available", "lengths", "budget", "message"),
    [
        ("non-overlapping", 64, [32, 64], None, "64.*64"),
        ("non-overlapping", 1000, [64], 50, "50.*64"),
        ("non-overlapping", 1000, [7, 11, 13], None, "7, 11, 13.*1,001.*999"),
        ("kerple", 1000, [8], None, "124.*8.*kerple@124"),
        ("kerple@2", 16, [8], None, "1.*8.*kerple@1"),
        ("last-k", 9000, [128, 512], None, "128.*last-k@128"),
        ("last-k@8", 65, [64], 7, "7.*8.*last-k@8"),
    ],
)
def test_rejected_plans(name, available, lengths, budget, message):
    assert_rejected(message, plan, name, available, lengths, budget)


@pytest.mark.parametrize(
    ("name", "available", "budget", "starts"),
    [
        ("non-overlapping", 65, 64, [0]),
        ("kerple@2", 129, None, [0, 64]),
        ("last-k@8", 65, 8, [0]),
        ("last-k@8", 129, None, [0, 64]),
        ("sliding@8", 81, None, [0, 8, 16]),
        ("sliding@8", 80, 16, [0, 8]),
    ],
)
def test_the_smallest_streams_and_budgets(name, available, budget, starts):
    (segments,) = plan(name, available, [64], budget)
    assert list(segments.starts) == starts


@pytest.mark.parametrize("name", ["overlapping", "last-k@0", "non-overlapping@3"])
def test_unknown_names(name):
    assert_rejected(f"'{name}'.*non-overlapping, kerple", parse_protocol, name)


@pytest.mark.parametrize(
    ("name", "pieces"), [("non-overlapping", 6), ("last-k@8", 50), ("sliding@8", 50)]
)
def test_the_budget_is_evenly_spaced_in_the_stream(name, pieces):
    """Gaps between the scored pieces, and those at both ends, are equal up to rounding."""
    available = 10_000
    segments = plan(name, available, [16, 64], 400)[1]
    starts = np.array(segments.starts)
    assert len(starts) == pieces
    gaps = np.diff(starts)
    assert gaps.max() - gaps.min() <= 1
    assert starts[0] == 0
    assert available - 1 - (starts[-1] + 64) <= gaps.max()
    assert starts[-1] + 64 <= available - 1


@pytest.mark.parametrize("name", ["non-overlapping", "last-k@8", "sliding@8"])
def test_a_budget_for_all_of_the_stream_changes_nothing(name):
    for budget in (999, 10_000):
        assert plan(name, 1000, [16, 64], budget) == plan(name, 1000, [16, 64], None)
