"""Attention by chunks of queries, with exact gradients of the tables, in plain PyTorch operations.

A chunk's scores are made, used and forgotten, and made again in the backward pass: memory is O(chunk * t). Keys after
the chunk's last query are never touched, which saves the causal half. On a CPU the scores of a few heads stay in the
cache from the first product to the last, which makes any table about as fast as PyTorch's own kernel is without one. No
sum depends on the order in which threads finish: a second run gives the same bits.

Legend: b batch, s query length, t key length, h heads, d head size; in a chunk: g heads, c queries, l keys.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kerple.attention.backends.plan import Band, Chunk, Plan
from kerple.attention.precision import no_autocast

# Scores so far below the largest of their row (their probabilities are e^-40 at most), and weights below this part of
# the head's largest, count as none. Float32 cannot show them beside the others, but on the way through products and
# gradients they would become denormal numbers, with which a CPU multiplies thirty times slower.
LOWEST_SCORE = -40.0
LOWEST_WEIGHT = 1e-10


def chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    window: int | None,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """As `attend`. Scores and softmax are float32 (float64 for float64 inputs)."""
    if query.shape[2] == 1 and not dropout_p:
        return _single_query(query, key, value, bias_table, weight_table, window, scale)
    return _Chunked.apply(query, key, value, bias_table, weight_table, window, dropout_p, scale)


def _single_query(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """Decoding with a cache: one row of scores, whose distances are those of a table read backwards."""
    t = key.shape[2]
    max_kv_len = t if window is None else min(t, window)
    key, value = key[:, :, t - max_kv_len :], value[:, :, t - max_kv_len :]
    dtype = torch.promote_types(query.dtype, torch.float32)
    low_precision = query.dtype != dtype
    if weight_table is None and query.device.type == "cpu" and (low_precision or bias_table is None):
        # PyTorch's CPU kernel reads a half-precision cache as it is, and takes a float32 mask beside it.
        mask = None if bias_table is None else bias_table[:, None, :max_kv_len].flip(-1).to(dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * scale
    if weight_table is not None:
        scores = scores * weight_table[:, None, :max_kv_len].flip(-1)
    if bias_table is not None:
        scores = scores + bias_table[:, None, :max_kv_len].flip(-1)
    return (scores.softmax(dim=-1) @ value.to(dtype)).to(query.dtype)


class _Work:
    """What both passes need of one call: the tables as bands, and the way from products to probabilities."""

    def __init__(self, plan: Plan, bias: Tensor | None, weight: Tensor | None, scale: float, like: Tensor):
        self.scale = scale
        self.bias = Band(plan, 1 if bias is None else plan.heads, float("-inf"), like).load(bias)
        self.weight = None if weight is None else Band(plan, plan.heads, 0.0, like).load(_visible_weights(weight, like))
        # Without a bias there is still the mask; without a window too, all of it is in a chunk's own block of keys.
        self.only_causal = bias is None and plan.max_kv_len == plan.t
        self.steep = _steep_heads(bias, plan.max_kv_len, like)
        reverse = torch.arange(plan.rows - 1, -1, -1, device=like.device)
        self.reverses = {chunk.rows: reverse[-chunk.rows :] for chunk in plan.chunks}

    def reversed_rows(self, states: Tensor, chunk: Chunk) -> Tensor:
        """A chunk's rows of `[g, s, d]`, last query first: `[g, c, d]`."""
        return states.narrow(1, chunk.first, chunk.rows).index_select(1, self.reverses[chunk.rows])

    def write_reversed(self, states: Tensor, chunk: Chunk, rows: Tensor) -> None:
        """The opposite of `reversed_rows`."""
        states.narrow(1, chunk.first, chunk.rows).copy_(rows.index_select(1, self.reverses[chunk.rows]))

    def products(self, query: Tensor, key: Tensor, out: Tensor) -> Tensor:
        """q.k scaled, of `[g, c, d]` and `[g, l, d]`, in `out`."""
        return torch.baddbmm(out, query, key.transpose(1, 2), beta=0, alpha=self.scale, out=out)

    def probabilities(self, first_head: int, products: Tensor, out: Tensor) -> Tensor:
        """softmax(weight * products + bias) in `out`, which is `products` itself where there is no weight."""
        if self.weight is not None:
            self.weigh(first_head, products, out)
        scores, bias = self.bias.matched(first_head, out)
        if self.only_causal:
            rows = out.shape[1]
            scores, bias = scores[..., -rows:], bias[..., -rows:]
        scores.add_(bias)
        if any(self.steep[first_head : first_head + self.bias.span]):
            torch.threshold_(out.sub_(out.amax(dim=-1, keepdim=True)), LOWEST_SCORE, float("-inf"))
        return torch.softmax(out, dim=-1, out=out)

    def weigh(self, first_head: int, states: Tensor, out: Tensor) -> None:
        """weight * states, in `out`; both `[g, c, l]`."""
        states, weight = self.weight.matched(first_head, states)
        torch.mul(states, weight, out=out.view_as(states))


