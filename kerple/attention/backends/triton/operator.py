"""The fused backend as `torch.library` operators. `torch.compile` does not trace into them, so a
compiled block has no graph break.

`launch.py` describes the algorithm.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size, p jacobian
directions of a table.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kerple.attention.backend import Backend, without_autocast
from kerple.attention.backends.triton.launch import (
    LOG2_E,
    MAX_GRID,
    MAX_HEAD_SIZE,
    Launcher,
    add_margins,
    document_tiles,
    empty_outputs,
    unavailable_reason,
)
from kerple.attention.call import AttentionCall
from kerple.attention.tables import KernelTables, PositionTables
from kerple.positional import TableJacobian

# The last of the 128 rows of the largest tile is 127 strides from the first.
MAX_ROW_STRIDE = (2**31 - 1) // 127
# The maximum number of directions, of bias and weight together, for which `query_kernel` sums
# gradients.
MAX_DIRECTIONS = 4


def fused_attention(call: AttentionCall) -> Tensor:
    """Like `attend`."""
    tables = call.tables
    if tables.kernel is None or tables.max_kv_len != call.max_kv_len:
        tables = prepare_tables(tables, call.query.shape[1], call.max_kv_len, call.query.device)
    assert tables.kernel is not None
    query = _with_contiguous_rows(call.query)
    key = _with_contiguous_rows(call.key)
    value = _with_contiguous_rows(call.value)
    constants = call.scale, call.span.window
    documents: list[Tensor] = []
    if call.documents is not None:
        documents.extend(document_tiles(call.documents))

    # The operator takes more of the host's time than `_FusedAttention`, but torch.compile does not
    # trace into it.
    if torch.compiler.is_compiling():
        context, _ = _attention(
            query, key, value, *tables.kernel, call.decay_sums, documents, *constants
        )
        return cast(Tensor, context)
    leaves = tables.kernel[:4]  # the fields with gradients
    arguments = (tables.kernel, documents, constants, query, key, value, *leaves, call.decay_sums)
    return cast(Tensor, _FusedAttention.apply(*arguments))


def prepare_tables(
    tables: PositionTables, heads: int, max_kv_len: int, device: torch.device | str
) -> PositionTables:
    """The same tables, with what the kernels make of them for calls of `heads` query heads and this
    `max_kv_len`.

    Layers that share the result do not repeat this. Requires Triton.
    """
    bias = tables.bias
    weight = tables.weight
    of_bias = _used_jacobian(bias, tables.bias_jacobian)
    of_weight = _used_jacobian(weight, tables.weight_jacobian)
    used = [jacobian for jacobian in (of_bias, of_weight) if jacobian is not None]
    if sum(jacobian.coefficients.shape[1] for jacobian in used) > MAX_DIRECTIONS:
        of_bias = None
        of_weight = None
        used = []

    # The directions of all coefficients, and of which table they are. Below `dense`, a direction is
    # not valid, and the table has its own gradient.
    directions = None
    if used:
        parts = []
        for jacobian in used:
            part = jacobian.directions[..., jacobian.dense : max_kv_len]
            if jacobian.dense:
                part = F.pad(part, (min(jacobian.dense, max_kv_len), 0))
            parts.append(part)
        stacked = torch.cat(parts, dim=1).transpose(0, 1)  # [p, h, n]
        directions = add_margins(stacked, max_kv_len=max_kv_len).contiguous()
    bias_coefficients = weight_coefficients = bias_dense = weight_dense = None
    if of_bias is not None:
        bias_coefficients = of_bias.coefficients
        bias_dense = of_bias.dense
    if of_weight is not None:
        weight_coefficients = of_weight.coefficients
        weight_dense = of_weight.dense

    # The values. Without a bias, the margins of zeros still are the mask.
    values, kernel_weight, rows = bias, None, 1
    if weight is not None:
        kernel_weight = add_margins(weight, max_kv_len=max_kv_len)
        rows = heads
    if values is None:
        values = torch.zeros(rows, max_kv_len, device=device)
    kernel = KernelTables(
        bias_table=_with_own_gradient(bias, of_bias),
        weight_table=_with_own_gradient(weight, of_weight),
        bias_coefficients=bias_coefficients,
        weight_coefficients=weight_coefficients,
        bias=add_margins(values, LOG2_E, -math.inf, max_kv_len=max_kv_len),
        weight=kernel_weight,
        directions=directions,
        bias_dense=bias_dense,
        weight_dense=weight_dense,
    )
    return replace(tables, kernel=kernel, max_kv_len=max_kv_len)


def _used_jacobian(table: Tensor | None, jacobian: TableJacobian | None) -> TableJacobian | None:
    """The jacobian, if its coefficients need a gradient."""
    if table is None or jacobian is None:
        return None
    if torch.is_grad_enabled() and jacobian.coefficients.requires_grad:
        return jacobian
    return None


def _with_own_gradient(table: Tensor | None, jacobian: TableJacobian | None) -> Tensor | None:
    """The table, detached if its gradient is entirely that of the jacobian's coefficients."""
    if table is None or jacobian is None or jacobian.dense:
        return table
    return table.detach()


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    bias_coefficients: Tensor | None,
    weight_coefficients: Tensor | None,
    bias: Tensor,
    weight: Tensor | None,
    directions: Tensor | None,
    bias_dense: int | None,
    weight_dense: int | None,
    decay_sums: Tensor | None,
    documents: Sequence[Tensor],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """(context, lse), see `Launcher.forward`. Arguments of the tables are the fields of
    `KernelTables`; documents are `DocumentTiles`, or empty.
    """
    has_table = bias_table is not None or weight_table is not None
    arguments = query, key, value, bias, weight, decay_sums, documents, scale, window
    return Launcher(*arguments, has_table=has_table).forward()


