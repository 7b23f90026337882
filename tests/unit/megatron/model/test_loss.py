"""The projection and cross entropy by pieces against PyTorch's, and where the model takes it."""

import pytest
import torch
import torch.nn.functional as F

from megatron.model import gpt, loss
from megatron.model.gpt import GPT
from megatron.model.initialization import initialize
from megatron.model.loss import linear_cross_entropy
from megatron.model.settings import ModelSettings


@pytest.mark.parametrize("piece", [1, 40 * 19, 2**26])
@pytest.mark.parametrize("masked", [True, False])
def test_values_and_gradients(masked, piece, monkeypatch):
    """From one token at a time to all at once."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", piece)
    torch.manual_seed(0)
    hidden = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(40, (50,))
    counts = torch.rand(50).double() if masked else None
    found = linear_cross_entropy(hidden, weight, labels, counts)
    losses = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    expected = (losses if counts is None else losses * counts).sum()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    wanted = torch.autograd.grad(expected * 0.3, [hidden, weight])
    for mine, theirs in zip(torch.autograd.grad(found * 0.3, [hidden, weight]), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_any_of_the_inputs_may_need_a_gradient_alone():
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(9, 4), torch.randn(7, 4, requires_grad=True), torch.randint(7, (9,))
    (found,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, None), weight)
    (wanted,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels, reduction="sum"), weight)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("masked", [True, False])
def test_a_model_s_loss_and_gradients_are_the_same_by_pieces(masked, tied, monkeypatch):
    settings = ModelSettings(
        num_layers=1, hidden_size=16, num_heads=2, padded_vocab_size=64, max_positions=12, tied_embeddings=tied
    )
    model = GPT(settings)
    initialize(model.layers(), settings, seed=1, init_method="normal", output_init_method="normal", std=0.3)
    text = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(24) % 3 > 0).float().view(2, 12) if masked else None
    results = []
    for pieces in (False, True):
        if pieces:
            monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 64 * 5)
            monkeypatch.setattr(gpt, "mean_loss", None)  # the logits are not made whole
        value = model.loss(text[:, :-1], text[:, 1:], mask)
        results.append([value, *torch.autograd.grad(value, list(model.parameters()))])
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_the_logits_are_never_whole():
    from tests.support.attention import LargestStorage

    hidden, weight = torch.randn(4096, 4, requires_grad=True), torch.randn(40_000, 4, requires_grad=True)
    with LargestStorage() as largest:
        linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.int64), None).backward()
    assert largest.elements <= loss.chunk_elements(hidden.device, len(weight)) < 4096 * 40_000
