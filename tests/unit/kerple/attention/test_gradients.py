"""Positional methods whose gradients are not finite are detected, whichever hooks they implement."""

import torch
from torch import nn

from kerple.attention import non_finite_gradients
from kerple.positional import KerpleLog, ModelShape, PositionalMethod, build


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

    def modify_scores(self, scores, query, query_positions, key_positions, mask, table):
        distance = (query_positions[:, None] - key_positions).clamp(min=0)
        return scores - (self.slope[:, None] * distance).sqrt()


def test_sqrt_at_distance_0():
    assert non_finite_gradients(Root(0.0), 2, 4) == ["slope"]
    assert non_finite_gradients(Root(1e-6), 2, 4) == []
    assert non_finite_gradients(RootWeight(0.0), 2, 4) == ["slope"]
    assert non_finite_gradients(RootScores(0.0), 2, 4) == ["slope"]


def test_only_trained_parameters_count():
    method = Root(0.0)
    method.slope.requires_grad_(False)
    assert non_finite_gradients(method, 2, 4) == []
    assert non_finite_gradients(build("none", ModelShape(2, 4, 8, 1, 16)), 2, 4) == []


def test_without_gradients_enabled():
    with torch.no_grad():
        assert non_finite_gradients(Root(0.0), 2, 4) == ["slope"]
        assert non_finite_gradients(KerpleLog(2), 2, 4) == []
