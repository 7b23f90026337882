"""The chunked backend: attention by chunks of queries in plain PyTorch operations, with exact
gradients of the tables.

The scores of a chunk are computed, used and discarded, and computed again in the backward pass:
memory is O(chunk * t). Keys after a chunk's last query are skipped, which halves the work of causal
attention. On a CPU, PyTorch's kernel computes the forward pass of a bias, and the scores of a few
heads stay in the cache otherwise, so attention with a table is about as fast as PyTorch's own
kernel without one. Sums are in a fixed order, so repeated runs give bitwise identical results.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size; in a chunk:
n heads, m key/value heads, c queries, l keys.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from kerple.attention.backend import Backend, without_autocast
from kerple.attention.backends.chunk_plan import ChunkPlan, ToeplitzTable, modify_rows
from kerple.attention.backends.chunk_scores import ChunkScores, by_kv_head
from kerple.attention.backends.reference import attend_to_chunk, softmax_or_zero
from kerple.attention.backends.sdpa import cpu_kernel_forward, fits_cpu_kernel
from kerple.attention.call import AttentionCall
from kerple.attention.parts import joined
from kerple.attention.span import Span
from kerple.attention.tables import PositionTables


def chunked_attention(call: AttentionCall) -> Tensor:
    """Like `attend`. Scores and softmax are float32 (float64 for float64 inputs). PyTorch's kernel
    rounds half-precision probabilities.
    """
    modified = call.modify_scores is not None or call.products is not None
    if modified or call.has_pair_mask or not call.span.causal:
        return _attend_in_chunks(call)
    tensors = call.query, call.key, call.value, call.tables.bias, call.tables.weight
    inputs = *tensors, call.scale, call.span.window, call.dropout_p
    if torch.compiler.is_compiling():
        # torch.compile does not trace into an operator, so one graph serves all lengths.
        compiled, _ = _operator(*inputs)
        return cast(Tensor, compiled)
    if call.q_len == 1 and not call.dropout_p:
        return _attend_to_single_query(call)
    context: Tensor = _ChunkedAttention.apply(*inputs)
    return context


def _attend_in_chunks(call: AttentionCall) -> Tensor:
    """Attention with any scores and masks: autograd recomputes each chunk."""
    # The queries of a chunk, whose scores are all in memory.
    rows = modify_rows(call.query, call.kv_len)
    number = _chunks(call.q_len, rows)
    # With dropout, the state of the random number generators is restored, so both passes drop the
    # same probabilities.
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=call.dropout_p > 0)
    contexts = []
    for index in range(number):
        first = index * call.q_len // number
        last = (index + 1) * call.q_len // number
        position = call.offset + first
        keys = call.keys(slice(position, call.offset + last))
        attend = partial(attend_to_chunk, call=call, first_query=position, first_key=keys.start)
        if torch.is_grad_enabled():
            attend = partial(recompute, attend)
        query = call.query[:, :, first:last]
        key = call.key[:, :, keys]
        value = call.value[:, :, keys]
        contexts.append(attend(query, key, value, call.tables.scores))
    return joined(contexts)


def _chunks(q_len: int, rows: int) -> int:
    """The number of chunks of so many queries. In compiled code, where each number is a graph of
    its own, the next power of two.
    """
    if not torch.compiler.is_compiling():
        return -(-q_len // rows)
    number = 1
    while number * rows < q_len:
        number *= 2
    return number


def _attend_to_single_query(call: AttentionCall) -> Tensor:
    """Single-token decoding: one row of scores, with the distances of a table in reverse."""
    max_kv_len = call.max_kv_len
    dtype = call.compute_dtype
    key = call.key[:, :, -max_kv_len:]
    value = call.value[:, :, -max_kv_len:]
    # The queries of all heads that share a key/value head are the rows of one matrix.
    group = (call.kv_heads, call.queries_per_kv)
    query = call.query.squeeze(2).unflatten(1, group)  # [b, g, h/g, d]
    bias = call.tables.bias
    weight = call.tables.weight
    if bias is not None:
        bias = bias[:, :max_kv_len].flip(-1)
        bias = bias.unflatten(0, group)  # [g, h/g, t]
    if weight is not None:
        weight = weight[:, :max_kv_len].flip(-1)
        weight = weight.unflatten(0, group)  # [g, h/g, t]
    on_cpu = query.device.type == "cpu"
    if weight is None and on_cpu and (query.dtype != dtype or bias is None):
        # PyTorch's CPU kernel reads a half-precision cache without converting it, and takes a
        # float32 mask with it.
        if bias is not None:
            bias = bias.to(dtype)
        context: Tensor = F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=call.scale
        )
        return context.reshape(call.context_shape)

    # Elsewhere, the row of scores `[b, g, h/g, t]`.
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2)
    scores = scores * call.scale
    if weight is not None:
        scores = scores * weight
    if bias is None:
        probabilities = scores.softmax(dim=-1)
    else:
        probabilities = softmax_or_zero(scores + bias)
    context = probabilities @ value.to(dtype)  # [b, g, h/g, v]
    context = context.to(query.dtype)
    return context.reshape(call.context_shape)


class _SeededDropout:
    """Dropout of probabilities that both passes repeat, chunk by chunk in the same order."""

    def __init__(self, probability: float, seed: int, device: torch.device):
        self.keep = 1.0 - probability
        self.generator = torch.Generator(device).manual_seed(seed)

    @classmethod
    def of(cls, call: AttentionCall, seed: int) -> "_SeededDropout | None":
        """That of a call; None without dropout."""
        if not call.dropout_p:
            return None
        return cls(call.dropout_p, seed, call.query.device)

    def factors(self, probabilities: Tensor) -> Tensor:
        """0, or 1 / (1 - p)."""
        kept = torch.empty_like(probabilities).bernoulli_(self.keep, generator=self.generator)
        return kept.div_(self.keep)


class _Workspace:
    """Memory for one matrix at a time, reused for all chunks so that it stays in the cache."""

    def __init__(self, size: int, like: Tensor):
        self.memory = like.new_empty(size)

    def __call__(self, *shape: int) -> Tensor:
        size = math.prod(shape)
        return self.memory[:size].view(shape)


def _chunked_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    scale: float,
    window: int | None,
    dropout_p: float,
) -> AttentionCall:
    """The call with the operator's arguments."""
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=scale,
        tables=PositionTables(bias=bias_table, weight=weight_table),
        span=Span(window),
        dropout_p=dropout_p,
    )


