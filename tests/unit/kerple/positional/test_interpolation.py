"""Interpolated and randomised rotary positions, against transformers' own and the papers' formulas."""

import math

import pytest
import torch
from transformers import GPTNeoXConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kerple.positional import PositionsExceeded, Rotary
from kerple.positional.functional import frequencies

TRAINED = 128


def theirs(kind: str, size: int, base: float, seq_len: int | None = None, **parameters) -> tuple[torch.Tensor, float]:
    config = GPTNeoXConfig(
        hidden_size=2 * size,
        num_attention_heads=2,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": kind, "rope_theta": base, "partial_rotary_factor": 1.0, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, device="cpu", seq_len=seq_len)


def same(method: Rotary, frequencies: torch.Tensor, scale: float) -> None:
    ours = torch.tensor(method.angles.own, dtype=torch.float64)
    torch.testing.assert_close(ours, frequencies.double(), rtol=1e-5, atol=0)
    assert method.angles.scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("size", [64, 16])
@pytest.mark.parametrize(("base", "factor"), [(10_000.0, 4.0), (500.0, 16)])
def test_frequencies_are_those_of_transformers(size, base, factor):
    same(Rotary(size, base=base, scaling="linear", factor=factor), *theirs("linear", size, base, factor=factor))
    # Dynamic scaling at a length of `factor` times that of training, where its own factor is 1, is the NTK-aware base.
    dynamic = theirs("dynamic", size, base, seq_len=int(factor * TRAINED), factor=1.0)
    same(Rotary(size, base=base, scaling="ntk", factor=factor), *dynamic)
    for ours, own in (
        ({}, {}),
        ({"beta_fast": 8, "beta_slow": 2}, {"beta_fast": 8, "beta_slow": 2}),
        ({"attention_factor": 1.5}, {"attention_factor": 1.5}),
    ):
        method = Rotary(size, TRAINED, base=base, scaling="yarn", factor=factor, **ours)
        same(method, *theirs("yarn", size, base, factor=factor, original_max_position_embeddings=TRAINED, **own))
    default, explicit = (
        Rotary(size, maximum, base=base, scaling="yarn", factor=factor, trained_length=trained).angles.own
        for maximum, trained in ((TRAINED, None), (7, TRAINED))
    )
    assert explicit == default


def test_what_they_are_for():
    """Linear is the plain method at positions divided by the factor; NTK keeps the first frequency and divides the
    last; YaRN's scores are multiplied by (0.1 ln s + 1)^2.
    """
    torch.manual_seed(0)
    states = torch.randn(1, 2, 5, 16)
    positions = torch.tensor([0, 4, 8, 400, 65_536])
    plain, _ = Rotary(16).rotate(states, states, positions // 4, positions // 4)
    scaled, _ = Rotary(16, scaling="linear", factor=4).rotate(states, states, positions, positions)
    torch.testing.assert_close(scaled, plain)
    before, after = frequencies(16, 10_000.0), Rotary(16, scaling="ntk", factor=4).angles.own
    assert after[0] == before[0]
    assert after[-1] == pytest.approx(before[-1] / 4)
    query, key = Rotary(16, TRAINED, scaling="yarn", factor=8).rotate(states, states, positions, positions)
    wanted = states.square().sum(-1) * (0.1 * math.log(8) + 1) ** 2
    torch.testing.assert_close((query * key).sum(-1), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"scaling": "linear", "factor": 4}, {"scaling": "yarn", "factor": 4}])
