"""Methods whose values depend on the size of the part that a backend asks for."""

import pytest
import torch

from kerple.attention.part_check import part_problem
from kerple.positional import Bias, ModelShape, build, primary_names
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


@pytest.mark.parametrize("length", [1, 2, 33])
@pytest.mark.parametrize("name", primary_names())
def test_methods_of_this_package(name, length):
    method = build(name, SHAPE)
    for parameter in method.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert part_problem(method, SHAPE, length) is None