def _denormals_hurt(like: Tensor) -> bool:
    return like.device.type == "cpu" and like.dtype == torch.float32


def _steep_heads(bias: Tensor | None, max_kv_len: int, like: Tensor) -> list[bool]:
    """The heads whose biases, `[h, >= max_kv_len]`, alone make probabilities that are next to nothing."""
    if bias is None or not _denormals_hurt(like):
        return []
    bias = bias[:, :max_kv_len]
    return (bias.amin(dim=1) - bias.amax(dim=1) < LOWEST_SCORE).tolist()


def _visible_weights(weight: Tensor | None, like: Tensor) -> Tensor | None:
    """Weights `[h, t]` with those that are next to nothing at zero."""
    if weight is None or not _denormals_hurt(like):
        return weight
    size = weight.abs()
    return weight.masked_fill(size < LOWEST_WEIGHT * size.amax(dim=1, keepdim=True), 0.0)


class _Dropout:
    """Dropout of probabilities. Its pattern is drawn again in the backward pass, piece by piece in the same order."""

    def __init__(self, probability: float, seed: int, device: torch.device):
        self.kept = 1.0 - probability
        self.generator = torch.Generator(device).manual_seed(seed)

    def factors(self, probabilities: Tensor) -> Tensor:
        """0, or 1 / (1 - p)."""
        return torch.empty_like(probabilities).bernoulli_(self.kept, generator=self.generator).div_(self.kept)