def _chunked_forward(call: AttentionCall, seed: int) -> Tensor:
    """The context `[b, h, s, v]`."""
    if fits_cpu_kernel(call):
        return cpu_kernel_forward(call)
    plan = ChunkPlan.for_call(call)
    dtype = call.compute_dtype
    dropout = _SeededDropout.of(call, seed)
    like = call.query.new_empty(0, dtype=dtype)
    # What all chunks use: the result, the tables, and memory for one matrix.
    context = plan.empty_context(like, call.value.shape[3])
    scores = ChunkScores(plan, call, like)
    matrix_size = plan.group_size * plan.rows * plan.max_chunk_keys
    workspace = _Workspace(matrix_size, like)

    # Rows in groups of heads that share a key and value.
    groups = zip(
        plan.first_heads(),
        plan.split(call.query.to(dtype)),
        plan.split_kv(call.key.to(dtype)),
        plan.split_kv(call.value.to(dtype)),
        plan.split(context),
        strict=True,
    )

    # One matrix of scores at a time.
    for head, queries, keys, values, contexts in groups:
        for chunk in plan.chunks:
            matrix = workspace(len(queries), chunk.rows, chunk.keys)  # [n, c, l]
            chunk_query = scores.reversed_rows(queries, chunk)  # [n, c, d]
            chunk_key = keys.narrow(1, chunk.first_key, chunk.keys)  # [m, l, d]
            chunk_value = values.narrow(1, chunk.first_key, chunk.keys)  # [m, l, v]
            # Its scores become probabilities in place.
            scores.products(chunk_query, chunk_key, out=matrix)
            scores.probabilities(head, matrix, out=matrix)
            if dropout is not None:
                matrix.mul_(dropout.factors(matrix))
            probabilities = by_kv_head(matrix, chunk_value)  # [m, n/m c, l]
            rows = torch.bmm(probabilities, chunk_value)  # [m, n/m c, v]
            rows = rows.view(len(queries), chunk.rows, -1)  # [n, c, v]
            scores.write_reversed(contexts, chunk, rows)
    return context.to(call.query.dtype)


