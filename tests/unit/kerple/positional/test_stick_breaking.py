"""Stick-breaking attention against the paper's recurrence in float64, gradients included."""

import pytest
import torch

from kerple.attention import Attention
from kerple.positional import StickBreaking


def exact_attention(query, key, value, window=None):
    """One key at a time, from the nearest one before the query on; the rest is the query's own."""
    shares = torch.sigmoid(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5)
    contexts = []
    for i in range(query.shape[2]):
        rest, context = 1.0, 0.0
        for j in range(i - 1, -1 if window is None else max(-1, i - window), -1):
            share = shares[..., i, j, None]
            context = context + rest * share * value[..., j, :]
            rest = rest * (1 - share)
        contexts.append(context + rest * value[..., i, :])
    return torch.stack(contexts, dim=2)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_and_gradients(dtype, window):
    torch.manual_seed(0)
    states = [(3 * torch.randn(2, 3, 23, 8)).to(dtype).requires_grad_() for _ in range(3)]
    attended = Attention(StickBreaking(), "chunked")(*states, window=window)
    exact = [state.detach().double().requires_grad_() for state in states]
    expected = exact_attention(*exact, window=window)
    upstream = torch.randn(attended.shape, dtype=torch.float64)
    gradients = torch.autograd.grad(attended, states, upstream.to(dtype))
    exact_gradients = torch.autograd.grad(expected, exact, upstream)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for actual, exact_value in zip(
        (attended, *gradients), (expected, *exact_gradients), strict=True
    ):
        torch.testing.assert_close(actual.double(), exact_value, rtol=tolerance, atol=tolerance)


def test_extreme_scores():
    """Shares that are 0 or 1 in float32."""
    query = torch.full((1, 1, 4, 1), 100.0, requires_grad=True)
    key = torch.tensor([1.0, -1.0, 1.0, 1.0]).view(1, 1, 4, 1)
    value = torch.eye(4)[None, None]
    context = Attention(StickBreaking())(
        *(states.expand(-1, -1, -1, 4) / 2 for states in (query, key)), value
    )
    expected = torch.tensor([[1.0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]])
    torch.testing.assert_close(context[0, 0], expected)
    assert torch.autograd.grad(context.square().sum(), query)[0].isfinite().all()
