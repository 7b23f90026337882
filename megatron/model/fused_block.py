"""The functions of a transformer block on a GPU in training: fewer kernels, less memory traffic and
fewer saved activations.

Kernels compute everything between two matrix products at once: residual, bias and norm, or bias and
activation. Each function below ends with a matrix product, whose input it does not save: the
backward pass recomputes the output of the norm or of the activation with the gradient of its input,
in one kernel. So a block saves 10 hidden states `[b, s, e]` (with e as unit: two residuals, query,
key, value, attention's output, and 4 before the activation) instead of 16. In a gated MLP, the two
products with the norm's output are one, with the matrices concatenated.

Vectors added to the residual are added by the next norm, also that of the next block: `gpt.py`
passes the last update of a block to it.

Legend: b batch, s tokens of a sequence, n tokens of a batch, e hidden size, o output features, f
features in the MLP, p programs of a kernel.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kerple.attention import Requirements, self_check
from kerple.attention.backends.triton.launch import unavailable_reason
from megatron.model.layers import GatedMLP

# Devices on which the kernels run; Triton's interpreter also runs them on a CPU, slowly, for tests.
KERNEL_DEVICES = ["cuda"]
# A program of the norm's kernels holds a row in registers.
MAX_HIDDEN_SIZE = 8192
# Largest relative error of a result or gradient in the self-check, in the 2-norm.
MAX_ERROR = {torch.float32: 1e-4, torch.float16: 6e-3, torch.bfloat16: 5e-2}


def uses_kernels(device: torch.device, dtype: torch.dtype, hidden_size: int) -> bool:
    """Whether the kernels can run, for rows of this size."""
    if device.type not in KERNEL_DEVICES or dtype not in MAX_ERROR or hidden_size > MAX_HIDDEN_SIZE:
        return False
    return unavailable_reason(Requirements(device=device)) is None


def kernel_failure(
    norm: nn.Module, mlp: Any, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Compare the kernels for blocks with such a norm and MLP with PyTorch operations, for a few
    tokens. Returns why the kernels must not be used on a device; None if they may be, or are not
    used there anyway. Waits for the device.
    """
    # What the block has, as the kernels' arguments.
    norm = cast(nn.LayerNorm | nn.RMSNorm, norm)
    (size,), epsilon = norm.weight.shape, cast(float, norm.eps)
    if not uses_kernels(device, dtype, size):
        return None
    rms, gated = isinstance(norm, nn.RMSNorm), isinstance(mlp, GatedMLP)

    # Small random inputs: hidden states, update, vectors, and the matrices of the MLP.
    rows = 32
    if gated:
        rows = 64
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, size), (40, size), (size,), (size,), (size,), (rows, size), (rows,), (16, 32)]
    randoms = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
    for matrix in (randoms[5], randoms[7]):
        matrix /= matrix.shape[1] ** 0.5  # float16 would overflow
    if mlp.activation_name == "relu":
        # Keep the hidden units away from 0, where rounding would change the derivative from 0 to 1.
        randoms[6] = 8 * randoms[6].sign()

    # Stop if there are no numbers to compare.
    values: list[Tensor | None] = [random.to(device, dtype) for random in randoms]
    if type(values[0]) is not Tensor:  # a FakeTensor has no values
        return None

    # The biases of norm and MLP that the block does not have.
    if getattr(norm, "bias", None) is None:
        values[4] = None
    if not gated and mlp.dense_h_to_4h.bias is None:
        values[6] = None

    # The kernels, through the functions that the block calls.
    def fused(*values: Tensor | None) -> tuple[Tensor, Tensor]:
        *inputs, mlp_bias, last = values  # of the norm, and its linear layer
        if gated:
            residual, inner = _NormLinear.apply(*inputs, mlp_bias, epsilon, rms, None)
            return residual, _GatedLinear.apply(inner, last, mlp.activation_name, None)
        residual, inner = _NormLinear.apply(*inputs, None, epsilon, rms, None)
        return residual, _ActivationLinear.apply(inner, mlp_bias, last, mlp.activation_name, None)

    # The same computation with PyTorch operations.
    def unfused(*values: Any) -> tuple[Tensor, Tensor]:
        hidden, update, update_bias, weight, norm_bias, linear, mlp_bias, last = values
        residual = hidden + update + update_bias
        if rms:
            normed = F.rms_norm(residual, (size,), weight, epsilon)
        else:
            normed = F.layer_norm(residual, (size,), weight, norm_bias, epsilon)
        inner = F.linear(normed, linear, mlp_bias)
        if gated:
            gate, up = inner.chunk(2, dim=-1)
            return residual, (mlp.activation(gate) * up) @ last.T
        return residual, mlp.activation(inner) @ last.T

    # Any error of the compiler or the driver is a failure of the kernels.
    try:
        actual = _values_and_gradients(fused, values, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel that does not compile, or that the GPU rejects
        return self_check.describe(error)

    # Compare outputs and gradients with float32.
    expected = _values_and_gradients(unfused, values, torch.float32)
    for result, exact in zip(actual, expected, strict=True):
        relative = ((result.float() - exact).norm() / exact.norm()).item()
        if not relative <= MAX_ERROR[dtype]:  # also for NaN
            return (
                f"a result has a relative error of {relative:.1e}, more than {MAX_ERROR[dtype]:.0e}"
            )
    return None


@torch.enable_grad()
def _values_and_gradients(
    function: Callable[..., tuple[Tensor, Tensor]],
    values: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> list[Tensor]:
    """The outputs of the function for values in a dtype, and their gradients, for upstream
    gradients that equal the outputs.
    """
    leaves: list[Tensor | None] = []
    for value in values:
        if value is not None:
            value = value.detach().to(dtype).requires_grad_()
        leaves.append(value)
    outputs = function(*leaves)
    upstream = [output.detach() for output in outputs]
    required = [leaf for leaf in leaves if leaf is not None]
    return [*upstream, *torch.autograd.grad(outputs, required, upstream)]


def norm_linear(
    hidden: Tensor,
    update: Tensor | None,
    update_bias: Tensor | None,
    norm: Any,
    weight: Any,
    bias: Any,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """hidden + update + update_bias `[n, e]`, and the linear layer of its norm `[n, o]`."""
    # An RMS norm has no bias.
    norm_bias, rms = getattr(norm, "bias", None), isinstance(norm, nn.RMSNorm)
    residual, output = _NormLinear.apply(
        hidden, update, update_bias, norm.weight, norm_bias, weight, bias, norm.eps, rms, group
    )
    return residual, output


def row_linear(x: Tensor, weight: Any, group: dist.ProcessGroup | None) -> Tensor:
    """A linear layer without bias, `[n, f] -> [n, e]`; with a group, row-parallel."""
    return _RowLinear.apply(x, weight, group)


def mlp_update(
    residual: Tensor,
    update: Tensor | None,
    update_bias: Tensor | None,
    norm: nn.Module,
    mlp: Any,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Any]:
    """The residual `[n, e]`, and what the MLP of its norm adds to it: states `[n, e]` and a bias
    `[e]`.
    """
    is_gated = isinstance(mlp, GatedMLP)
    if is_gated:
        # The gate and its factor in one product.
        weight, bias = torch.cat((mlp.w1.weight, mlp.w3.weight)), None
        if mlp.w1.bias is not None:
            bias = torch.cat((mlp.w1.bias, mlp.w3.bias))
        residual, inner = norm_linear(residual, update, update_bias, norm, weight, bias, group)
        states = _GatedLinear.apply(inner, mlp.w2.weight, mlp.activation_name, group)
        return residual, states, mlp.w2.bias

    # The bias of the first layer is added by the activation's kernel, that of the second by the
    # next norm.
    first, last = mlp.dense_h_to_4h, mlp.dense_4h_to_h
    residual, inner = norm_linear(residual, update, update_bias, norm, first.weight, None, group)
    states = _ActivationLinear.apply(inner, first.bias, last.weight, mlp.activation_name, group)
    return residual, states, last.bias


class _NormLinear(torch.autograd.Function):
    """Residual, norm and linear layer. With a group, the linear layer is column-parallel."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        update: Tensor | None,
        update_bias: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        rms: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        kernels = _kernels()
        rows, size = hidden.shape
        # Without an update, the residual is the input itself, which is not copied.
        new_hidden, normed = hidden, torch.empty_like(hidden)
        if update is not None:
            new_hidden = torch.empty_like(hidden)
        stats = hidden.new_empty(rows, 2, dtype=torch.float32)  # mean and inverse deviation
        with torch.cuda.device_of(hidden):
            kernels.norm_kernel[(rows,)](
                hidden,
                update,
                update_bias,
                norm_weight,
                norm_bias,
                new_hidden,
                normed,
                stats,
                size,
                eps,
                **row_options(size, rms, hidden.dtype),
            )
        # The normed states are not saved: the backward pass computes them again.
        ctx.save_for_backward(new_hidden, norm_weight, norm_bias, weight, stats)
        ctx.has_update, ctx.has_update_bias = update is not None, update_bias is not None
        ctx.has_bias, ctx.rms, ctx.group = bias is not None, rms, group
        ctx.set_materialize_grads(False)
        return new_hidden, F.linear(normed, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_hidden: Tensor | None, grad_output: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, norm_weight, norm_bias, weight, stats = ctx.saved_tensors
        kernels = _kernels()
        rows, size = hidden.shape

        # The gradient of the normed states [n, e].
        grad_output = grad_output.contiguous()  # [n, o]
        grad_normed = grad_output @ weight
        if ctx.group is not None:
            dist.all_reduce(grad_normed, group=ctx.group)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.contiguous()

        # The gradient of the residual, and partial sums [p, 3, e] of those of the vectors.
        grad_input, normed = torch.empty_like(hidden), torch.empty_like(hidden)
        programs = min(rows, kernels.PROGRAMS)
        sums = hidden.new_empty(programs, 3, size, dtype=torch.float32)
        with torch.cuda.device_of(hidden):
            kernels.norm_backward_kernel[(programs,)](
                grad_normed,
                grad_hidden,
                hidden,
                norm_weight,
                norm_bias,
                stats,
                grad_input,
                normed,
                sums,
                rows,
                size,
                **row_options(size, ctx.rms, hidden.dtype),
            )

        # No gradients for what the forward pass did not have.
        grad_norm_weight, grad_norm_bias, grad_update_bias = _sum_rows(sums, norm_weight.dtype)
        if not ctx.has_update_bias:
            grad_update_bias = None
        if norm_bias is None:
            grad_norm_bias = None
        grad_bias = grad_update = None
        if ctx.has_bias:
            grad_bias = grad_output.sum(0)
        if ctx.has_update:
            grad_update = grad_input
        return (
            grad_input,
            grad_update,
            grad_update_bias,
            grad_norm_weight,
            grad_norm_bias,
            grad_output.T @ normed,
            grad_bias,
            None,
            None,
            None,
        )


class _ActivationLinear(torch.autograd.Function):
    """activation(x + bias) and a linear layer without bias, `[n, f] -> [n, e]`. With a group, the
    layer is row-parallel: its partial outputs are summed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        activation: str,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        kernels = _kernels()
        rows, size = x.shape
        activated = torch.empty_like(x)
        with torch.cuda.device_of(x):
            kernels.activation_kernel[(rows, -(-size // kernels.COLUMNS))](
                x,
                bias,
                activated,
                size,
                ACTIVATION=activation,
                BLOCK=kernels.COLUMNS,
                num_warps=4,
            )
        ctx.save_for_backward(x, bias, weight)
        ctx.activation = activation
        return _summed(F.linear(activated, weight), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, weight = ctx.saved_tensors
        kernels = _kernels()
        rows, size = x.shape
        grad_output = grad_output.contiguous()
        grad_x = grad_output @ weight  # of the activation; the kernel overwrites it
        activated = torch.empty_like(x)  # computed again, for the weight's gradient
        tiles = -(-size // kernels.TILE_COLUMNS)
        programs = max(1, min(-(-rows // kernels.TILE_ROWS), 2 * kernels.PROGRAMS // tiles))
        sums = x.new_empty(programs, size, dtype=torch.float32)
        with torch.cuda.device_of(x):
            kernels.activation_backward_kernel[(tiles, programs)](
                x,
                bias,
                grad_x,
                activated,
                sums,
                rows,
                size,
                ACTIVATION=ctx.activation,
                ROWS=kernels.TILE_ROWS,
                COLUMNS=kernels.TILE_COLUMNS,
                num_warps=4,
            )
        grad_bias = None
        if bias is not None:
            grad_bias = _sum_rows(sums, bias.dtype)
        return grad_x, grad_bias, grad_output.T @ activated, None, None


class _GatedLinear(torch.autograd.Function):
    """activation(gate) * up and a linear layer without bias, from [gate, up] `[n, 2 f] -> [n, e]`.
    With a group, the layer is row-parallel: its partial outputs are summed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, activation: str, group: dist.ProcessGroup | None
    ) -> Tensor:
        kernels = _kernels()
        rows, size = len(x), x.shape[1] // 2
        gated = x.new_empty(rows, size)
        with torch.cuda.device_of(x):
            kernels.gated_kernel[(rows, -(-size // kernels.COLUMNS))](
                x, gated, size, ACTIVATION=activation, BLOCK=kernels.COLUMNS, num_warps=4
            )
        ctx.save_for_backward(x, weight)
        ctx.activation = activation
        return _summed(F.linear(gated, weight), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        kernels = _kernels()
        rows, size = len(x), x.shape[1] // 2
        grad_output = grad_output.contiguous()
        grad_gated = grad_output @ weight
        gated, grad_x = torch.empty_like(grad_gated), torch.empty_like(x)
        with torch.cuda.device_of(x):
            kernels.gated_backward_kernel[(rows, -(-size // kernels.COLUMNS))](
                x,
                grad_gated,
                gated,
                grad_x,
                size,
                ACTIVATION=ctx.activation,
                BLOCK=kernels.COLUMNS,
                num_warps=4,
            )
        return grad_x, grad_output.T @ gated, None, None


class _RowLinear(torch.autograd.Function):
    """A linear layer without bias; with a group, row-parallel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _summed(F.linear(x, weight), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return grad_output @ weight, grad_output.T @ x, None


def _summed(partial: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(partial, group=group)
    return partial


def _sum_rows(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension of `[p, ...]`."""
    kernels = _kernels()
    total = sums.new_empty(sums.shape[1:], dtype=dtype)
    with torch.cuda.device_of(sums):
        kernels.sum_rows_kernel[(-(-total.numel() // kernels.TILE_COLUMNS),)](
            sums,
            total,
            len(sums),
            total.numel(),
            BLOCK=kernels.TILE_COLUMNS,
            ROWS=kernels.TILE_ROWS,
            num_warps=4,
        )
    return total


def row_options(size: int, rms: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Constants of the norm's kernels for rows of this size and dtype. Each thread has 16 elements,
    more only in long rows, but 8 in the longest float32 rows, which would spill registers
    otherwise.
    """
    block = 1 << (size - 1).bit_length()
    warps = max(4, block // 512)
    if block > 4096:
        warps = 16
        if dtype == torch.float32:
            warps = 32
    return {"RMS": rms, "BLOCK": block, "num_warps": warps}


def _kernels() -> ModuleType:
    """Imported on first use, because it needs Triton."""
    from megatron.model import block_kernels

    return block_kernels
