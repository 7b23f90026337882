"""The chunked backend: attention by chunks of queries in plain PyTorch operations, with exact
gradients of the tables.

The scores of a chunk are computed, used and discarded, and computed again in the backward pass:
memory is O(chunk * t). Keys after a chunk's last query are skipped, which halves the work of causal
attention. On a CPU the scores of a few heads stay in the cache, so attention with a table is about
as fast as PyTorch's own kernel without one. Sums are in a fixed order, so repeated runs give
bitwise identical results.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size; in a chunk:
n heads, m key/value heads, c queries, l keys.
"""

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from kerple.attention.backend import Backend, without_autocast
from kerple.attention.backends.chunk_plan import Chunk, ChunkPlan, ToeplitzTable, modify_rows
from kerple.attention.backends.reference import attend_to_chunk, softmax_or_zero
from kerple.attention.call import AttentionCall
from kerple.attention.span import Span
from kerple.attention.tables import PositionTables

# Scores this far below the maximum of their row (probabilities below e^-40), and weights below this
# fraction of the head's largest weight, are treated as masked. They are below float32's precision,
# but products and gradients turn them into denormal numbers, with which a CPU multiplies thirty
# times slower.
MIN_SCORE = -40.0
MIN_WEIGHT = 1e-10


def chunked_attention(call: AttentionCall) -> Tensor:
    """Like `attend`. Scores and softmax are float32 (float64 for float64 inputs)."""
    modified = call.modify_scores is not None or call.products is not None
    if modified or call.has_pair_mask or not call.span.causal:
        return _attend_in_chunks(call)
    if torch.compiler.is_compiling():
        # torch.compile does not trace into an operator, so one graph serves all lengths.
        tensors = call.query, call.key, call.value, call.tables.bias, call.tables.weight
        compiled, _ = _operator(*tensors, call.scale, call.span.window, call.dropout_p)
        return cast(Tensor, compiled)
    if call.q_len == 1 and not call.dropout_p:
        return _attend_to_single_query(call)
    inputs = (call.query, call.key, call.value, call.tables.bias, call.tables.weight)
    context: Tensor = _ChunkedAttention.apply(call, *inputs)
    return context


def _attend_in_chunks(call: AttentionCall) -> Tensor:
    """Attention with any scores and masks: autograd recomputes each chunk."""
    rows = modify_rows(call.query, call.kv_len)
    if call.query.device.type != "cpu":
        rows = -(-call.q_len // -(-call.q_len // rows))  # chunks of equal size
    contexts = []
    for first in range(0, call.q_len, rows):
        last = min(first + rows, call.q_len)
        keys = call.keys(slice(call.offset + first, call.offset + last))
        chunk = partial(
            attend_to_chunk, call=call, first_query=call.offset + first, first_key=keys.start
        )
        states = (
            call.query[:, :, first:last],
            call.key[:, :, keys],
            call.value[:, :, keys],
            call.tables.scores,
        )
        if torch.is_grad_enabled():
            # The state of the random number generators is restored, so both passes drop the same
            # probabilities.
            contexts.append(
                checkpoint(
                    chunk, *states, use_reentrant=False, preserve_rng_state=call.dropout_p > 0
                )
            )
        else:
            contexts.append(chunk(*states))
    return torch.cat(contexts, dim=2) if len(contexts) > 1 else contexts[0]


def _attend_to_single_query(call: AttentionCall) -> Tensor:
    """Single-token decoding: one row of scores, whose distances are those of a table in reverse
    order.
    """
    max_kv_len, dtype = call.max_kv_len, call.compute_dtype
    key, value = call.key[:, :, -max_kv_len:], call.value[:, :, -max_kv_len:]
    # The queries of all heads that share a key/value head are the rows of one matrix.
    group = (call.kv_heads, call.queries_per_kv)
    query = call.query.squeeze(2).unflatten(1, group)
    bias, weight = call.tables.bias, call.tables.weight
    if bias is not None:
        bias = bias[:, :max_kv_len].flip(-1).unflatten(0, group)
    if weight is not None:
        weight = weight[:, :max_kv_len].flip(-1).unflatten(0, group)
    if weight is None and query.device.type == "cpu" and (query.dtype != dtype or bias is None):
        # PyTorch's CPU kernel reads a half-precision cache without converting it, and takes a
        # float32 mask with it.
        mask = None if bias is None else bias.to(dtype)
        context: Tensor = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=call.scale
        )
        return context.reshape(call.context_shape)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * call.scale
    if weight is not None:
        scores = scores * weight
    if bias is None:
        probabilities = scores.softmax(dim=-1)
    else:
        probabilities = softmax_or_zero(scores + bias)
    context = probabilities @ value.to(dtype)
    return context.to(query.dtype).reshape(call.context_shape)