def _chunked_backward(
    call: AttentionCall,
    seed: int,
    grad_context: Tensor,
    needs_grad_bias: bool,
    needs_grad_weight: bool,
) -> list[Tensor]:
    """The gradients of query, key and value, and of the tables that need one."""
    plan = ChunkPlan.for_call(call)
    dtype = call.compute_dtype
    head_size = call.query.shape[3]
    like = call.query.new_empty(0, dtype=dtype)
    dropout = _SeededDropout.of(call, seed)
    scores = ChunkScores(plan, call, like)
    grad_query = like.new_empty(call.query.shape)
    grad_key = like.new_empty(call.key.shape)
    grad_value = like.new_empty(call.value.shape)

    # The first chunk of a group writes the gradients of all keys, unless a window excludes some of
    # them.
    first_chunk_writes = plan.max_chunk_keys == plan.kv_len
    if not first_chunk_writes:
        grad_key.zero_()
        grad_value.zero_()

    # Memory that all chunks use.
    grad_bias = grad_weight = None
    if needs_grad_bias:
        grad_bias = ToeplitzTable(plan, plan.heads, 0.0, like)
    if needs_grad_weight:
        grad_weight = ToeplitzTable(plan, plan.heads, 0.0, like)
    keys_size = plan.group_size * plan.max_chunk_keys
    matrix_size = keys_size * plan.rows
    products_workspace = weighted_workspace = _Workspace(matrix_size, like)
    grad_workspace = _Workspace(matrix_size, like)
    if scores.weight is not None:
        weighted_workspace = _Workspace(matrix_size, like)
    largest_head = max(head_size, call.value.shape[3])
    states_workspace = _Workspace(keys_size * largest_head, like)

    # Rows in groups of heads that share a key and value.
    groups = zip(
        plan.first_heads(),
        plan.split(call.query.to(dtype)),
        plan.split(grad_context.to(dtype)),
        plan.split(grad_query),
        plan.split_kv(call.key.to(dtype)),
        plan.split_kv(call.value.to(dtype)),
        plan.split_kv(grad_key),
        plan.split_kv(grad_value),
        strict=True,
    )
    for head, queries, grad_contexts, grad_queries, *kv_group in groups:
        keys, values, grad_keys, grad_values = kv_group
        for index, chunk in enumerate(plan.chunks):
            # Its queries `[n, c, d]`, and its keys and values `[m, l, d]`.
            chunk_query = scores.reversed_rows(queries, chunk)
            chunk_grad_context = scores.reversed_rows(grad_contexts, chunk)
            chunk_key = keys.narrow(1, chunk.first_key, chunk.keys)
            chunk_value = values.narrow(1, chunk.first_key, chunk.keys)
            chunk_grad_key = grad_keys.narrow(1, chunk.first_key, chunk.keys)
            chunk_grad_value = grad_values.narrow(1, chunk.first_key, chunk.keys)
            # Recompute the probabilities.
            shape = (len(queries), chunk.rows, chunk.keys)
            products = products_workspace(*shape)
            scores.products(chunk_query, chunk_key, out=products)
            probabilities = weighted_workspace(*shape)
            scores.probabilities(head, products, out=probabilities)

            # Value, and the gradient of the probabilities.
            grad = grad_workspace(*shape)
            grad_rows = by_kv_head(grad, keys)
            chunk_grad_context = by_kv_head(chunk_grad_context, keys)
            torch.bmm(chunk_grad_context, chunk_value.transpose(1, 2), out=grad_rows)
            dropped = probabilities
            if dropout is not None:
                factors = dropout.factors(probabilities)
                grad.mul_(factors)
                dropped = factors.mul_(probabilities)
            is_first = index == 0 and head % call.queries_per_kv == 0
            overwrite = first_chunk_writes and is_first
            dropped = by_kv_head(dropped, keys)
            _add_product(
                chunk_grad_value,
                dropped,
                chunk_grad_context,
                scale=1.0,
                overwrite=overwrite,
                workspace=states_workspace,
            )

            # Through the softmax, in place.
            torch.ops.aten._softmax_backward_data.out(
                grad, probabilities, -1, dtype, grad_input=grad
            )
            if grad_bias is not None:
                grad_bias.add_gradient(head, grad)
            if grad_weight is not None:
                grad_weight.add_gradient(head, products.mul_(grad))
            scores.multiply_weight(head, grad, out=grad)

            # Query and key.
            chunk_query = by_kv_head(chunk_query, keys)
            rows = states_workspace(*chunk_query.shape)
            torch.baddbmm(rows, grad_rows, chunk_key, beta=0, alpha=call.scale, out=rows)
            rows = rows.view(len(queries), chunk.rows, head_size)
            scores.write_reversed(grad_queries, chunk, rows)
            _add_product(
                chunk_grad_key,
                grad_rows,
                chunk_query,
                scale=call.scale,
                overwrite=overwrite,
                workspace=states_workspace,
            )

    # The gradients of tables over distance, beyond the largest visible distance zero.
    grads = []
    tables = (call.tables.bias, grad_bias), (call.tables.weight, grad_weight)
    for table, grad_table in tables:
        if table is not None and grad_table is not None:
            grad = grad_table.to_table(table.shape[1])
            grads.append(grad.to(table.dtype))
    dtype = call.query.dtype
    return [grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype), *grads]


