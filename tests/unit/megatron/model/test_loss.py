"""The chunked loss against PyTorch's cross entropy, with PyTorch operations and with the Triton
kernel, and its use in the model.
"""

import re

import pytest
import torch
import torch.nn.functional as F

from megatron.model import gpt, loss
from megatron.model.gpt import GPT
from megatron.model.initialization import initialize
from megatron.model.loss import chunk_rows, kernel_failure, linear_cross_entropy, token_losses
from tests.support.language_models import model_settings


@pytest.fixture
def kernel(monkeypatch) -> None:
    """Use the Triton kernel on a CPU, in Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setattr(loss, "KERNEL_DEVICES", ["cpu"])


@pytest.mark.parametrize("chunk", [1, 40 * 19, 2**26])
@pytest.mark.parametrize("masked", [True, False])
def test_values_and_gradients(masked, chunk, monkeypatch):
    """From one token per chunk to a single chunk."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk)
    check_values_and_gradients(masked, torch.float64)


@pytest.mark.parametrize("rows", [19, 100])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.quick(2)
def test_values_and_gradients_with_the_kernel(masked, rows, kernel, monkeypatch):
    monkeypatch.setattr(loss, "KERNEL_ROWS", 1)
    monkeypatch.setattr(loss, "KERNEL_CHUNK_BYTES", rows * 40 * 4)
    check_values_and_gradients(masked, torch.float32)


def check_values_and_gradients(masked: bool, dtype: torch.dtype) -> None:
    """Against float64, for inputs of a dtype."""
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(50, 8, dtype=dtype).double(),
        torch.randn(40, 8, dtype=dtype).double(),
    )
    labels = torch.randint(40, (50,))
    mask = torch.rand(50) if masked else None
    expected_leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    losses = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    expected = (losses if mask is None else losses * mask).sum()
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in expected_leaves]
    actual = linear_cross_entropy(*leaves, labels, mask)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)
    gradients = torch.autograd.grad(actual * 0.3, leaves)
    for gradient, reference in zip(
        gradients, torch.autograd.grad(expected * 0.3, expected_leaves), strict=True
    ):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-5, atol=1e-6)


def test_only_the_weight_may_need_a_gradient():
    torch.manual_seed(0)
    hidden, weight, labels = (
        torch.randn(9, 4),
        torch.randn(7, 4, requires_grad=True),
        torch.randint(7, (9,)),
    )
    (actual,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, None), weight)
    (expected,) = torch.autograd.grad(
        F.cross_entropy(hidden @ weight.T, labels, reduction="sum"), weight
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel_devices", [[], ["cpu"]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, kernel_devices, monkeypatch):
    """The upstream gradient, here that of a mean, is never rounded to half precision."""
    monkeypatch.setattr(loss, "KERNEL_DEVICES", kernel_devices)
    torch.manual_seed(0)
    hidden, weight = torch.randn(49, 16), torch.randn(30, 16)
    labels = torch.randint(30, (49,))
    results = []
    for kind in (torch.float64, dtype):
        leaves = [leaf.to(dtype).to(kind).requires_grad_() for leaf in (hidden, weight)]
        value = linear_cross_entropy(*leaves, labels, None) / 49
        results.append(
            [value.double(), *(grad.double() for grad in torch.autograd.grad(value, leaves))]
        )
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() <= torch.finfo(dtype).eps * expected.norm()


def test_without_autograd_no_gradient_is_computed(monkeypatch):
    hidden, weight, labels = (
        torch.randn(9, 4),
        torch.randn(7, 4, requires_grad=True),
        torch.randint(7, (9,)),
    )
    expected = linear_cross_entropy(hidden, weight, labels, None)
    monkeypatch.setattr(loss, "_add_product", None)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(linear_cross_entropy(hidden, weight, labels, None), expected)


def test_losses_of_tokens(kernel):
    """In evaluation the kernel reads the logits; with autograd it must not overwrite them."""
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 70), torch.randint(70, (2, 5))
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    before = logits.clone()
    torch.testing.assert_close(token_losses(logits, labels), expected)
    with torch.no_grad():
        torch.testing.assert_close(token_losses(logits, labels), expected)
    assert torch.equal(logits, before)


def test_the_kernel_s_chunks_are_multiples_of_a_tile(kernel):
    """A single chunk for the 162M recipe."""
    device = torch.device("cpu")
    assert chunk_rows(device, torch.bfloat16, 50304) == 21248 > 32 * 512
    assert chunk_rows(device, torch.float32, 10**9) == loss.KERNEL_ROWS


def test_the_self_check_passes(kernel):
    assert kernel_failure(torch.device("cpu"), torch.float32) is None


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda *_, **__: None, "the (result|gradient of hidden states) has a relative error of"),
        (lambda *_, **__: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_the_self_check_fails(launch, message, kernel, monkeypatch):
    """A kernel that does nothing, and one that raises."""
    monkeypatch.setattr(loss, "_launch", launch)
    failure = kernel_failure(torch.device("cpu"), torch.float32)
    assert re.match(message, failure)
    loss.KERNEL_DEVICES.remove("cpu")
    assert kernel_failure(torch.device("cpu"), torch.float32) is None
    linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 1]), None)


def test_the_self_check_sees_that_a_chunk_is_lost(kernel, monkeypatch):
    """The gradient of the weight is a sum over chunks."""
    monkeypatch.setattr(loss, "_add_product", lambda total, left, right: (left @ right).float())
    assert re.match(
        "the gradient of weight has a relative error",
        kernel_failure(torch.device("cpu"), torch.float32),
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("masked", [True, False])
def test_the_model_s_loss_and_gradients_are_the_same_in_chunks_and_with_the_kernel(
    masked, tied, monkeypatch
):
    settings = model_settings(
        num_layers=1, hidden_size=16, padded_vocab_size=64, no_weight_tying=not tied
    )
    model = GPT(settings)
    initialize(
        model.layers(), settings, seed=1, init_method="normal", output_init_method="normal", std=0.3
    )
    text = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(24) % 3 > 0).float().view(2, 12) if masked else None
    results = []
    for case in ("complete logits", "chunks", "kernel"):
        if case == "chunks":
            monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 64 * 5)
            monkeypatch.setattr(gpt, "mean_loss", None)  # the full logits are never computed
        elif case == "kernel":
            pytest.importorskip("triton")
            monkeypatch.setattr(loss, "KERNEL_DEVICES", ["cpu"])
        value = model.loss(text[:, :-1], text[:, 1:], mask)
        results.append([value, *torch.autograd.grad(value, list(model.parameters()))])
    for expected, *others in zip(*results, strict=True):
        for actual in others:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_the_full_logits_are_never_allocated():
    from tests.support.attention import LargestStorage

    hidden, weight = (
        torch.randn(1024, 4, requires_grad=True),
        torch.randn(8192, 4, requires_grad=True),
    )
    with LargestStorage() as largest:
        linear_cross_entropy(hidden, weight, torch.zeros(1024, dtype=torch.int64), None).backward()
    assert (
        largest.elements
        <= 8192 * chunk_rows(hidden.device, hidden.dtype, len(weight))
        < 1024 * 8192
    )
