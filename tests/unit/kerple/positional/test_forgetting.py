"""Forgetting attention and CABLE against the papers' formulas in float64; and in a model, with a cache."""

import pytest
import torch

from kerple.positional import Cable, Forgetting


@pytest.mark.parametrize(
    ("method_class", "log_gate"),
    [
        (Forgetting, lambda logits: (1 / (1 + (-logits).exp())).log()),
        (Cable, lambda logits: -(1 + logits.exp()).log()),
    ],
)
def test_decay_and_gradients(method_class, log_gate):
    torch.manual_seed(0)
    method = method_class(num_heads=3, hidden_size=6)
    with torch.no_grad():
        method.gate.weight.normal_()
        method.gate.bias.normal_()
    hidden = torch.randn(2, 5, 6, requires_grad=True)
    leaves = (hidden, method.gate.weight, method.gate.bias)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    decay = method.decay(hidden)
    expected = log_gate(torch.einsum("bse,he->bhs", exact[0], exact[1]) + exact[2][:, None])
    torch.testing.assert_close(decay.double(), expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(decay.shape)
    gradients = torch.autograd.grad(decay, leaves, upstream)
    for gradient, exact_gradient in zip(
        gradients, torch.autograd.grad(expected, exact, upstream.double()), strict=True
    ):
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        method.statistics()["gate"].double(), log_gate(exact[2].detach()).exp(), rtol=1e-5, atol=1e-6
    )


def test_both_are_the_same_functions():
    forgetting, cable = Forgetting(2, 4), Cable(2, 4)
    with torch.no_grad():
        for parameter, other in zip(forgetting.parameters(), cable.parameters(), strict=True):
            other.copy_(-parameter)
    hidden = torch.randn(1, 7, 4)
    assert torch.equal(forgetting.decay(hidden), cable.decay(hidden))


def test_initial_gates():
    method = Forgetting(4, 5000)
    assert abs(method.gate.weight.std().item() - 0.02) < 1e-3
    assert (method.statistics()["gate"] == 0.5).all()
