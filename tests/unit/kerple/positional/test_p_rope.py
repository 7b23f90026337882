"""p-RoPE against complex multiplication in float64."""

import pytest
import torch

from kerple.positional import PRope, Rotary

POSITIONS = torch.tensor([0, 1, 2, 511, 65_536])


@pytest.mark.parametrize(("size", "p", "kept"), [(16, 0.75, 6), (16, 0.25, 2), (10, 0.5, 2), (8, 0.3, 1)])
def test_only_the_highest_frequencies_rotate(size, p, kept):
    torch.manual_seed(0)
    states = torch.randn(2, 3, len(POSITIONS), size, requires_grad=True)
    exact = states.detach().double().requires_grad_()
    pairs = torch.complex(*exact.unflatten(-1, (2, size // 2)).unbind(-2))
    frequencies = 10_000.0 ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    frequencies[kept:] = 0
    angles = POSITIONS.double()[:, None] * frequencies
    pairs = pairs * torch.exp(1j * angles)
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)

    rotated, _ = PRope(size, p=p).rotate(states, states, POSITIONS, POSITIONS)
    torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=1e-6)
    upstream = torch.randn(rotated.shape)
    gradient, exact_gradient = (
        torch.autograd.grad(result, leaf, upstream.to(result.dtype))[0]
        for result, leaf in ((rotated, states), (expected, exact))
    )
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=0, atol=1e-6)
    unrotated = [*range(kept, size // 2), *range(size // 2 + kept, size)]
    assert torch.equal(rotated[..., unrotated], states[..., unrotated])


def test_all_frequencies_are_rotary():
    states = torch.randn(1, 1, len(POSITIONS), 8)
    expected, _ = Rotary(8, base=500.0).rotate(states, states, POSITIONS, POSITIONS)
    rotated, _ = PRope(8, p=1.0, base=500.0).rotate(states, states, POSITIONS, POSITIONS)
    torch.testing.assert_close(rotated, expected)


@pytest.mark.parametrize("p", [0.0, 1.5, -0.5, 0.1])
def test_invalid_shares_are_rejected(p):
    with pytest.raises(ValueError, match=rf"p {p} .*0.*1.*4"):
        PRope(8, p=p)
