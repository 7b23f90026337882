"""The learning-rate schedule against the formulas of the release."""

import math

import pytest

from megatron.training.optimizer import Schedule

PEAK, T, W = 6e-4, 50_000, 500.0


@pytest.mark.parametrize("step", [0, 1, 250, 500, 501, 10_000, 49_499, 49_500, 49_501, 50_000, 80_000])
def test_cosine_of_the_recipe(step):
    schedule = Schedule(PEAK, "cosine", T, W)
    if step <= W:
        expected = PEAK * min(step, T - W) / W
    else:
        expected = PEAK / 2 * (1 + math.cos(math.pi * (min(step, T - W) - W) / T))
    assert schedule(step) == pytest.approx(expected, rel=1e-12)


def test_other_styles_halfway():
    assert Schedule(1.0, "linear", 100, 0)(50) == pytest.approx(0.5)
    assert Schedule(1.0, "exponential", 100, 0)(100) == pytest.approx(0.5, rel=1e-3)
    assert Schedule(1.0, "constant", 100, 10)(99) == 1.0
    assert Schedule(1.0, "constant", 100, 10)(5) == 0.5


def test_never_below_the_minimum():
    schedule = Schedule(1.0, "linear", 100, 0, min_lr=0.3)
    assert schedule(60) == pytest.approx(0.4)
    assert schedule(90) == 0.3
