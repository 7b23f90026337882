"""The Triton kernels of blocks against float64, for sizes that do not fill their tiles: on a GPU,
or in Triton's interpreter. `test_fused_block.py` tests them within a model.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from megatron.model import block_kernels
from megatron.model.layers import ACTIVATIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS, key=lambda name: name != "gelu"))
@pytest.mark.quick(1)
def test_activations(activation):
    """Values, derivatives, and the sum over rows; more rows than one program's tile."""
    torch.manual_seed(0)
    rows, size, programs = 70, 150, 2
    x, grad = (torch.randn(rows, size, device=DEVICE) for _ in range(2))
    x[0, :4] = torch.tensor([-30.0, 30.0, 1e-3, -5.0])
    bias = torch.randn(size, device=DEVICE)
    leaf = (x.double() + bias.double()).requires_grad_()
    expected = ACTIVATIONS[activation](leaf)
    (expected_grad,) = torch.autograd.grad(expected, leaf, grad.double())
    y, again, sums = (
        torch.empty_like(x),
        torch.empty_like(x),
        torch.empty(programs, size, device=DEVICE),
    )
    block_kernels.activation_kernel[(rows, 3)](x, bias, y, size, ACTIVATION=activation, BLOCK=64)
    block_kernels.activation_backward_kernel[(2, programs)](
        *(x, bias, grad, again, sums, rows, size), ACTIVATION=activation, ROWS=16, COLUMNS=128
    )
    assert torch.equal(y, again)
    for actual, wanted in (
        (y, expected),
        (grad, expected_grad),
        (sums.sum(0), expected_grad.sum(0)),
    ):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_activations(activation):
    torch.manual_seed(0)
    rows, size = 7, 150
    x, grad = torch.randn(rows, 2 * size, device=DEVICE), torch.randn(rows, size, device=DEVICE)
    leaf = x.double().requires_grad_()
    expected = ACTIVATIONS[activation](leaf[:, :size]) * leaf[:, size:]
    (expected_grad,) = torch.autograd.grad(expected, leaf, grad.double())
    y, again, grad_x = torch.empty_like(grad), torch.empty_like(grad), torch.empty_like(x)
    block_kernels.gated_kernel[(rows, 3)](x, y, size, ACTIVATION=activation, BLOCK=64)
    block_kernels.gated_backward_kernel[(rows, 3)](
        x, grad, again, grad_x, size, ACTIVATION=activation, BLOCK=64
    )
    assert torch.equal(y, again)
    for actual, wanted in ((y, expected), (grad_x, expected_grad)):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rms", [False, True])
def test_norms(rms):
    """More rows than programs, so each program adds up several rows."""
    torch.manual_seed(0)
    rows, size, programs, eps = 7, 20, 3, 1e-5
    hidden, update, grad_normed, grad_hidden = (
        torch.randn(rows, size, device=DEVICE) for _ in range(4)
    )
    vectors = [torch.randn(size, device=DEVICE) for _ in range(3)]
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, *vectors)]
    residual = leaves[0] + update.double() + leaves[1]
    norm = (
        F.rms_norm(residual, (size,), leaves[2], eps)
        if rms
        else F.layer_norm(residual, (size,), *leaves[2:], eps)
    )
    outputs = (residual * grad_hidden.double()).sum() + (norm * grad_normed.double()).sum()
    expected = torch.autograd.grad(outputs, leaves, allow_unused=True)

    update_bias, weight, bias = vectors[0], vectors[1], None if rms else vectors[2]
    new_hidden, normed, again, grad_input = (torch.empty_like(hidden) for _ in range(4))
    stats, sums = torch.empty(rows, 2, device=DEVICE), torch.empty(programs, 3, size, device=DEVICE)
    block_kernels.norm_kernel[(rows,)](
        *(hidden, update, update_bias, weight, bias, new_hidden, normed, stats, size, eps),
        RMS=rms,
        BLOCK=32,
    )
    block_kernels.norm_backward_kernel[(programs,)](
        *(
            grad_normed,
            grad_hidden,
            new_hidden,
            weight,
            bias,
            stats,
            grad_input,
            again,
            sums,
            rows,
            size,
        ),
        RMS=rms,
        BLOCK=32,
    )
    assert torch.equal(normed, again)
    grad_weight, grad_bias, grad_update_bias = sums.sum(0)
    pairs = [
        (new_hidden, residual),
        (normed, norm),
        (grad_input, expected[0]),
        (grad_update_bias, expected[1]),
    ]
    pairs.append((grad_weight, expected[2]))
    if not rms:
        pairs.append((grad_bias, expected[3]))
    for actual, wanted in pairs:
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)


def test_sums_of_rows():
    torch.manual_seed(0)
    sums, total = (
        torch.randn(37, 70, device=DEVICE),
        torch.empty(70, dtype=torch.float16, device=DEVICE),
    )
    block_kernels.sum_rows_kernel[(2,)](sums, total, 37, 70, BLOCK=64, ROWS=16)
    torch.testing.assert_close(total.double(), sums.double().sum(0), rtol=2e-3, atol=1e-3)