def _by_kv_head(states: Tensor, key: Tensor) -> Tensor:
    """`[n, c, ...]` -> `[m, n/m c, ...]`: the rows of all heads that share a key/value head of
    `[m, l, d]` are the rows of one matrix.
    """
    return states.view(len(key), -1, states.shape[-1])


class _ChunkScores:
    """Computes the probabilities of a chunk, in both passes. The chunk's queries are in reverse
    order, as its tables require (see `ToeplitzTable`).
    """

    def __init__(self, plan: ChunkPlan, call: AttentionCall, like: Tensor):
        self.scale = call.scale
        bias, weight = call.tables.bias, call.tables.weight
        # On a CPU, float32 numbers that are almost zero are treated as zero; see MIN_SCORE.
        avoids_denormals = like.device.type == "cpu" and like.dtype == torch.float32
        if weight is not None and avoids_denormals:
            size = weight.abs()
            weight = weight.masked_fill(size < MIN_WEIGHT * size.amax(dim=1, keepdim=True), 0.0)
        # Heads whose biases alone cause such probabilities.
        self.steep_heads: list[bool] = []
        if bias is not None and avoids_denormals:
            visible = bias[:, : plan.max_kv_len]
            self.steep_heads = (visible.amin(dim=1) - visible.amax(dim=1) < MIN_SCORE).tolist()
        # A query sees at least itself, at distance 0. Elsewhere than on a CPU, asking would wait
        # for the device.
        self.may_be_empty = bias is not None
        if bias is not None and like.device.type == "cpu":
            self.may_be_empty = bool((bias[:, 0] == float("-inf")).any())
        self.bias = ToeplitzTable(
            plan, 1 if bias is None else plan.heads, float("-inf"), like
        ).load(bias)
        self.weight = (
            None if weight is None else ToeplitzTable(plan, plan.heads, 0.0, like).load(weight)
        )
        # Without a bias the table is only a mask. Without a window, it masks only pairs of a
        # chunk's last `rows` keys.
        self.only_causal = bias is None and plan.max_kv_len == plan.kv_len
        reverse = torch.arange(plan.rows - 1, -1, -1, device=like.device)
        self.reverse_order = {chunk.rows: reverse[-chunk.rows :] for chunk in plan.chunks}

    def reversed_rows(self, states: Tensor, chunk: Chunk) -> Tensor:
        """A chunk's rows of `[n, s, d]`, last query first: `[n, c, d]`."""
        return states.narrow(1, chunk.first_query, chunk.rows).index_select(
            1, self.reverse_order[chunk.rows]
        )

    def write_reversed(self, states: Tensor, chunk: Chunk, rows: Tensor) -> None:
        """Write a chunk's rows, last query first, to `[n, s, d]`."""
        rows = rows.index_select(1, self.reverse_order[chunk.rows])
        states.narrow(1, chunk.first_query, chunk.rows).copy_(rows)

    def products(self, query: Tensor, key: Tensor, out: Tensor) -> Tensor:
        """scale * q.k of `[n, c, d]` and `[m, l, d]`, in `out` `[n, c, l]`."""
        rows = _by_kv_head(out, key)
        torch.baddbmm(
            rows, _by_kv_head(query, key), key.transpose(1, 2), beta=0, alpha=self.scale, out=rows
        )
        return out

    def probabilities(self, first_head: int, products: Tensor, out: Tensor) -> Tensor:
        """softmax(weight * products + bias), in `out`; `out` is `products` itself if there is no
        weight.
        """
        self.multiply_weight(first_head, products, out)
        scores, bias = self.bias.align(first_head, out)
        if self.only_causal:
            rows = out.shape[1]
            scores, bias = scores[..., -rows:], bias[..., -rows:]
        scores.add_(bias)
        if self.may_be_empty:
            is_empty = out.amax(dim=-1, keepdim=True) == float("-inf")
            torch.softmax(out.masked_fill_(is_empty, 0.0), dim=-1, out=out)
            return out.masked_fill_(is_empty, 0.0)
        if any(self.steep_heads[first_head : first_head + self.bias.group_heads]):
            torch.threshold_(out.sub_(out.amax(dim=-1, keepdim=True)), MIN_SCORE, float("-inf"))
        return torch.softmax(out, dim=-1, out=out)

    def multiply_weight(self, first_head: int, scores: Tensor, out: Tensor) -> None:
        """weight * scores, in `out`, both `[n, c, l]`. Does nothing if there is no weight."""
        if self.weight is not None:
            scores, weight = self.weight.align(first_head, scores)
            torch.mul(scores, weight, out=out.view_as(scores))


