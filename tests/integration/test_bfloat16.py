"""bfloat16 in Triton's interpreter: the kernels of attention and loss, and the chunked backend,
within error bounds.

`tests/support/bfloat16.py` derives the bounds and corrects the interpreter's bfloat16.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import triton
import triton.language as tl

from kerple.attention import jacobians, tables
from kerple.positional import ModelShape, build
from megatron.model import loss
from megatron.model.loss import linear_cross_entropy
from tests.support.attention import (
    attend_with,
    float64_arguments,
    random_attend_arguments,
    run_attend,
    upstream_gradient,
)
from tests.support.bfloat16 import (
    BFLOAT16_UNIT,
    attention_bounds,
    interpreted_bfloat16,
    loss_bounds,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled, not interpreted"
)


def largest(actual: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest error, as a fraction of its bound, which is 0 for gradients that must be 0."""
    return ((actual.double() - exact).abs() / bound.clamp(min=1e-300)).max().item()


def results(backend: str, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """The context, and the gradients of query, key, value, tables and decay sums."""
    with interpreted_bfloat16():
        return run_attend(backend, arguments, upstream_dtype=torch.bfloat16)


def attention_errors(backend: str, unit: float, *sizes: int, **options) -> list[float]:
    arguments = random_attend_arguments(*sizes, **options, dtype=torch.bfloat16)
    exact = results("reference", float64_arguments(arguments))
    bounds = attention_bounds(arguments, upstream_gradient(exact[0]).bfloat16(), unit)
    return list(map(largest, results(backend, arguments), exact, bounds))


@triton.jit
def product_kernel(left, right, result, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    entries = row[:, None] * SIZE + row[None, :]
    tl.store(
        result + entries, tl.dot(tl.load(left + entries), tl.load(right + entries)).to(tl.bfloat16)
    )


def test_the_interpreter_multiplies_and_rounds():
    torch.manual_seed(0)
    left, right = torch.randn(2, 16, 16).bfloat16()
    result = torch.empty(16, 16, dtype=torch.bfloat16)
    with interpreted_bfloat16():
        product_kernel[(1,)](left, right, result, SIZE=16)
    expected = (left.double() @ right.double()).float().bfloat16()
    torch.testing.assert_close(result, expected, rtol=2 * BFLOAT16_UNIT, atol=0)
    assert (result == expected).float().mean() > 0.99


CASES = {
    "bias and weight": ((1, 1, 300, 300, 16), {}),
    "window": ((1, 2, 8, 60, 16), {"weight": False, "window": 40}),
    "no tables": ((1, 2, 150, 150, 64), {"bias": False, "weight": False}),
    "decay": ((1, 1, 150, 150, 64), {"bias": False, "weight": False, "decay": True}),
}


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES)
def test_attention_kernels(case):
    """Errors are at most 1 and at least 1/30 of their bounds.

    The bounds of the tables' gradients assume that all errors of a sum have the same sign. So they
    are looser, by about the square root of the head size and of the number of pairs, for larger
    sizes.
    """
    sizes, options = CASES[case]
    for error in attention_errors("fused", BFLOAT16_UNIT, *sizes, **options):
        assert 1 / 30 < error < 1


@pytest.mark.ci
def test_attention_kernels_with_many_pairs():
    for error in attention_errors("fused", BFLOAT16_UNIT, 2, 2, 100, 100, 64):
        assert 1 / 200 < error < 1


@pytest.mark.parametrize("case", CASES)
def test_the_chunked_backend(case):
    """The chunked backend rounds only its results, so the tables' gradients are exact up to
    float32. Without a weight, PyTorch's kernel computes the context, and rounds the probabilities
    too.
    """
    sizes, options = CASES[case]
    context, *others = attention_errors("chunked", 0.0, *sizes, **options)
    if case in ("window", "no tables"):
        context, *_ = attention_errors("chunked", BFLOAT16_UNIT, *sizes, **options)
        assert 1 / 30 < context < 1
    else:
        assert 1 / 4 < context < 1
    assert all(1 / 4 < error < 1 for error in others[:3])
    assert all(error < 1 for error in others[3:])


def test_kernels_and_chunked_differ_by_less_than_the_unit_roundoff():
    """In the 2-norm. The chunked backend's own rounding is 0.4 of it."""
    arguments = random_attend_arguments(1, 1, 256, 256, 64, weight=False, dtype=torch.bfloat16)
    exact = results("reference", float64_arguments(arguments))
    fused, chunked = results("fused", arguments), results("chunked", arguments)
    for kernel, baseline, reference in zip(fused, chunked, exact, strict=True):
        assert (kernel.double() - baseline.double()).norm() < BFLOAT16_UNIT * reference.norm()


def test_gradients_of_kerple_s_coefficients():
    """Gradients of coefficients are float32 sums over all pairs, so the bounds of the bias table's
    gradient apply.
    """
    heads, length = 2, 40
    method = build("kerple_log", ModelShape(heads, 16, 32, 1, length))
    (bias, _), (jacobian, _) = tables(method, length, "cpu"), jacobians(method, length, "cpu")
    arguments = random_attend_arguments(
        1, heads, length, length, 16, weight=False, dtype=torch.bfloat16
    )
    arguments["bias_table"] = bias.detach().requires_grad_()
    exact = results("reference", float64_arguments(arguments))
    upstream = upstream_gradient(exact[0]).bfloat16()
    bound = attention_bounds(arguments, upstream, BFLOAT16_UNIT)[-1]
    coefficients = jacobian.coefficients.detach().requires_grad_()
    with interpreted_bfloat16():
        context = attend_with(
            backend="fused", **arguments, bias_jacobian=replace(jacobian, coefficients=coefficients)
        )
        (actual,) = torch.autograd.grad(context, coefficients, upstream)
    directions = jacobian.directions.detach().double()
    exact_sums, bounds = directions @ exact[-1][..., None], directions.abs() @ bound[..., None]
    assert 1 / 200 < largest(actual, exact_sums.squeeze(-1), bounds.squeeze(-1)) < 1


@pytest.mark.parametrize("kernel_devices", [[], ["cpu"]])
def test_loss(kernel_devices, monkeypatch):
    """The loss computed by PyTorch operations and by the kernel."""
    monkeypatch.setattr(loss, "KERNEL_DEVICES", kernel_devices)
    torch.manual_seed(0)
    hidden, weight = torch.randn(60, 32).bfloat16(), (torch.randn(150, 32) / 3).bfloat16()
    labels, mask = torch.randint(150, (60,)), (torch.arange(60) % 4 > 0).float()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with interpreted_bfloat16():
        actual = linear_cross_entropy(*leaves, labels, mask)
        gradients = torch.autograd.grad(actual, leaves)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = (
        mask * F.cross_entropy(exact_leaves[0] @ exact_leaves[1].T, labels, reduction="none")
    ).sum()
    exact_gradients = torch.autograd.grad(exact, exact_leaves)
    bounds = loss_bounds(hidden, weight, labels, mask)
    for error in map(largest, (actual, *gradients), (exact, *exact_gradients), bounds):
        assert 1 / 30 < error < 1
