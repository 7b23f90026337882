"""Linear layers by oneDNN against float64, and where they are taken."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.model import linear
from megatron.model.linear import Linear, product

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    """As on a processor that it is faster on, for products of any size; the calls that it got."""
    calls = []
    run = linear._onednn
    monkeypatch.setattr(linear, "ONEDNN_IS_FASTER", True)
    monkeypatch.setattr(linear, "FEWEST", 1)
    monkeypatch.setattr(linear, "_onednn", lambda *tensors: calls.append(len(tensors)) or run(*tensors))
    return calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 24), (1, 1, 24)])
def test_values_and_gradients(shape, bias, onednn):
    """For states and upstream gradients that are views with other strides, too."""
    torch.manual_seed(0)
    layer = Linear(24, 7, bias=bias)
    states = torch.randn(*reversed(shape)).permute(*reversed(range(len(shape)))).requires_grad_()
    upstream = torch.randn(7, *shape[:-1]).movedim(0, -1)
    found = layer(states)
    mine = torch.autograd.grad(found, [states, *layer.parameters()], upstream)
    assert len(onednn) == 3

    exact = [tensor.detach().double().requires_grad_() for tensor in (states, *layer.parameters())]
    wanted = F.linear(*exact)
    theirs = torch.autograd.grad(wanted, exact, upstream.double())
    for ours, expected in zip((found, *mine), (wanted, *theirs), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_only_the_gradients_that_are_needed_are_computed(onednn):
    layer, states = Linear(8, 8), torch.randn(4, 8)
    layer.weight.requires_grad_(False)
    layer(states).sum().backward()
    assert len(onednn) == 1
    torch.testing.assert_close(layer.bias.grad, torch.full((8,), 4.0))


def test_a_product_of_transposed_views(onednn):
    left, right = torch.randn(6, 5), torch.randn(6, 4)
    torch.testing.assert_close(product(left.T, right.T), left.T @ right)
    assert onednn


@pytest.mark.parametrize("case", ["float64", "bfloat16", "vector", "small", "autocast", "switched off", "Intel"])
def test_pytorch_s_own_product_elsewhere(case, onednn, monkeypatch):
    layer, states = Linear(8, 8), torch.randn(4, 8)
    if case in ("float64", "bfloat16"):
        layer, states = layer.to(getattr(torch, case)), states.to(getattr(torch, case))
    if case == "vector":
        states = states[0]
    if case == "small":
        monkeypatch.setattr(linear, "FEWEST", 4 * 8 * 8 + 1)
    if case == "Intel":
        monkeypatch.setattr(linear, "ONEDNN_IS_FASTER", False)
    if case == "switched off":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with torch.autocast("cpu", enabled=case == "autocast"):
        torch.testing.assert_close(layer(states), nn.Linear.forward(layer, states), rtol=0, atol=0)
    assert not onednn


@pytest.mark.parametrize(
    ("processor", "faster"),
    [
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f", True),
        ("vendor_id : AuthenticAMD\nflags : avx2", False),
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f", False),
    ],
)
def test_which_processors_it_is_faster_on(processor, faster, monkeypatch):
    monkeypatch.setattr(linear.Path, "read_text", lambda *_, **__: processor)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert linear._onednn_is_faster() is faster