class _SeededDropout:
    """Dropout of probabilities that is repeated in the backward pass, chunk by chunk in the same
    order.
    """

    def __init__(self, probability: float, seed: int, device: torch.device):
        self.keep = 1.0 - probability
        self.generator = torch.Generator(device).manual_seed(seed)

    def factors(self, probabilities: Tensor) -> Tensor:
        """0, or 1 / (1 - p)."""
        return (
            torch.empty_like(probabilities)
            .bernoulli_(self.keep, generator=self.generator)
            .div_(self.keep)
        )


class _Workspace:
    """Memory for one matrix at a time, reused for all chunks so that it stays in the cache."""

    def __init__(self, size: int, like: Tensor):
        self.memory = like.new_empty(size)

    def __call__(self, *shape: int) -> Tensor:
        return self.memory[: math.prod(shape)].view(shape)


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias_table: Tensor | None,
        weight_table: Tensor | None,
    ) -> Tensor:
        # The backward pass recomputes the scores, with the same dropout.
        plan, seed = ChunkPlan.for_call(call), _draw_seed(call)
        ctx.save_for_backward(query, key, value, bias_table, weight_table)
        ctx.plan, ctx.seed = plan, seed
        ctx.scale, ctx.span, ctx.dropout_p = call.scale, call.span, call.dropout_p
        return _chunked_forward(call, plan, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_context: Tensor) -> tuple[Tensor | None, ...]:
        call = _restored_call(ctx.saved_tensors, ctx.scale, ctx.span, ctx.dropout_p)
        with without_autocast(call.query.device):
            grads = _chunked_backward(
                call, ctx.plan, ctx.seed, grad_context, *ctx.needs_input_grad[4:6]
            )
        return None, *grads


def _draw_seed(call: AttentionCall) -> int:
    """The seed of the call's dropout; 0 without dropout."""
    return int(torch.randint(2**62, (), device="cpu")) if call.dropout_p else 0


def _restored_call(
    tensors: Sequence[Tensor | None], scale: float, span: Span, dropout_p: float
) -> AttentionCall:
    """The call with these query, key, value, bias table and weight table."""
    query, key, value, bias_table, weight_table = tensors
    assert query is not None
    assert key is not None
    assert value is not None
    tables = PositionTables(bias=bias_table, weight=weight_table)
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=scale,
        tables=tables,
        span=span,
        dropout_p=dropout_p,
    )