_attention = torch.library.custom_op("kerple::fused_attention", _forward, mutates_args=())


@_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_outputs(query)


def _backward(
    grad_context: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    bias: Tensor,
    weight: Tensor | None,
    directions: Tensor | None,
    decay_sums: Tensor | None,
    documents: Sequence[Tensor],
    context: Tensor,
    lse: Tensor,
    bias_directions: int,
    needs_bias: bool,
    needs_weight: bool,
    bias_dense: int | None,
    weight_dense: int | None,
    scale: float,
    window: int | None,
) -> list[Tensor]:
    """The gradients of query, key and value, in the layout of `_empty_gradients`, followed by those
    that are needed of bias table, weight table, the coefficients `[h, p]` of bias and weight, and
    decay sums.

    bias_directions: the first of the directions, those of the bias.
    """
    # Space for the gradients of the states.
    has_table = bias_table is not None or weight_table is not None
    arguments = query, key, value, bias, weight, decay_sums, documents, scale, window
    launcher = Launcher(*arguments, has_table=has_table)
    states = _empty_gradients(query, key)
    if documents:  # padding has no gradient
        for part in states:
            part.zero_()
    grad_query, grad_key, grad_value = _of_states(states)
    with without_autocast(query.device):
        # The kernels of the queries, which also sum the coefficients' gradients, and of the keys.
        grad_context = _with_contiguous_rows(grad_context)
        row_stats = launcher.row_stats(context, grad_context, lse)
        grad_coefficients, row_sums = launcher.query_gradient(
            grad_context, row_stats, directions, bias_directions, out=grad_query
        )
        column_sums = launcher.key_value_gradients(
            grad_context, row_stats, out=(grad_key, grad_value)
        )

        # Both tables at once, if their gradients are needed for the same distances.
        table_gradients = partial(launcher.table_gradients, grad_context, row_stats)
        grad_tables: list[Tensor] = []
        if needs_bias and needs_weight and bias_dense == weight_dense:
            grad_tables = table_gradients([bias_table, weight_table], bias_dense)
        else:
            if needs_bias:
                grad_tables += table_gradients([bias_table, None], bias_dense)
            if needs_weight:
                grad_tables += table_gradients([None, weight_table], weight_dense)
        grads = [*states, *grad_tables, *grad_coefficients]

        # A sum is added to the scores of its query, and subtracted from those of its key.
        if decay_sums is not None:
            grad_sums = -column_sums.to(decay_sums.dtype)
            grad_sums[..., -row_sums.shape[2] :] += row_sums
            grads.append(grad_sums)
    return grads


_attention_backward = torch.library.custom_op(
    "kerple::fused_attention_backward", _backward, mutates_args=()
)