class _Scratch:
    """Memory for one matrix at a time, used again for every piece so that it stays in the cache."""

    def __init__(self, size: int, like: Tensor):
        self.memory = like.new_empty(size)

    def __call__(self, *shape: int) -> Tensor:
        return self.memory[: math.prod(shape)].view(shape)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, bias_table, weight_table, window, dropout_p, scale):
        dtype = torch.promote_types(query.dtype, torch.float32)
        plan = Plan.make(query, key, window, dtype)
        seed = int(torch.randint(2**62, ())) if dropout_p else 0
        ctx.save_for_backward(query, key, value, bias_table, weight_table)
        ctx.plan, ctx.dtype, ctx.scale, ctx.dropout_p, ctx.seed = plan, dtype, scale, dropout_p, seed

        dropout = _Dropout(dropout_p, seed, query.device) if dropout_p else None
        like = query.new_empty(0, dtype=dtype)
        context = plan.new_context(like, query.shape[3])
        work = _Work(plan, bias_table, weight_table, scale, like)
        scratch = _Scratch(plan.group * plan.rows * plan.most_keys, like)
        groups = (plan.split(states.to(dtype)) for states in (query, key, value, context))

        for head, queries, keys, values, contexts in zip(plan.first_heads(), *groups, strict=True):
            for chunk in plan.chunks:
                matrix = scratch(len(queries), chunk.rows, chunk.keys)
                work.products(work.reversed_rows(queries, chunk), keys.narrow(1, chunk.begin, chunk.keys), out=matrix)
                work.probabilities(head, matrix, out=matrix)
                if dropout is not None:
                    matrix.mul_(dropout.factors(matrix))
                rows = torch.bmm(matrix, values.narrow(1, chunk.begin, chunk.keys))
                work.write_reversed(contexts, chunk, rows)
        return context.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, context_gradient):
        query, key, value, bias_table, weight_table = ctx.saved_tensors
        plan, dtype, scale = ctx.plan, ctx.dtype, ctx.scale
        size = query.shape[3]

        with no_autocast(query.device):
            dropout = _Dropout(ctx.dropout_p, ctx.seed, query.device) if ctx.dropout_p else None
            like = query.new_empty(0, dtype=dtype)
            work = _Work(plan, bias_table, weight_table, scale, like)
            gradients = [plan.new_states(like, length, size) for length in (plan.s, plan.t, plan.t)]
            # The first chunk of a group writes the gradient of all keys, unless a window keeps some from it.
            whole = plan.most_keys == plan.t
            if not whole:
                for gradient in gradients[1:]:
                    gradient.zero_()
            bias_gradient, weight_gradient = (
                Band(plan, plan.heads, 0.0, like) if wanted else None for wanted in ctx.needs_input_grad[3:5]
            )
            scores_size = plan.group * plan.rows * plan.most_keys
            products_scratch, gradient_scratch = _Scratch(scores_size, like), _Scratch(scores_size, like)
            weighed_scratch = products_scratch if work.weight is None else _Scratch(scores_size, like)
            states_scratch = _Scratch(plan.group * plan.most_keys * size, like)
            groups = (plan.split(states.to(dtype)) for states in (query, key, value, context_gradient, *gradients))

            for head, queries, keys, values, contexts_gradient, *grads in zip(plan.first_heads(), *groups, strict=True):
                for index, chunk in enumerate(plan.chunks):
                    shape = (len(queries), chunk.rows, chunk.keys)
                    chunk_query = work.reversed_rows(queries, chunk)
                    chunk_gradient = work.reversed_rows(contexts_gradient, chunk)
                    chunk_key, chunk_value, key_gradient, value_gradient = (
                        states.narrow(1, chunk.begin, chunk.keys) for states in (keys, values, *grads[1:])
                    )
                    products = work.products(chunk_query, chunk_key, out=products_scratch(*shape))
                    probabilities = work.probabilities(head, products, out=weighed_scratch(*shape))

                    gradient = torch.bmm(chunk_gradient, chunk_value.transpose(1, 2), out=gradient_scratch(*shape))
                    dropped = probabilities
                    if dropout is not None:
                        factors = dropout.factors(probabilities)
                        gradient.mul_(factors)
                        dropped = factors.mul_(probabilities)
                    fresh = whole and index == 0
                    _add_product(value_gradient, dropped, chunk_gradient, 1.0, fresh, states_scratch)

                    # Through the softmax, in place.
                    torch.ops.aten._softmax_backward_data.out(gradient, probabilities, -1, dtype, grad_input=gradient)
                    if bias_gradient is not None:
                        bias_gradient.add_gradient(head, gradient)
                    if weight_gradient is not None:
                        weight_gradient.add_gradient(head, products.mul_(gradient))
                    if work.weight is not None:
                        work.weigh(head, gradient, out=gradient)

                    rows = states_scratch(*chunk_query.shape)
                    torch.baddbmm(rows, gradient, chunk_key, beta=0, alpha=scale, out=rows)
                    work.write_reversed(grads[0], chunk, rows)
                    _add_product(key_gradient, gradient, chunk_query, scale, fresh, states_scratch)

        table_gradients = (
            None if band is None else band.table(table.shape[1]).to(table.dtype)
            for band, table in ((bias_gradient, bias_table), (weight_gradient, weight_table))
        )
        return *(gradient.to(query.dtype) for gradient in gradients), *table_gradients, None, None, None


def _add_product(target: Tensor, left: Tensor, right: Tensor, scale: float, fresh: bool, scratch: _Scratch) -> None:
    """Add scale * left^T right, of `[g, c, l]` and `[g, c, d]`, to `[g, l, d]`; write it there when that is fresh."""
    left = left.transpose(1, 2)
    if fresh or target.is_contiguous():
        torch.baddbmm(target, left, right, beta=0 if fresh else 1, alpha=scale, out=target)
    else:
        # Straight into a part of each head's keys, the product would take a slower way.
        target.add_(torch.bmm(left, right, out=scratch(*target.shape)), alpha=scale)