def _chunked_forward(call: AttentionCall, plan: ChunkPlan, seed: int) -> Tensor:
    """The context `[b, h, s, v]`."""
    query, key, value = call.query, call.key, call.value
    dropout = _SeededDropout(call.dropout_p, seed, query.device) if call.dropout_p else None
    like = query.new_empty(0, dtype=call.compute_dtype)
    context = plan.empty_context(like, value.shape[3])
    scores = _ChunkScores(plan, call, like)
    workspace = _Workspace(plan.group_size * plan.rows * plan.max_chunk_keys, like)

    # Rows in groups of heads that share a key and value.
    groups = [plan.split(states.to(like.dtype)) for states in (query, context)]
    kv_groups = [plan.split_kv(states.to(like.dtype)) for states in (key, value)]

    # One matrix of scores at a time.
    for head, queries, contexts, keys, values in zip(
        plan.first_heads(), *groups, *kv_groups, strict=True
    ):
        for chunk in plan.chunks:
            matrix = workspace(len(queries), chunk.rows, chunk.keys)
            chunk_key, chunk_value = (
                states.narrow(1, chunk.first_key, chunk.keys) for states in (keys, values)
            )
            scores.products(scores.reversed_rows(queries, chunk), chunk_key, out=matrix)
            scores.probabilities(head, matrix, out=matrix)
            if dropout is not None:
                matrix.mul_(dropout.factors(matrix))
            rows = torch.bmm(_by_kv_head(matrix, chunk_value), chunk_value)
            scores.write_reversed(contexts, chunk, rows.view(len(queries), chunk.rows, -1))
    return context.to(query.dtype)