def test_gradients_and_shift_invariance(options):
    method = Rotary(8, TRAINED, fraction=0.5, **options)
    states = torch.randn(1, 1, 3, 8, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(3) + 60_000
    assert torch.autograd.gradcheck(lambda states: method.rotate(states, states**2, positions, positions), states)
    scores = []
    for shift in (0, 1000, 65_000):
        query, key = method.rotate(states.detach(), states.detach(), torch.arange(3) + shift, torch.arange(3) + shift)
        scores.append(query @ key.transpose(-1, -2))
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(scores[2], scores[0], rtol=0, atol=1e-5)


def test_random_positions_in_training():
    method = Rotary(8, 6, scaling="random", random_range=50)
    states = torch.ones(1, 1, 6, 8)
    positions = torch.arange(6)

    with pytest.raises(ValueError, match=r"call begin_step\(step\) first, or eval\(\)"):
        method.rotate(states, states, positions, positions)

    def angles(step, seed=0):
        method.begin_step(step, seed)
        query, key = method.rotate(states, states, positions, positions)
        # The next layer, and the same one again, find the same draw.
        for again in method.rotate(states, states, positions, positions):
            assert torch.equal(again, query)
        assert torch.equal(query, key)
        return query

    assert torch.equal(angles(1), angles(1))
    assert not torch.equal(angles(1), angles(2))
    assert not torch.equal(angles(1), angles(1, seed=5))
    drawn = torch.stack([method.random.drawn(6, step, 0) for step in range(500)])
    assert (drawn.diff(dim=1) > 0).all()
    assert drawn.min() == 0
    assert drawn.max() == 49
    # The k-th smallest of n without repetition from 0 ... L - 1 is (L + 1) k / (n + 1) - 1 on average.
    expected = torch.tensor([51 * k / 7 - 1 for k in range(1, 7)])
    torch.testing.assert_close(drawn.float().mean(0), expected, rtol=0, atol=1.5)
    long = torch.ones(1, 1, 60, 8)
    with pytest.raises(PositionsExceeded, match="60 tokens need more positions than random_range 50"):
        method.rotate(long, long, torch.arange(60), torch.arange(60))


def test_random_positions_stay_where_they_are_in_evaluation():
    method = Rotary(8, 6, scaling="random", random_range=50, random_length=20).eval()
    states = torch.randn(1, 1, 20, 8)
    whole, _ = method.rotate(states, states, torch.arange(20), torch.arange(20))
    for first, last in ((0, 7), (7, 8), (8, 20)):
        positions = torch.arange(first, last)
        part, _ = method.rotate(states[:, :, first:last], states[:, :, first:last], positions, positions)
        assert torch.equal(part, whole[:, :, first:last])
    other = Rotary(8, 6, scaling="random", random_range=50, random_length=20, random_seed=1).eval()
    assert not torch.equal(other.rotate(states, states, torch.arange(20), torch.arange(20))[0], whole)
    with pytest.raises(PositionsExceeded, match="position 20 is beyond random_length 20"):
        method.rotate(states[:, :, :1], states[:, :, :1], torch.tensor([20]), torch.tensor([20]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": "dynamic", "factor": 2}, "'dynamic' is unknown.*depend on the current length.*ntk"),
        ({"scaling": "cubic"}, "'cubic' is unknown; choose one of linear, ntk, yarn, random"),
        ({"factor": 2}, "factor 2 has no effect with scaling None; it is an option of linear, ntk, yarn"),
        ({"scaling": "linear", "factor": 2, "beta_fast": 3}, "beta_fast 3 has no effect with scaling 'linear'"),
        ({"scaling": "linear"}, "scaling linear needs factor"),
        ({"scaling": "ntk", "factor": 0.5}, "scaling ntk needs factor.*got 0.5"),
        ({"scaling": "ntk", "factor": "4x"}, "factor '4x' must be a number"),
        ({"scaling": "yarn", "factor": 2}, "scaling yarn needs trained_length"),
        ({"scaling": "yarn", "factor": 2, "trained_length": 8, "beta_fast": 1, "beta_slow": 2}, "0 < beta_slow < beta"),
        ({"scaling": "random", "trained_length": 8}, "needs random_range"),
        ({"scaling": "random", "trained_length": 8, "random_range": 7}, "8 different positions from random_range 7"),
        ({"scaling": "random", "trained_length": 8, "random_range": 9.5}, "random_range 9.5 must be an integer"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Rotary(8, **options)
