"""The Triton kernel of the cross entropy against float64: on a GPU, or in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from megatron.model import loss_kernel
from tests.support.bfloat16 import interpreted_bfloat16

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def launch(logits, labels, mask=None, lse=None, first_token=0, gradient=True, block=64):
    """(lse, label logits); overwrites the logits with their gradient."""
    merged = lse is not None
    lse = torch.empty(len(logits), device=DEVICE) if lse is None else lse
    label_logits = torch.empty(len(logits), device=DEVICE)
    loss_kernel.cross_entropy_kernel[(len(logits),)](
        *(logits, labels, mask, lse, label_logits, logits.shape[1], first_token),
        MERGED=merged,
        GRADIENT=gradient,
        BLOCK=block,
        num_warps=loss_kernel.WARPS,
    )
    return lse, label_logits


def reference(logits, labels, mask):
    """(losses, gradient of their masked sum), in float64."""
    leaf = logits.double().requires_grad_()
    losses = F.cross_entropy(leaf, labels, reduction="none")
    return losses.detach(), torch.autograd.grad((losses * mask).sum(), leaf)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 64, 200])
@pytest.mark.parametrize("masked", [True, False])
def test_losses_and_gradients(masked, vocabulary, dtype):
    """A block that is larger than the vocabulary, a divisor of it, or neither. Half-precision
    gradients are rounded once; the losses are not.
    """
    torch.manual_seed(0)
    logits = (5 * torch.randn(7, vocabulary, device=DEVICE)).to(dtype)
    labels = torch.randint(vocabulary, (7,), device=DEVICE)
    mask = (
        torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 2.0], device=DEVICE)
        if masked
        else torch.ones(7, device=DEVICE)
    )
    losses, gradient = reference(logits, labels, mask)
    with interpreted_bfloat16():
        lse, label_logits = launch(logits, labels, mask if masked else None)
    torch.testing.assert_close((lse - label_logits).double(), losses, rtol=0, atol=1e-5)
    roundoff = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    torch.testing.assert_close(logits.double(), gradient, rtol=roundoff + 1e-5, atol=1e-7)
    assert (logits[mask == 0] == 0).all()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[3e4, -3e4, 2e4]], device=DEVICE)
    lse, label_logits = launch(logits, torch.tensor([2], device=DEVICE))
    assert (lse - label_logits).item() == 1e4
    assert logits.tolist() == [[1.0, 0.0, -1.0]]


def test_an_overflow_of_the_logits_reaches_the_gradient():
    """Loss scaling in float16 detects it there."""
    logits = torch.tensor([[1.0, float("inf"), 0.0]], device=DEVICE)
    launch(logits, torch.tensor([0], device=DEVICE))
    assert logits.isnan().any()


def test_without_a_gradient_the_logits_are_only_read():
    logits = torch.randn(3, 70, device=DEVICE)
    before = logits.clone()
    launch(logits, torch.zeros(3, dtype=torch.int64, device=DEVICE), gradient=False)
    assert torch.equal(logits, before)


def test_slices_of_the_vocabulary():
    """The log-sum-exp of the slices gives the loss, and with it each slice's part of
    the gradient.
    """
    torch.manual_seed(0)
    logits, mask = torch.randn(5, 150, device=DEVICE), torch.rand(5, device=DEVICE)
    labels = torch.tensor([0, 49, 50, 99, 149], device=DEVICE)
    losses, gradient = reference(logits, labels, mask)
    slices = [part.contiguous() for part in logits.split(50, dim=1)]
    statistics = [
        launch(part, labels, first_token=50 * index, gradient=False)
        for index, part in enumerate(slices)
    ]
    lse = torch.stack([lse for lse, _ in statistics]).logsumexp(0)
    label_logits = sum(logit for _, logit in statistics)
    torch.testing.assert_close((lse - label_logits).double(), losses, rtol=0, atol=1e-5)
    for index, part in enumerate(slices):
        launch(part, labels, mask, lse, first_token=50 * index)
    torch.testing.assert_close(torch.cat(slices, dim=1).double(), gradient, rtol=1e-5, atol=1e-7)
