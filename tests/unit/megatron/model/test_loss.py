"""The chunked loss against PyTorch's cross entropy, and that the model uses it."""

import pytest
import torch
import torch.nn.functional as F

from megatron.model import gpt, loss
from megatron.model.gpt import GPT
from megatron.model.initialization import initialize
from megatron.model.loss import linear_cross_entropy
from megatron.model.settings import ModelSettings


@pytest.mark.parametrize("chunk", [1, 40 * 19, 2**26])
@pytest.mark.parametrize("masked", [True, False])
def test_values_and_gradients(masked, chunk, monkeypatch):
    """From one token per chunk to a single chunk."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    hidden = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(40, (50,))
    mask = torch.rand(50).double() if masked else None
    actual = linear_cross_entropy(hidden, weight, labels, mask)
    losses = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    expected = (losses if mask is None else losses * mask).sum()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)
    gradients = torch.autograd.grad(actual * 0.3, [hidden, weight])
    for gradient, reference in zip(gradients, torch.autograd.grad(expected * 0.3, [hidden, weight]), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-6)


def test_only_the_weight_may_need_a_gradient():
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(9, 4), torch.randn(7, 4, requires_grad=True), torch.randint(7, (9,))
    (actual,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, None), weight)
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels, reduction="sum"), weight)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("masked", [True, False])
def test_the_model_s_loss_and_gradients_are_the_same_in_chunks(masked, tied, monkeypatch):
    settings = ModelSettings(
        num_layers=1, hidden_size=16, num_heads=2, padded_vocab_size=64, max_positions=12, tied_embeddings=tied
    )
    model = GPT(settings)
    initialize(model.layers(), settings, seed=1, init_method="normal", output_init_method="normal", std=0.3)
    text = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(24) % 3 > 0).float().view(2, 12) if masked else None
    results = []
    for chunked in (False, True):
        if chunked:
            monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 64 * 5)
            monkeypatch.setattr(gpt, "mean_loss", None)  # the full logits are never computed
        value = model.loss(text[:, :-1], text[:, 1:], mask)
        results.append([value, *torch.autograd.grad(value, list(model.parameters()))])
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_the_full_logits_are_never_allocated():
    from tests.support.attention import LargestStorage

    hidden, weight = torch.randn(1024, 4, requires_grad=True), torch.randn(8192, 4, requires_grad=True)
    with LargestStorage() as largest:
        linear_cross_entropy(hidden, weight, torch.zeros(1024, dtype=torch.int64), None).backward()
    assert largest.elements <= loss.chunk_elements(hidden.device, len(weight)) < 1024 * 8192
