"""Distance maps: the formulas at single distances, and positions whose differences are the mapped
distances.
"""

import math

import pytest
import torch

from kerple.positional.distance_maps import Clip, Group, Leaky, Linear, Log

FORMULAS = {
    Clip(6): lambda d: min(d, 6),
    Leaky(6, 2.5): lambda d: d if d < 6 else 6 + (d - 6) / 2.5,
    Group(4, 6): lambda d: d if d < 6 else d // 4 + 6 - 6 // 4,
    Linear(8).at_length(20): lambda d: d * 8 / 20,
    Linear(8).at_length(5): lambda d: d,
    Log(6): lambda d: d if d <= 6 else 6 * (1 + math.log(d / 6)),
}


@pytest.mark.parametrize("distance_map", FORMULAS)
def test_formulas(distance_map):
    distance = torch.arange(40, dtype=torch.float64)
    expected = torch.tensor([FORMULAS[distance_map](d) for d in range(40)], dtype=torch.float64)
    torch.testing.assert_close(distance_map(distance), expected, rtol=0, atol=1e-14)
    assert torch.equal(distance_map(distance)[: distance_map.near], distance[: distance_map.near])
    assert distance_map.near == (0 if isinstance(distance_map, Linear) else 6)


@pytest.mark.parametrize(("length", "longer"), [(20, 24), (48, 80), (1000, 1200), (300, 700)])
def test_integers_stay_integers(length, longer):
    """T5's buckets begin at integers, so a distance must not end just below one."""
    distances = torch.arange(longer).float()
    exact = torch.tensor([distance * length // longer for distance in range(longer)])
    assert torch.equal(Linear(length).at_length(longer)(distances).long(), exact)
    beyond_window = Leaky(1, longer / length)(distances)[1:].long() - 1
    assert torch.equal(beyond_window, exact[:-1])


@pytest.mark.parametrize("distance_map", [m for m in FORMULAS if m.piecewise_linear])
def test_far_positions(distance_map):
    query, key = torch.arange(50, 70), torch.arange(44)
    far_query, far_key = distance_map.far_positions(query, key)
    difference, mapped = far_query[:, None] - far_key, distance_map((query[:, None] - key).double())
    if isinstance(distance_map, Group):  # Self-Extend divides positions, not distances
        mapped = (query[:, None] // 4 - key // 4 + 6 - 6 // 4).double()
        assert set((mapped - distance_map((query[:, None] - key).double())).flatten().tolist()) == {
            0.0,
            1.0,
        }
    torch.testing.assert_close(difference, mapped, rtol=0, atol=1e-12)


def test_invalid_arguments():
    with pytest.raises(ValueError, match="clip: window must be at least 1, not 0"):
        Clip(0)
    with pytest.raises(ValueError, match="leaky: factor must be at least 1"):
        Leaky(4, 0.5)
    for factor in (math.inf, math.nan):
        with pytest.raises(ValueError, match=f"leaky: factor .* {factor}"):
            Leaky(4, factor)
    with pytest.raises(ValueError, match="linear: divisor"):
        Linear(8, 0.5)
    with pytest.raises(ValueError, match="at_length"):
        Linear(8)(torch.ones(1))