def _chunked_backward(
    call: AttentionCall,
    plan: ChunkPlan,
    seed: int,
    grad_context: Tensor,
    needs_grad_bias: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, bias table and weight table."""
    dtype, head_size = call.compute_dtype, call.query.shape[3]
    like = call.query.new_empty(0, dtype=dtype)
    dropout = _SeededDropout(call.dropout_p, seed, like.device) if call.dropout_p else None
    scores = _ChunkScores(plan, call, like)
    grads = [like.new_empty(states.shape) for states in (call.query, call.key, call.value)]

    # The first chunk of a group writes the gradients of all keys, unless a window excludes some of
    # them.
    first_chunk_writes = plan.max_chunk_keys == plan.kv_len
    if not first_chunk_writes:
        for grad in grads[1:]:
            grad.zero_()

    # Memory that all chunks use.
    grad_bias = ToeplitzTable(plan, plan.heads, 0.0, like) if needs_grad_bias else None
    grad_weight = ToeplitzTable(plan, plan.heads, 0.0, like) if needs_grad_weight else None
    scores_size = plan.group_size * plan.rows * plan.max_chunk_keys
    products_workspace, grad_workspace = (
        _Workspace(scores_size, like),
        _Workspace(scores_size, like),
    )
    weighted_workspace = (
        products_workspace if scores.weight is None else _Workspace(scores_size, like)
    )
    states_workspace = _Workspace(
        plan.group_size * plan.max_chunk_keys * max(head_size, call.value.shape[3]), like
    )
    groups = [plan.split(states.to(dtype)) for states in (call.query, grad_context, grads[0])]
    kv_groups = [plan.split_kv(states.to(dtype)) for states in (call.key, call.value, *grads[1:])]

    for head, *group in zip(plan.first_heads(), *groups, *kv_groups, strict=True):
        queries, grad_contexts, grad_queries, keys, values, grad_keys, grad_values = group
        for index, chunk in enumerate(plan.chunks):
            # Recompute the probabilities.
            shape = (len(queries), chunk.rows, chunk.keys)
            chunk_query = scores.reversed_rows(queries, chunk)
            chunk_grad_context = scores.reversed_rows(grad_contexts, chunk)
            key_states = [keys, values, grad_keys, grad_values]
            key_states = [states.narrow(1, chunk.first_key, chunk.keys) for states in key_states]
            chunk_key, chunk_value, chunk_grad_key, chunk_grad_value = key_states
            products = scores.products(chunk_query, chunk_key, out=products_workspace(*shape))
            probabilities = scores.probabilities(head, products, out=weighted_workspace(*shape))

            # Value, and the gradient of the probabilities.
            grad = grad_workspace(*shape)
            grad_rows, chunk_grad_context = (
                _by_kv_head(grad, keys),
                _by_kv_head(chunk_grad_context, keys),
            )
            torch.bmm(chunk_grad_context, chunk_value.transpose(1, 2), out=grad_rows)
            dropped = probabilities
            if dropout is not None:
                factors = dropout.factors(probabilities)
                grad.mul_(factors)
                dropped = factors.mul_(probabilities)
            overwrite = first_chunk_writes and index == 0 and head % call.queries_per_kv == 0
            dropped = _by_kv_head(dropped, keys)
            _add_product(
                chunk_grad_value, dropped, chunk_grad_context, 1.0, overwrite, states_workspace
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
            chunk_query = _by_kv_head(chunk_query, keys)
            rows = states_workspace(*chunk_query.shape)
            torch.baddbmm(rows, grad_rows, chunk_key, beta=0, alpha=call.scale, out=rows)
            scores.write_reversed(grad_queries, chunk, rows.view(*shape[:2], head_size))
            _add_product(
                chunk_grad_key, grad_rows, chunk_query, call.scale, overwrite, states_workspace
            )

    grad_tables: list[Tensor | None] = [None, None]
    if grad_bias is not None and call.tables.bias is not None:
        grad_tables[0] = grad_bias.to_table(call.tables.bias.shape[1]).to(call.tables.bias.dtype)
    if grad_weight is not None and call.tables.weight is not None:
        grad_tables[1] = grad_weight.to_table(call.tables.weight.shape[1]).to(
            call.tables.weight.dtype
        )
    return *(grad.to(call.query.dtype) for grad in grads), *grad_tables


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
        torch.baddbmm(target, left, right, beta=0 if overwrite else 1, alpha=scale, out=target)
    else:
        # PyTorch is slower if the output is a part of each head's keys.
        target.add_(torch.bmm(left, right, out=workspace(*target.shape)), alpha=scale)


# -- the same as operators of torch.library, for torch.compile -------------------------------------


def _operator_forward(
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
    tensors = query, key, value, bias_table, weight_table
    call = _restored_call(tensors, scale, Span(window), dropout_p)
    seed = _draw_seed(call)
    context = _chunked_forward(call, ChunkPlan.for_call(call), seed)
    return context.transpose(1, 2).contiguous().transpose(1, 2), torch.tensor(seed, device="cpu")


# Exported models contain this file, so each copy has its own name.
_NAMESPACE = re.sub(r"\W", "_", __name__)
_operator = torch.library.custom_op(f"{_NAMESPACE}::attention", _operator_forward, mutates_args=())


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    context = query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)
    return context, torch.empty((), dtype=torch.int64, device="cpu")


def _operator_backward(
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
    tensors = query, key, value, bias_table, weight_table
    call = _restored_call(tensors, scale, Span(window), dropout_p)
    with without_autocast(query.device):
        grads = _chunked_backward(
            call, ChunkPlan.for_call(call), int(seed), grad_context, needs_bias, needs_weight
        )
    return [grad.contiguous() for grad in grads if grad is not None]


_backward_operator = torch.library.custom_op(
    f"{_NAMESPACE}::attention_backward", _operator_backward, mutates_args=()
)


@_backward_operator.register_fake
def _(
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
    grads = [tensor.new_empty(tensor.shape) for tensor in (query, key, value)]
    if needs_bias and bias_table is not None:
        grads.append(bias_table.new_empty(bias_table.shape))
    if needs_weight and weight_table is not None:
        grads.append(weight_table.new_empty(weight_table.shape))
    return grads


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], output[1])
    ctx.constants = inputs[5:]


def _gradients(ctx: Any, grad_context: Tensor, grad_seed: None) -> tuple[Tensor | None, ...]:
    needs_bias, needs_weight = ctx.needs_input_grad[3:5]
    grads = _backward_operator(
        grad_context, *ctx.saved_tensors, *ctx.constants, needs_bias, needs_weight
    )
    states, tables = grads[:3], grads[3:]
    grad_bias = tables.pop(0) if needs_bias else None
    grad_weight = tables.pop(0) if needs_weight else None
    return *states, grad_bias, grad_weight, None, None, None


_operator.register_autograd(_gradients, setup_context=_save_for_backward)


CHUNKED = Backend("chunked", chunked_attention, modify_scores=True)
