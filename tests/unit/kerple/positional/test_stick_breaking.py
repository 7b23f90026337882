"""Stick-breaking attention against the paper's recurrence in float64, gradients included."""

import pytest
import torch

from kerple.attention import Attention
from kerple.positional import StickBreaking


def exact_attention(query, key, value, window=None):
    """One key at a time, from the nearest one before the query on; the rest is the query's own."""
    scores = query @ key.transpose(-1, -2)
    shares = torch.sigmoid(scores * query.shape[-1] ** -0.5)
    contexts = []
    for i in range(query.shape[2]):
        # The query itself is the first of the window's keys.
        farthest = 0
        if window is not None:
            farthest = max(0, i - window + 1)
        rest, context = 1.0, 0.0
        for j in reversed(range(farthest, i)):
            share = shares[..., i, j, None]
            context = context + rest * share * value[..., j, :]
            rest = rest * (1 - share)
        context = context + rest * value[..., i, :]
        contexts.append(context)
    return torch.stack(contexts, dim=2)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_attention_and_gradients(dtype, tolerance, window):
    torch.manual_seed(0)
    drawn = 3 * torch.randn(3, 2, 3, 23, 8)
    upstream = torch.randn(2, 3, 23, 8, dtype=torch.float64)

    # The chunked backend.
    states = [state.to(dtype).requires_grad_() for state in drawn]
    context = Attention(StickBreaking(), "chunked")(*states, window=window)
    gradients = torch.autograd.grad(context, states, upstream.to(dtype))

    # The recurrence.
    exact_states = [state.double().requires_grad_() for state in drawn]
    exact_context = exact_attention(*exact_states, window=window)
    exact_gradients = torch.autograd.grad(exact_context, exact_states, upstream)
    expected = [exact_context, *exact_gradients]
    for result, exact in zip([context, *gradients], expected, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


def test_extreme_scores():
    """Shares that are 0 or 1 in float32."""
    query = torch.full((1, 1, 4, 4), 50.0, requires_grad=True)
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0])
    key = (signs / 2).view(1, 1, 4, 1).expand_as(query)
    value = torch.eye(4)[None, None]
    context = Attention(StickBreaking())(query, key, value)
    # The key that takes all.
    expected = value[:, :, [0, 0, 0, 2]]
    torch.testing.assert_close(context, expected)
    (gradient,) = torch.autograd.grad(context.square().sum(), query)
    assert gradient.isfinite().all()
