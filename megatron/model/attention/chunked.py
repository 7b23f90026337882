"""Attention by chunks of queries, with exact gradients of the tables, in plain PyTorch operations.

A chunk's scores are made, used and forgotten, and made again in the backward pass: memory is O(chunk * t). Keys after
the chunk's last query are never touched, which saves the causal half. On a CPU the scores of a few heads stay in the
cache from the first product to the last, and this is faster than `scaled_dot_product_attention`, though it serves any
table. No sum depends on the order in which threads finish: a second run gives the same bits.

Legend: b batch, s query length, t key length, h heads, d head size; in a chunk: g heads, c queries, l keys.
"""

import contextlib
import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.model.attention.plan import Band, Piece, Plan


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
    reach = t if window is None else min(t, window)
    key, value = key[:, :, t - reach :], value[:, :, t - reach :]
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * scale
    if weight_table is not None:
        scores = scores * weight_table[:, None, :reach].flip(-1)
    if bias_table is not None:
        scores = scores + bias_table[:, None, :reach].flip(-1)
    return (scores.softmax(dim=-1) @ value.to(dtype)).to(query.dtype)


class _Work:
    """What both passes need of one call: states cut into stacks, tables as bands, and the way from them to
    probabilities."""

    def __init__(
        self, plan: Plan, query: Tensor, key: Tensor, value: Tensor, tables: tuple[Tensor | None, ...], scale: float
    ):
        self.plan = plan
        self.scale = scale
        self.query, self.key, self.value = (plan.stacks(states) for states in (query, key, value))
        bias, weight = tables
        self.bias = Band(plan, 1 if bias is None else plan.heads, float("-inf"), query).load(bias)
        self.weight = None if weight is None else Band(plan, plan.heads, 0.0, query).load(weight)
        # Without a bias there is still the mask; without a window too, it is all in the chunk's own block of keys.
        self.only_causal = bias is None and plan.reach == plan.t
        self.reverse = torch.arange(plan.rows - 1, -1, -1, device=query.device)

    def reversed_rows(self, stacks: list[Tensor], piece: Piece) -> Tensor:
        """The piece's rows, `[g, c, d]`, last query first."""
        return stacks[piece.stack][piece.places, piece.rows].index_select(1, self._reversal(piece))

    def write_reversed(self, stacks: list[Tensor], piece: Piece, rows: Tensor) -> None:
        """The opposite of `reversed_rows`."""
        stacks[piece.stack][piece.places, piece.rows] = rows.index_select(1, self._reversal(piece))

    def products(self, piece: Piece, query: Tensor, out: Tensor) -> Tensor:
        """q.k scaled, in `out`, `[g, c, l]`."""
        key = self.key[piece.stack][piece.places, piece.columns]
        return torch.baddbmm(out, query, key.transpose(1, 2), beta=0, alpha=self.scale, out=out)

    def probabilities(self, piece: Piece, products: Tensor, out: Tensor) -> Tensor:
        """softmax(weight * products + bias) in `out`, which is `products` itself where there is no weight."""
        if self.weight is not None:
            self.weigh(piece, products, out)
        scores, bias = self._matched(piece, out, self.bias)
        nearest = piece.shape[1] if self.only_causal else piece.shape[2]
        scores[..., -nearest:].add_(bias[..., -nearest:])
        return torch.softmax(out, dim=-1, out=out)

    def weigh(self, piece: Piece, states: Tensor, out: Tensor) -> None:
        """weight * states, in `out`; both `[g, c, l]`."""
        states, weight = self._matched(piece, states, self.weight)
        torch.mul(states, weight, out=out.view_as(states))

    def _matched(self, piece: Piece, scores: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """A piece's `[g, c, l]` as `[samples, h, c, l]`, and the band's values for its pairs, `[h, c, l]`."""
        _, queries, keys = piece.shape
        pairs = band.pairs(piece.heads if len(band.entries) > 1 else slice(0, 1), queries, keys)
        return scores.view(-1, len(pairs), queries, keys), pairs

    def _reversal(self, piece: Piece) -> Tensor:
        return self.reverse[-piece.shape[1] :]


class _Dropout:
    """Dropout of probabilities. Its pattern is drawn again in the backward pass, piece by piece in the same order."""

    def __init__(self, probability: float, seed: int, device: torch.device):
        self.kept = 1.0 - probability
        self.generator = torch.Generator(device).manual_seed(seed)

    def factors(self, probabilities: Tensor) -> Tensor:
        """0, or 1 / (1 - p)."""
        return torch.empty_like(probabilities).bernoulli_(self.kept, generator=self.generator).div_(self.kept)


class _Scratch:
    """Memory for one piece's matrix, used again for every piece so that it stays in the cache."""

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

        with _no_autocast(query.device):
            work = _Work(plan, *(states.to(dtype) for states in (query, key, value)), (bias_table, weight_table), scale)
            dropout = _Dropout(dropout_p, seed, query.device) if dropout_p else None
            batch, heads, s, size = query.shape
            if plan.merged:
                context = query.new_empty(batch, heads, s, size, dtype=dtype)
            else:
                # In memory as the model wants it next, heads beside one another.
                context = query.new_empty(batch, s, heads, size, dtype=dtype).transpose(1, 2)
            context_stacks = plan.stacks(context)
            scratch = _Scratch(plan.largest, context)

            for piece in plan.pieces():
                matrix = scratch(*piece.shape)
                work.products(piece, work.reversed_rows(work.query, piece), out=matrix)
                work.probabilities(piece, matrix, out=matrix)
                if dropout is not None:
                    matrix.mul_(dropout.factors(matrix))
                rows = torch.bmm(matrix, work.value[piece.stack][piece.places, piece.columns])
                work.write_reversed(context_stacks, piece, rows)
        return context.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, context_gradient):
        query, key, value, bias_table, weight_table = ctx.saved_tensors
        plan, dtype = ctx.plan, ctx.dtype
        bias_wanted, weight_wanted = ctx.needs_input_grad[3:5]

        with _no_autocast(query.device):
            work = _Work(
                plan, *(states.to(dtype) for states in (query, key, value)), (bias_table, weight_table), ctx.scale
            )
            dropout = _Dropout(ctx.dropout_p, ctx.seed, query.device) if ctx.dropout_p else None
            gradients = [torch.empty(states.shape, dtype=dtype, device=query.device) for states in (query, key, value)]
            if plan.most_keys < plan.t:
                for gradient in gradients[1:]:
                    gradient.zero_()
            query_gradient, key_gradient, value_gradient = (plan.stacks(gradient) for gradient in gradients)
            context_gradient = plan.stacks(context_gradient.to(dtype))
            bias_gradient = Band(plan, plan.heads, 0.0, gradients[0]) if bias_wanted else None
            weight_gradient = Band(plan, plan.heads, 0.0, gradients[0]) if weight_wanted else None
            first, second, third = (_Scratch(plan.largest, gradients[0]) for _ in range(3))
            states = _Scratch(plan.group * plan.most_keys * query.shape[3], gradients[0])

            for piece in plan.pieces():
                rows = work.reversed_rows(work.query, piece)
                rows_gradient = work.reversed_rows(context_gradient, piece)
                keys, values = (stacks[piece.stack][piece.places, piece.columns] for stacks in (work.key, work.value))
                products = work.products(piece, rows, out=first(*piece.shape))
                weighed = products if work.weight is None else third(*piece.shape)
                probabilities = work.probabilities(piece, products, out=weighed)

                gradient = torch.bmm(rows_gradient, values.transpose(1, 2), out=second(*piece.shape))
                dropped = probabilities
                if dropout is not None:
                    factors = dropout.factors(probabilities)
                    gradient.mul_(factors)
                    dropped = factors.mul_(probabilities)
                _add_product(value_gradient, piece, dropped, rows_gradient, 1.0, plan, states)

                # Through the softmax, in place.
                torch.ops.aten._softmax_backward_data.out(gradient, probabilities, -1, dtype, grad_input=gradient)
                if bias_gradient is not None:
                    bias_gradient.add_gradient(piece.heads, gradient)
                if weight_gradient is not None:
                    weight_gradient.add_gradient(piece.heads, products.mul_(gradient))
                if work.weight is not None:
                    work.weigh(piece, gradient, out=gradient)

                turned = states(*rows.shape)
                torch.baddbmm(turned, gradient, keys, beta=0, alpha=ctx.scale, out=turned)
                work.write_reversed(query_gradient, piece, turned)
                _add_product(key_gradient, piece, gradient, rows, ctx.scale, plan, states)

        tables = (
            None if band is None else band.table(table.shape[1]).to(table.dtype)
            for band, table in ((bias_gradient, bias_table), (weight_gradient, weight_table))
        )
        return *(gradient.to(query.dtype) for gradient in gradients), *tables, None, None, None


def _add_product(
    stacks: list[Tensor], piece: Piece, left: Tensor, right: Tensor, scale: float, plan: Plan, scratch: _Scratch
) -> None:
    """Add scale * left^T right, of `[g, c, l]` and `[g, c, d]`, to the piece's keys' rows of a gradient."""
    target = stacks[piece.stack][piece.places, piece.columns]
    if piece.first and plan.most_keys == plan.t:
        torch.baddbmm(target, left.transpose(1, 2), right, beta=0, alpha=scale, out=target)
    else:
        target.add_(torch.bmm(left.transpose(1, 2), right, out=scratch(*target.shape)), alpha=scale)


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Autocast would take the matrix products back to half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
