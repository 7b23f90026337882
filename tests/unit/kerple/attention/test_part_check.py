"""Methods whose values depend on the size of the part that a backend asks for."""

import pytest

from kerple.attention.part_check import part_problem
from kerple.positional import Bias, ModelShape
from kerple.positional.base import ScoreModifier

SHAPE = ModelShape(num_heads=2, head_size=8, hidden_size=16, num_layers=2, max_positions=64)


class ByLargestDistance(Bias):
    def bias(self, distance):
        return -(distance / distance.max().clamp(min=1)).expand(2, *distance.shape)


class ByNumberOfKeys(ScoreModifier):
    def modify_scores(self, chunk):
        return chunk.scores / chunk.scores.shape[-1]


@pytest.mark.parametrize(
    ("method", "hook"), [(ByLargestDistance, "bias"), (ByNumberOfKeys, "modify_scores")]
)
def test_values_that_depend_on_the_part(method, hook):
    problem = part_problem(method(), SHAPE, 48)
    assert problem is not None
    assert f"{method.__name__}.{hook}" in problem
