"""Positional methods whose gradients are not finite are detected, whichever hooks they implement."""

import pytest
import torch
from torch import nn

from kerple.attention import non_finite_gradients
from kerple.positional import KerpleLog, ModelShape, PositionalMethod, build

SHAPE = ModelShape(2, 4, 8, 1, 16)


class Root(PositionalMethod):
    """-sqrt(slope * distance + floor) and an offset."""

    def __init__(self, floor: float):
        super().__init__()
        self.slope = nn.Parameter(torch.rand(2, 1) + 0.1)
        self.offset = nn.Parameter(torch.zeros(2, 1))
        self.floor = floor

    def bias(self, distance):
        return self.offset - (self.slope * distance + self.floor).sqrt()


class RootWeight(Root):
    bias = None
    weight = Root.bias


class RootScores(Root):
    bias = None

    def modify_scores(self, chunk):
        distance = (chunk.query_positions[:, None] - chunk.key_positions).clamp(min=0)
        return chunk.scores - (self.slope[:, None] * distance).sqrt()


def test_sqrt_at_distance_0():
    assert non_finite_gradients(Root(0.0), SHAPE) == ["slope"]
    assert non_finite_gradients(Root(1e-6), SHAPE) == []
    assert non_finite_gradients(RootWeight(0.0), SHAPE) == ["slope"]
    assert non_finite_gradients(RootScores(0.0), SHAPE) == ["slope"]


def test_only_trained_parameters_count():
    method = Root(0.0)
    method.slope.requires_grad_(False)
    assert non_finite_gradients(method, SHAPE) == []
    assert non_finite_gradients(build("none", SHAPE), SHAPE) == []


def test_without_gradients_enabled():
    with torch.no_grad():
        assert non_finite_gradients(Root(0.0), SHAPE) == ["slope"]
        assert non_finite_gradients(KerpleLog(2), SHAPE) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [("kerple_log", {"random_range": 64}), ("fire", {"random_range": 64}), ("forgetting", {}), ("learned", {})],
)
def test_random_positions_and_heads_smaller_than_the_hidden_size(name, options):
    shape = ModelShape(num_heads=2, head_size=4, hidden_size=12, num_layers=1, max_positions=10)
    method = build(name, shape, **options)
    method.reset_parameters()
    assert non_finite_gradients(method, shape) == []
