"""Methods that depend on positions through their differences alone give at 60,000 what they give at 0."""

import pytest
import torch

from kerple.attention import score_table
from kerple.positional import ModelShape, build, primary_names

SHAPE = ModelShape(num_heads=2, head_size=8, hidden_size=16, num_layers=1, max_positions=64)
LENGTH = 6
BUILT = {name: build(name, SHAPE) for name in primary_names()}
# FIRE divides by the query's position, beyond its threshold.
ABSOLUTE = {"fire", "dape_fire", "dape_v2_fire"}


@torch.no_grad()
def scores(name: str, shift: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 2, LENGTH, 8, generator=generator).unbind(0)
    method, positions = BUILT[name], torch.arange(LENGTH) + shift
    query, key = method.rotate(query, key, positions, positions)
    if method.scales_qk:
        query, key = method.scale_qk(query, key, positions, positions)
    found = query @ key.transpose(-1, -2) / 8**0.5
    mask = positions > positions[:, None]
    if method.modifies_scores:
        found = method.modify_scores(found, query, positions, positions, mask, score_table(method, LENGTH, "cpu"))
    return found.masked_fill(mask, 0.0)


@pytest.mark.parametrize("name", [name for name, one in BUILT.items() if one.rotates or one.modifies_scores])
def test_scores_far_away_are_those_at_the_beginning(name):
    near, far = scores(name, 0), scores(name, 60_000)
    if name in ABSOLUTE:
        assert (far - near).abs().max() > 1e-3
    else:
        torch.testing.assert_close(far, near, rtol=0, atol=2e-6)
