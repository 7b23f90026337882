"""The fused backend as `torch.library` operators. `torch.compile` does not trace into them, so a compiled block has no
graph break.

`launch.py` describes the algorithm.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size, p jacobian directions of a
table.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.backends.triton.launch import (
    MAX_GRID,
    MAX_HEAD_SIZE,
    Launcher,
    empty_outputs,
    unavailable_reason,
)
from kerple.attention.call import AttentionCall, Backend, without_autocast
from kerple.positional import TableJacobian

# The last of the 128 rows of the largest tile is 127 strides from the first.
MAX_ROW_STRIDE = (2**31 - 1) // 127
# The maximum number of directions, of bias and weight together, for which `query_kernel` sums gradients.
MAX_DIRECTIONS = 4


def fused_attention(call: AttentionCall) -> Tensor:
    """Like `attend`."""
    bias = _differentiable_table(call.bias_table, call.bias_jacobian)
    weight = _differentiable_table(call.weight_table, call.weight_jacobian)
    if sum(table.directions.shape[1] for table in (bias, weight) if table.directions is not None) > MAX_DIRECTIONS:
        bias, weight = _DifferentiableTable(call.bias_table), _DifferentiableTable(call.weight_table)
    context: Tensor = _attention(
        *(_with_contiguous_rows(states) for states in (call.query, call.key, call.value)),
        bias.table,
        weight.table,
        bias.coefficients,
        weight.coefficients,
        bias.directions,
        weight.directions,
        call.decay_sums,
        bias.dense,
        weight.dense,
        call.scale,
        call.span.window,
    )[0]
    return context


class _DifferentiableTable(NamedTuple):
    """A table `[h, length]`, and how its gradient is computed.

    The gradient of the table itself is computed for distances below `dense` (None: all), and that of the coefficients
    `[h, p]` by the directions `[h, p, length]`.
    """

    table: Tensor | None
    coefficients: Tensor | None = None
    directions: Tensor | None = None
    dense: int | None = None


def _differentiable_table(table: Tensor | None, jacobian: TableJacobian | None) -> _DifferentiableTable:
    if table is None or jacobian is None or not torch.is_grad_enabled() or not jacobian.coefficients.requires_grad:
        return _DifferentiableTable(table)
    if not jacobian.dense:
        return _DifferentiableTable(table.detach(), jacobian.coefficients, jacobian.directions, jacobian.dense)
    directions = F.pad(jacobian.directions[..., jacobian.dense :], (jacobian.dense, 0))
    return _DifferentiableTable(table, jacobian.coefficients, directions, jacobian.dense)


@torch.library.custom_op("kerple::fused_attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    bias_coefficients: Tensor | None,
    weight_coefficients: Tensor | None,
    bias_directions: Tensor | None,
    weight_directions: Tensor | None,
    decay_sums: Tensor | None,
    bias_dense: int | None,
    weight_dense: int | None,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """(context, lse), see `Launcher.forward`. Arguments of the tables are the fields of `_DifferentiableTable`."""
    return Launcher(query, key, value, bias_table, weight_table, decay_sums, scale, window).forward()


@_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_outputs(query)


@torch.library.custom_op("kerple::fused_attention_backward", mutates_args=())
def _attention_backward(
    grad_context: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    bias_directions: Tensor | None,
    weight_directions: Tensor | None,
    decay_sums: Tensor | None,
    context: Tensor,
    lse: Tensor,
    needs_bias: bool,
    needs_weight: bool,
    bias_dense: int | None,
    weight_dense: int | None,
    scale: float,
    window: int | None,
) -> list[Tensor]:
    """The gradients of query, key and value, in the layout of `_empty_gradients`, followed by those that are needed of
    bias table, weight table, bias coefficients, weight coefficients and decay sums.
    """
    launcher = Launcher(query, key, value, bias_table, weight_table, decay_sums, scale, window)
    states = _empty_gradients(query, key)
    grad_query, grad_key, grad_value = states[0].unbind() if len(states) == 1 else states
    with without_autocast(query.device):
        grad_context = _with_contiguous_rows(grad_context)
        row_stats = launcher.row_stats(context, grad_context, lse)
        *grad_coefficients, row_sums = launcher.query_gradient(
            grad_context, row_stats, bias_directions, weight_directions, out=grad_query
        )
        column_sums = launcher.key_value_gradients(grad_context, row_stats, out=(grad_key, grad_value))
        if needs_bias and needs_weight and bias_dense == weight_dense:
            grad_tables = launcher.table_gradients(grad_context, row_stats, True, True, bias_dense)
        else:
            grad_bias = grad_weight = None
            if needs_bias:
                grad_bias, _ = launcher.table_gradients(grad_context, row_stats, True, False, bias_dense)
            if needs_weight:
                _, grad_weight = launcher.table_gradients(grad_context, row_stats, False, True, weight_dense)
            grad_tables = grad_bias, grad_weight
        grad_sums = None
        if decay_sums is not None:
            grad_sums = -column_sums.to(decay_sums.dtype)
            grad_sums[..., -row_sums.shape[2] :] += row_sums
    return [*states, *(grad for grad in (*grad_tables, *grad_coefficients, grad_sums) if grad is not None)]


@_attention_backward.register_fake
def _(
    grad_context: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    bias_directions: Tensor | None,
    weight_directions: Tensor | None,
    decay_sums: Tensor | None,
    context: Tensor,
    lse: Tensor,
    needs_bias: bool,
    needs_weight: bool,
    *_: object,
) -> list[Tensor]:
    tables = [(bias_table, needs_bias), (weight_table, needs_weight)]
    return [
        *_empty_gradients(query, key),
        *(table.new_empty(table.shape) for table, needs_grad in tables if needs_grad and table is not None),
        *(part.new_empty(part.shape[1::-1]).T for part in (bias_directions, weight_directions) if part is not None),
        *(() if decay_sums is None else (decay_sums.new_empty(decay_sums.shape),)),
    ]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bias_table, weight_table, _, _, bias_directions, weight_directions, decay_sums, *rest = inputs
    ctx.constants = rest
    tables = bias_table, weight_table, bias_directions, weight_directions
    ctx.save_for_backward(query, key, value, *tables, decay_sums, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_context: Tensor | None, grad_lse: None) -> tuple[Tensor | None, ...]:
    if grad_context is None:
        return (None,) * 14
    needs_grad = ctx.needs_input_grad
    saved = ctx.saved_tensors  # may be read only once if activations are recomputed
    grads = _attention_backward(grad_context, *saved, *needs_grad[3:5], *ctx.constants)
    packed = _is_packed(*saved[:2])
    states = grads[0].unbind() if packed else grads[:3]
    rest = iter(grads[1 if packed else 3 :])
    is_computed = (*needs_grad[3:5], *(directions is not None for directions in saved[5:7]))
    grad_tables = [next(rest) if computed else None for computed in is_computed]
    return *states, *grad_tables, None, None, next(rest, None), *(None,) * 4


_attention.register_autograd(_gradients, setup_context=_save_for_backward)


def _is_packed(query: Tensor, key: Tensor) -> bool:
    return query.shape == key.shape


def _empty_gradients(query: Tensor, key: Tensor) -> list[Tensor]:
    """Space for the gradients of query, key and value: a tensor `[3, b, h, s, d]`, stored as `[b, s, h, 3, d]` like a
    model's projection, so that the model need not copy it; or three tensors if the shapes differ.
    """
    if not _is_packed(query, key):
        return [torch.empty_like(query), torch.empty_like(key), torch.empty_like(key)]
    batch, heads, s, head_size = query.shape
    return [query.new_empty(batch, s, heads, 3, head_size).permute(3, 0, 2, 1, 4)]


def _with_contiguous_rows(states: Tensor) -> Tensor:
    """The kernels require the elements of a row to be contiguous, and int32 offsets of the rows of a tile."""
    is_supported = states.stride(-1) == 1 and states.stride(-2) <= MAX_ROW_STRIDE
    return states if is_supported else states.contiguous()


FUSED = Backend(
    "fused",
    fused_attention,
    dropout=False,
    jacobians=True,
    decay=True,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    max_head_size=MAX_HEAD_SIZE,
    max_batch_heads=MAX_GRID,
    unavailable_reason=unavailable_reason,
)
