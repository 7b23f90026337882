"""Rotary positions against complex multiplication in float64."""

import pytest
import torch

from kerple.positional import Rotary


def turned(states: torch.Tensor, positions: torch.Tensor, base: float, rotated: int) -> torch.Tensor:
    """Dimensions (i, i + r/2) as a complex number, times exp(i * position * base^(-2i/r)); float64."""
    states = states.double()
    half = rotated // 2
    pairs = torch.complex(states[..., :half], states[..., half:rotated])
    frequencies = torch.tensor([base ** (-2 * i / rotated) for i in range(half)], dtype=torch.float64)
    angles = positions.double()[:, None] * frequencies
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag, states[..., rotated:]), dim=-1)


@pytest.mark.parametrize(("base", "fraction"), [(10_000.0, 1.0), (10_000.0, 0.25), (500.0, 0.5)])
def test_values_and_gradients(base, fraction):
    torch.manual_seed(0)
    method = Rotary(head_size=16, base=base, fraction=fraction)
    rotated = int(16 * fraction)
    query_positions, key_positions = torch.arange(60, 65), torch.tensor([0, 1, 2, 511, 512, 2048, 65_535, 65_536])
    # As the model hands them over: heads and positions interleaved in memory.
    query = torch.randn(2, 5, 3, 16).transpose(1, 2).requires_grad_()
    key = torch.randn(2, 8, 3, 16).transpose(1, 2).requires_grad_()

    results = method.rotate(query, key, query_positions, key_positions)
    for states, positions, result in zip((query, key), (query_positions, key_positions), results, strict=True):
        exact = states.detach().double().requires_grad_()
        expected = turned(exact, positions, base, rotated)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-6)
        upstream = torch.randn(result.shape)
        torch.testing.assert_close(
            torch.autograd.grad(result, states, upstream)[0].double(),
            torch.autograd.grad(expected, exact, upstream.double())[0],
            rtol=0,
            atol=1e-6,
        )


def test_second_derivatives():
    method = Rotary(head_size=4)
    states = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(3)

    def rotate_twice(states):
        query, key = method.rotate(states, states**2, positions, positions)
        return query * key

    assert torch.autograd.gradcheck(rotate_twice, states)
    assert torch.autograd.gradgradcheck(rotate_twice, states)


def test_scores_depend_on_the_distance_alone():
    torch.manual_seed(0)
    method = Rotary(head_size=64)
    query, key = torch.randn(1, 1, 1, 64).double(), torch.randn(1, 1, 1, 64).double()
    scores = []
    for shift in (0, 1000, 65_000):
        q, k = method.rotate(query, key, torch.tensor([37 + shift]), torch.tensor([4 + shift]))
        scores.append((q * k).sum())
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=0, atol=1e-5)


def test_half_precision_is_rounded_once():
    torch.manual_seed(0)
    method = Rotary(head_size=32).bfloat16()
    states = torch.randn(1, 2, 4, 32).bfloat16()
    positions = torch.tensor([3, 300, 30_000, 65_536])
    result, _ = method.rotate(states, states, positions, positions)
    assert result.dtype == torch.bfloat16
    expected = turned(states, positions, 10_000.0, 32)
    # The nearest bfloat16 is within 2^-8 of the value.
    assert ((result.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()


def test_positions_changed_in_place_are_noticed():
    method = Rotary(head_size=8)
    states = torch.randn(1, 1, 2, 8)
    positions = torch.arange(2)
    before, _ = method.rotate(states, states, positions, positions)
    positions += 7
    after, _ = method.rotate(states, states, positions, positions)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after.double(), turned(states, positions, 10_000.0, 8), rtol=0, atol=1e-6)


def test_training_after_an_evaluation_in_inference_mode():
    method = Rotary(head_size=8)
    states = torch.randn(1, 1, 2, 8)
    with torch.inference_mode():
        positions = torch.arange(2)
        expected, _ = method.rotate(states, states, positions, positions)
    states.requires_grad_()
    found, _ = method.rotate(states, states, torch.arange(2), torch.arange(2))
    found.sum().backward()
    assert torch.equal(found, expected)
    assert states.grad is not None


@pytest.mark.parametrize(("head_size", "fraction"), [(6, 0.5), (8, 0.1), (8, 1.5)])
def test_dimensions_that_make_no_pairs_are_refused(head_size, fraction):
    with pytest.raises(ValueError, match=f"head size {head_size} times fraction {fraction}"):
        Rotary(head_size=head_size, fraction=fraction)
