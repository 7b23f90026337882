"""KERPLE-log with rotary queries and keys against the formula in float64, gradients included."""

import torch

from kerple.attention import Attention
from kerple.positional import KerpleLogRotary


def test_attention_and_gradients():
    torch.manual_seed(0)
    heads, length, size = 3, 40, 8
    method = KerpleLogRotary(heads, size)
    states = [torch.randn(2, heads, length, size, requires_grad=True) for _ in range(3)]
    query, key, value = states
    positions = torch.arange(length)
    rotated = method.rotate(query, key, positions, positions)
    attended = Attention("chunked", method)(*rotated, value)

    exact = [leaf.detach().double().requires_grad_() for leaf in (*states, method.bias_p, method.bias_a)]
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = torch.exp(1j * positions[:, None] * frequencies)
    query, key = (torch.complex(*leaf.unflatten(-1, (2, size // 2)).unbind(-2)) * turns for leaf in exact[:2])
    distance = (positions[:, None] - positions).clamp(min=0)
    scores = (query @ key.mH).real / size**0.5 - exact[3] * torch.log(1 + exact[4] * distance)
    future = torch.ones(length, length).triu(1).bool()
    expected = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ exact[2]

    torch.testing.assert_close(attended.double(), expected, rtol=0, atol=1e-5)
    upstream = torch.randn(attended.shape)
    gradients = torch.autograd.grad(attended, (*states, method.bias_p, method.bias_a), upstream)
    exact_gradients = torch.autograd.grad(expected, exact, upstream.double())
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-4, atol=1e-5)
