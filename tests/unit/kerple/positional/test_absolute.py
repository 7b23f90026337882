"""Sinusoidal and learned positions, and none."""

import math

import pytest
import torch

from kerple.positional import Learned, ModelShape, PositionsExceeded, Sinusoidal, build


def test_sinusoidal_adds_sines_then_cosines():
    torch.manual_seed(0)
    hidden = torch.randn(2, 4, 6, requires_grad=True)
    positions = [0, 1, 511, 65_536]
    expected = [
        [
            function(position / 10_000 ** (2 * i / 6))
            for function in (math.sin, math.cos)
            for i in range(3)
        ]
        for position in positions
    ]
    added = Sinusoidal(hidden_size=6).embed(hidden, torch.tensor(positions))
    torch.testing.assert_close(
        (added - hidden).double(),
        torch.tensor(expected).double().expand(2, 4, 6),
        rtol=0,
        atol=1e-6,
    )
    added.sum().backward()
    assert torch.equal(hidden.grad, torch.ones_like(hidden))


def test_sinusoidal_keeps_the_dtype_and_needs_an_even_hidden_size():
    assert (
        Sinusoidal(4).embed(torch.zeros(1, 2, 4).bfloat16(), torch.arange(2)).dtype
        == torch.bfloat16
    )
    with pytest.raises(ValueError, match="even hidden size; got 5"):
        Sinusoidal(hidden_size=5)


def test_learned_adds_its_rows_and_gathers_their_gradient():
    torch.manual_seed(0)
    method = Learned(hidden_size=3, max_positions=5)
    hidden = torch.randn(2, 2, 3, requires_grad=True)
    added = method.embed(hidden, torch.tensor([1, 4]))
    assert torch.equal(added, hidden + method.weight[[1, 4]])
    upstream = torch.randn(2, 2, 3)
    added.backward(upstream)
    expected = torch.zeros(5, 3)
    expected[[1, 4]] = upstream.sum(0)
    torch.testing.assert_close(method.weight.grad, expected)
    torch.testing.assert_close(hidden.grad, upstream)


def test_a_position_beyond_the_learned_table_is_rejected():
    method = Learned(hidden_size=4, max_positions=8)
    assert {name: tuple(tensor.shape) for name, tensor in method.state_dict().items()} == {
        "weight": (8, 4)
    }
    method.embed(torch.zeros(1, 8, 4), torch.arange(8))
    with pytest.raises(PositionsExceeded, match=r"learned .*7 .*8"):
        method.embed(torch.zeros(1, 9, 4), torch.arange(9))


def test_learned_is_drawn_from_a_normal_distribution():
    method = Learned(hidden_size=200, max_positions=100)
    method.reset_parameters(torch.Generator().manual_seed(1))
    assert method.weight.std().item() == pytest.approx(0.02, rel=0.03)


def test_none_has_no_hooks_and_no_parameters():
    method = build(
        "none", ModelShape(num_heads=2, head_size=8, hidden_size=16, num_layers=1, max_positions=8)
    )
    assert not method.hooks
    assert list(method.parameters()) == []