def _add_product(
    target: Tensor,
    left: Tensor,
    right: Tensor,
    scale: float,
    overwrite: bool,
    workspace: _Workspace,
) -> None:
    """Add scale * left^T right, of `[m, n/m c, l]` and `[m, n/m c, d]`, to `[m, l, d]`, or
    overwrite it.
    """
    left = left.transpose(1, 2)
    if overwrite or target.is_contiguous():
        torch.baddbmm(target, left, right, beta=int(not overwrite), alpha=scale, out=target)
    else:
        # PyTorch is slower if the output is a part of each head's keys.
        product = workspace(*target.shape)
        torch.bmm(left, right, out=product)
        target.add_(product, alpha=scale)


# -- autograd, and operators of torch.library for torch.compile ------------------------------------


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    scale: float,
    window: int | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """The context, in memory `[b, s, h, v]`, and the seed of the dropout."""
    call = _chunked_call(query, key, value, bias_table, weight_table, scale, window, dropout_p)
    seed = torch.zeros((), dtype=torch.int64, device="cpu")
    if dropout_p:
        seed = torch.randint(2**62, (), device="cpu")
    context = _chunked_forward(call, int(seed))
    context = context.transpose(1, 2).contiguous()  # [b, s, h, v]
    return context.transpose(1, 2), seed


# Exported models contain this file, so each copy has its own name.
_NAMESPACE = re.sub(r"\W", "_", __name__)
_operator = torch.library.custom_op(f"{_NAMESPACE}::attention", _forward, mutates_args=())


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    context = query.new_empty(batch, length, heads, value.shape[3])
    seed = torch.empty((), dtype=torch.int64, device="cpu")
    return context.transpose(1, 2), seed


def _backward(
    grad_context: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    seed: Tensor,
    scale: float,
    window: int | None,
    dropout_p: float,
    needs_bias: bool,
    needs_weight: bool,
) -> list[Tensor]:
    """The gradients of query, key and value, and of the tables that need one."""
    call = _chunked_call(query, key, value, bias_table, weight_table, scale, window, dropout_p)
    with without_autocast(query.device):
        grads = _chunked_backward(call, int(seed), grad_context, needs_bias, needs_weight)
    return [grad.contiguous() for grad in grads]


_backward_operator = torch.library.custom_op(
    f"{_NAMESPACE}::attention_backward", _backward, mutates_args=()
)


@_backward_operator.register_fake
def _(grad_context: Tensor, *arguments: Any) -> list[Tensor]:
    *states, bias_table, weight_table = arguments[:5]
    needs_bias, needs_weight = arguments[-2:]
    grads = [tensor.new_empty(tensor.shape) for tensor in states]
    if needs_bias:
        grads.append(bias_table.new_empty(bias_table.shape))
    if needs_weight:
        grads.append(weight_table.new_empty(weight_table.shape))
    return grads


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, seed = output
    ctx.save_for_backward(*inputs[:5], seed)
    ctx.constants = inputs[5:]


def _gradients(
    ctx: Any,
    grad_context: Tensor,
    grad_seed: None = None,
    backward: Callable[..., list[Tensor]] = _backward_operator,
) -> tuple[Tensor | None, ...]:
    needs_bias, needs_weight = ctx.needs_input_grad[3:5]
    grads = backward(grad_context, *ctx.saved_tensors, *ctx.constants, needs_bias, needs_weight)
    grad_bias = grad_weight = None
    if needs_bias:
        grad_bias = grads[3]
    if needs_weight:
        grad_weight = grads[-1]
    return *grads[:3], grad_bias, grad_weight, None, None, None


_operator.register_autograd(_gradients, setup_context=_save_for_backward)


class _ChunkedAttention(torch.autograd.Function):
    """The operator without its dispatch: from its arguments to the context."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_context: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad_context, backward=_backward)


CHUNKED = Backend("chunked", chunked_attention, modify_scores=True)