@_attention_backward.register_fake
def _(
    grad_context: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    bias: Tensor,
    weight: Tensor | None,
    directions: Tensor | None,
    decay_sums: Tensor | None,
    documents: Sequence[Tensor],
    context: Tensor,
    lse: Tensor,
    bias_directions: int,
    needs_bias: bool,
    needs_weight: bool,
    *_: object,
) -> list[Tensor]:
    grads = _empty_gradients(query, key)
    for table, needs_grad in ((bias_table, needs_bias), (weight_table, needs_weight)):
        if table is not None and needs_grad:
            grads.append(table.new_empty(table.shape))
    if directions is not None:
        heads = directions.shape[1]
        for count in (bias_directions, len(directions) - bias_directions):
            if count:
                grads.append(directions.new_empty(count, heads).T)
    if decay_sums is not None:
        grads.append(decay_sums.new_empty(decay_sums.shape))
    return grads


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *tables, decay_sums, documents, scale, window = inputs
    kernel = KernelTables(*tables)
    saved = kernel.bias_table, kernel.weight_table, kernel.bias, kernel.weight, kernel.directions
    ctx.save_for_backward(query, key, value, *saved, decay_sums, *output)
    ctx.documents = documents
    # The number of directions of bias and weight, and the last arguments of `_backward`.
    counts = [0, 0]
    for index, coefficients in enumerate((kernel.bias_coefficients, kernel.weight_coefficients)):
        if coefficients is not None:
            counts[index] = coefficients.shape[1]
    ctx.kernel_constants = counts, (kernel.bias_dense, kernel.weight_dense, scale, window)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_context: Tensor | None, grad_lse: None) -> tuple[Any, ...]:
    if grad_context is None:
        return *(None,) * 13, [None] * len(ctx.documents), None, None
    states, grad_tables, grad_sums = _all_gradients(
        _attention_backward, grad_context, ctx, ctx.needs_input_grad[3:5]
    )
    return *states, *grad_tables, *(None,) * 5, grad_sums, [None] * len(ctx.documents), None, None


def _all_gradients(
    backward: Callable[..., list[Tensor]],
    grad_context: Tensor,
    ctx: Any,
    needs_table: tuple[bool, bool],
) -> tuple[Sequence[Tensor], list[Tensor | None], Tensor | None]:
    """The gradients of query, key and value, of tables and coefficients, and of decay sums."""
    # The arguments of `_backward`, in its order.
    counts, rest = ctx.kernel_constants
    saved = ctx.saved_tensors  # may be read only once if activations are recomputed
    grads = backward(
        grad_context, *saved[:-2], ctx.documents, *saved[-2:], counts[0], *needs_table, *rest
    )
    # Those of the states, in one tensor or three, and of what else needs one.
    count = 3
    if _is_packed(*saved[:2]):
        count = 1
    others = iter(grads[count:])
    grad_tables: list[Tensor | None] = [None] * 4
    for index, computed in enumerate((*needs_table, *counts)):
        if computed:
            grad_tables[index] = next(others)
    return _of_states(grads[:count]), grad_tables, next(others, None)


def _of_states(grads: list[Tensor]) -> Sequence[Tensor]:
    """Those of query, key and value, from the result of `_empty_gradients`."""
    if len(grads) == 1:
        return grads[0].unbind()
    return grads


_attention.register_autograd(_gradients, setup_context=_save_for_backward)


class _FusedAttention(torch.autograd.Function):
    """The operator's functions without its dispatch: from its `KernelTables`, documents, (scale,
    window), query, key and value, the tables and coefficients that have gradients, and decay sums,
    to the context.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernel: KernelTables,
        documents: list[Tensor],
        constants: tuple[float, int | None],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *leaves: Tensor | None,
    ) -> Tensor:
        inputs = query, key, value, *kernel, leaves[-1], documents, *constants
        output = _forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        ctx.set_materialize_grads(True)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_context: Tensor) -> tuple[Tensor | None, ...]:
        states, grad_tables, grad_sums = _all_gradients(
            _backward, grad_context, ctx, ctx.needs_input_grad[6:8]
        )
        return None, None, None, *states, *grad_tables, grad_sums


def _is_packed(query: Tensor, key: Tensor) -> bool:
    return query.shape == key.shape


def _empty_gradients(query: Tensor, key: Tensor) -> list[Tensor]:
    """Space for the gradients of query, key and value: a tensor `[3, b, h, s, d]`, stored as
    `[b, s, h, 3, d]` like a model's projection, so that the model need not copy it; or three
    tensors if the shapes differ.
    """
    if not _is_packed(query, key):
        return [torch.empty_like(query), torch.empty_like(key), torch.empty_like(key)]
    batch, heads, s, head_size = query.shape
    return [query.new_empty(batch, s, heads, 3, head_size).permute(3, 0, 2, 1, 4)]


def _with_contiguous_rows(states: Tensor) -> Tensor:
    """The kernels require contiguous rows, and int32 offsets of the rows of a tile."""
    if states.stride(-1) == 1 and states.stride(-2) <= MAX_ROW_STRIDE:
        return states
    return states.contiguous()


FUSED = Backend(
    "fused",
    fused_attention,
    dropout=False,
    noncausal=False,
    key_mask=False,
    value_sizes=False,
    decay=True,
    masks_documents=False,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    max_head_size=MAX_HEAD_SIZE,
    max_batch_heads=MAX_GRID,
    unavailable_reason=unavailable_reason,
)
