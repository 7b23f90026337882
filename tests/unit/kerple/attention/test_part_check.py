"""Methods whose values depend on the size of the part that a backend asks for."""

import pytest
import torch

from kerple.attention.part_check import part_problem
from kerple.positional import Bias, ModelShape, PositionalMethod, build, primary_names
from kerple.positional.base import ScoreModifier

SHAPE = ModelShape(num_heads=2, head_size=8, hidden_size=16, num_layers=2, max_positions=64)


class ByLargestDistance(Bias):
    def bias(self, distance):
        return -(distance / distance.max().clamp(min=1)).expand(2, *distance.shape)


class BySmallestDistance(PositionalMethod):
    def weight(self, distance):
        return (distance - distance.min()).expand(2, *distance.shape)


class ByNumberOfKeys(ScoreModifier):
    def modify_scores(self, chunk):
        return chunk.scores / chunk.scores.shape[-1]


class ByNumberOfDistances(ScoreModifier):
    def table(self, distance):
        return torch.full_like(distance, len(distance))

    def modify_scores(self, chunk):
        return chunk.scores


class ByNumberOfTokens(PositionalMethod):
    def embed(self, hidden, positions):
        return hidden * len(positions)


class ByLastPosition(PositionalMethod):
    def rotate(self, query, key, query_positions, key_positions):
        return query, key * float(1 + key_positions[-1])


class ByAllTokens(PositionalMethod):
    def decay(self, hidden):
        mean = hidden.mean(dim=(1, 2), keepdim=True)
        return -mean.abs().expand(-1, 2, hidden.shape[1])


@pytest.mark.parametrize("name", primary_names())
def test_values_that_do_not_depend_on_the_part(name):
    assert part_problem(build(name, SHAPE), SHAPE, 48) is None


@pytest.mark.parametrize(
    ("method", "hook"),
    [
        (ByLargestDistance, "bias"),
        (BySmallestDistance, "weight"),
        (ByNumberOfKeys, "modify_scores"),
        (ByNumberOfDistances, "table"),
        (ByNumberOfTokens, "embed"),
        (ByLastPosition, "rotate"),
        (ByAllTokens, "decay"),
    ],
)
def test_values_that_depend_on_the_part(method, hook):
    problem = part_problem(method(), SHAPE, 48)
    assert problem is not None
    assert f"{method.__name__}.{hook}" in problem
