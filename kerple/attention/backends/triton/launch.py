"""Attention in Triton: scores, bias, weight and probabilities are never in memory, and memory is O(length).

An online softmax as in FlashAttention (arXiv 2205.14135, 2307.08691), with bias and weight looked up by distance:

- **Tables, not formulas.** Each pair of a tile loads its own entry of the table `[h, length]`: the 32 lanes of a warp
  read a few neighbouring words, one request of the first-level cache, which stands idle beside the tensor cores; and
  half of the pairs share a load with another at their distance. A closed form costs more: a logarithm per pair is
  another pass of the special-function unit, which the softmax fills already. Toeplitz bands in memory would turn into
  32 KiB of second-level traffic per tile, beside 16 KiB for its keys and values.
- **The table is the mask.** Beyond the distances that are seen it holds -inf, so no tile computes a mask.
- **Gradients without atomics, for a few numbers per head.** Where a table depends on one to four of these, as KERPLE's
  kernels do, their gradients are sums over pairs of the score's gradient times the table's derivative, which is a
  table too (`TableJacobian`). The query's kernel adds them up on its way: no more matrix products than without.
- **And for any table.** A sum along diagonals is awkward within a tile, but all tiles at one block distance have the
  same distances at the same places. A kernel of its own owns block distances, recomputes scores and their gradient (two
  matrix products more than the seven of the backward pass), and adds whole tiles up in registers; only its result is
  summed along diagonals. T5's buckets need it for the distances before the last bucket alone.
- **The same bits in every run.** Every sum has one owner and one order; tile sizes follow from dtype and head size
  alone, never from timing.

The gradient through the softmax takes each row's sum from the rounded result, as FlashAttention does, so in half
precision tables' gradients are as exact as that rounding allows, summed in float32.

Legend: b batch, s query length, t key length, h heads, d head size; k block distances, p parts of a block distance, or
directions of a table; q tiles of queries.
"""

import contextlib
import math
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kerple.attention.call import AttentionCall, Backend, without_autocast

LARGEST_HEAD = 128
LOG2_E = 1.0 / math.log(2.0)
# Programs that keep a GPU busy while they add up tiles: a few for each of its multiprocessors.
ENOUGH_PROGRAMS = 1056
# Bytes of tiles that wait for their sum along diagonals; beyond it heads take turns.
TILES_BYTES = 128 * 1024 * 1024
# CUDA's limit of a grid's second and third dimension.
MOST_PROGRAMS = 65_535
# What `query_kernel` adds up, of bias and weight together.
MOST_DIRECTIONS = 4
# Rows of queries are filled up to a multiple of it, which every tile divides.
ROWS = 128


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, and the warps and pipeline stages of a program."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of the kernels; the last one's are square."""

    forward: Tile
    key_value: Tile
    query: Tile
    tables: Tile


def tiles_for(dtype: torch.dtype, size: int, *, weight: bool) -> Tiles:
    """Tile sizes for states of a dtype and head size: they depend on nothing else, so that sums keep their order."""
    if dtype == torch.float32:
        square = Tile(32, 32, 4 if size <= 64 else 8, 1)
        return Tiles(Tile(64, 32, 8, 1) if size <= 64 else square, square, square, square)
    if size <= 64:
        warps = 8 if weight else 4
        return Tiles(Tile(128, 64, warps, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2))
    return Tiles(Tile(128, 64, 8, 2), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2))


def unavailable_reason(device: torch.device) -> str | None:
    """Why the kernels cannot run on this machine's device; None if they can."""
    kernels = _kernels()
    if kernels is None:
        return "needs Triton, which is not installed"
    if torch.version.hip:
        return "runs on NVIDIA GPUs only"
    if device.type != "cuda" and not kernels.INTERPRETED:
        return f"runs on a GPU, not on {device.type} (TRITON_INTERPRET=1 runs it there, slowly, for tests)"
    return None


def _kernels() -> ModuleType | None:
    try:
        from kerple.attention.backends.triton import entry
    except ImportError:
        return None
    return entry


def fused_attention(call: AttentionCall) -> Tensor:
    """As `attend`."""
    query, key, value, window, scale = call.query, call.key, call.value, call.span.window, call.scale
    bias_table, bias_jacobian = call.bias_table, call.bias_jacobian
    weight_table, weight_jacobian = call.weight_table, call.weight_jacobian
    if window is not None and window >= key.shape[2]:
        window = None
    bias = _table_inputs(bias_table, bias_jacobian)
    weight = _table_inputs(weight_table, weight_jacobian)
    if sum(0 if each.directions is None else each.directions.shape[1] for each in (bias, weight)) > MOST_DIRECTIONS:
        bias, weight = _table_inputs(bias_table, None), _table_inputs(weight_table, None)
    return _Fused.apply(
        query,
        key,
        value,
        bias.table,
        weight.table,
        bias.coefficients,
        weight.coefficients,
        (bias.directions, weight.directions),
        (bias.dense, weight.dense),
        window,
        scale,
    )


class _TableInputs(NamedTuple):
    """What autograd is given of a table `[h, length]`: its own gradient is found along diagonals, for distances below
    `dense` (None: all), and that of the coefficients `[h, p]` by the directions `[h, p, length]`.
    """

    table: Tensor | None
    coefficients: Tensor | None = None
    directions: Tensor | None = None
    dense: int | None = None


def _table_inputs(table: Tensor | None, jacobian) -> _TableInputs:
    if jacobian is None or table is None or not torch.is_grad_enabled():
        return _TableInputs(table)
    coefficients, directions, dense = jacobian.coefficients, jacobian.directions, jacobian.dense
    if not coefficients.requires_grad:
        return _TableInputs(table)
    if not dense:
        return _TableInputs(table.detach(), coefficients, directions, dense)
    return _TableInputs(table, coefficients, F.pad(directions[..., dense:], (dense, 0)), dense)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, bias_table, weight_table, bias_numbers, weight_numbers, *constants):
        directions, dense, window, scale = constants
        query, key, value = (_rows(states) for states in (query, key, value))
        call = _Call(query, key, value, bias_table, weight_table, window, scale)
        context, log_sum = call.forward()
        ctx.save_for_backward(query, key, value, bias_table, weight_table, *directions, context, log_sum)
        ctx.dense, ctx.window, ctx.scale = dense, window, scale
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        query, key, value, bias_table, weight_table, *directions, context, log_sum = ctx.saved_tensors
        call = _Call(query, key, value, bias_table, weight_table, ctx.window, ctx.scale)
        of_query, of_key, of_value, of_bias, of_weight, *of_numbers = ctx.needs_input_grad[:7]
        gradients = [None] * 7
        with without_autocast(query.device):
            upstream = _rows(upstream)
            pairs = call.row_pairs(context, upstream, log_sum)
            if of_query or any(of_numbers):
                wanted = [each if of else None for each, of in zip(directions, of_numbers, strict=True)]
                gradients[0], *gradients[5:] = call.query_gradient(upstream, pairs, *wanted)
            if of_key or of_value:
                gradients[1:3] = call.key_value_gradients(upstream, pairs)
            if of_bias and of_weight and ctx.dense[0] == ctx.dense[1]:
                gradients[3:5] = call.table_gradients(upstream, pairs, True, True, ctx.dense[0])
            else:
                if of_bias:
                    gradients[3], _ = call.table_gradients(upstream, pairs, True, False, ctx.dense[0])
                if of_weight:
                    _, gradients[4] = call.table_gradients(upstream, pairs, False, True, ctx.dense[1])
        return *gradients, None, None, None, None


def _rows(states: Tensor) -> Tensor:
    """The states with each row's elements side by side, as the kernels read them."""
    return states if states.stride(-1) == 1 else states.contiguous()


class _Call:
    """One call's sizes, tables and launches."""

    def __init__(self, query, key, value, bias_table, weight_table, window, scale):
        self.kernels = _kernels()
        self.query, self.key, self.value = query, key, value
        self.batch, self.heads, self.s, self.size = query.shape
        self.t = key.shape[2]
        self.max_kv_len = self.t if window is None else window
        self.scale = scale
        self.bias_table, self.weight_table = bias_table, weight_table
        # Without a table, -inf is added before the scale; by one that is not positive it would not stay -inf.
        has_table = bias_table is not None or weight_table is not None or scale <= 0.0
        heads = self.heads if has_table else 1
        bias = query.new_zeros(heads, self.max_kv_len, dtype=torch.float32) if bias_table is None else bias_table
        self.bias = self._margined(bias, LOG2_E, -math.inf)
        self.weight = query if weight_table is None else self._margined(weight_table)  # query is not read as a weight
        self.tiles = tiles_for(query.dtype, self.size, weight=weight_table is not None)
        self.shape = {
            "SIZE": self.size,
            "BLOCK_D": max(16, 1 << (self.size - 1).bit_length()),
            "MARGIN": self.kernels.MARGIN,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "HAS_WEIGHT": weight_table is not None,
        }
        self.flags = {**self.shape, "HAS_TABLE": has_table, "HAS_WINDOW": window is not None}
        self.inputs = (query, key, value, self.bias, self.weight)
        self.table_stride = self.bias.stride(0) if has_table else 0

    def _margined(self, table: Tensor, factor: float = 1.0, beyond: float = 0.0) -> Tensor:
        """`[..., >= max_kv_len]`, times a factor, between margins."""
        margin = self.kernels.MARGIN
        return F.pad(table[..., : self.max_kv_len].detach().float() * factor, (margin, margin), value=beyond)

    def _launch(self, kernel, grid: tuple[int, ...], *arguments, warps: int, stages: int, **constants) -> None:
        device = self.query.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            kernel[grid](*arguments, num_warps=warps, num_stages=stages, **constants)

    def _strides(self, *states: Tensor) -> list[int]:
        return [stride for tensor in states for stride in tensor.stride()[:3]]

    def forward(self) -> tuple[Tensor, Tensor]:
        """The context `[b, h, s, d]`, in memory `[b, s, h, d]` as a model reads it next; and log2 of the softmax's
        denominators, float32 `[b, h, s]`.
        """
        tile = self.tiles.forward
        context = self.query.new_empty(self.batch, self.s, self.heads, self.size).transpose(1, 2)
        log_sum = self.query.new_empty(self.batch, self.heads, self.s, dtype=torch.float32)
        self._launch(
            self.kernels.forward_kernel,
            (-(-self.s // tile.queries), self.batch * self.heads),
            *(*self.inputs, context, log_sum),
            *self._strides(self.query, self.key, self.value, context),
            *(self.table_stride, self.heads, self.s, self.t, self.scale * LOG2_E, self.max_kv_len),
            **self.flags,
            **_blocks(tile),
        )
        return context, log_sum

    def row_pairs(self, context: Tensor, upstream: Tensor, log_sum: Tensor) -> Tensor:
        """`[b, h, rows, 2]`; see `rows_kernel`."""
        tiles = -(-self.s // ROWS)
        pairs = self.query.new_empty(self.batch, self.heads, tiles * ROWS, 2, dtype=torch.float32)
        self._launch(
            self.kernels.rows_kernel,
            (tiles, self.batch * self.heads),
            *(context, upstream, log_sum, pairs, *self._strides(context, upstream), self.heads, self.s),
            SIZE=self.size,
            BLOCK_M=ROWS,
            BLOCK_D=self.shape["BLOCK_D"],
            warps=4,
            stages=1,
        )
        return pairs

    def query_gradient(
        self, upstream: Tensor, pairs: Tensor, of_bias: Tensor | None, of_weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The query's gradient, and those of the coefficients `[h, p]` whose directions `[h, p, length]` are given."""
        tile = self.tiles.query
        tiles = -(-self.s // tile.queries)
        counts = [0 if directions is None else directions.shape[1] for directions in (of_bias, of_weight)]
        sums = self.query.new_empty(sum(counts), self.batch, self.heads, tiles, dtype=torch.float32)
        directions = self.bias  # not read, where there are none
        if sum(counts):
            given = [each[..., : self.max_kv_len].detach() for each in (of_bias, of_weight) if each is not None]
            directions = self._margined(torch.cat(given, dim=1).transpose(0, 1)).contiguous()
        gradient = torch.empty_like(self.query)
        self._launch(
            self.kernels.query_kernel,
            (tiles, self.batch * self.heads),
            *(*self.inputs, upstream, pairs, directions, gradient, sums),
            *self._strides(self.query, self.key, self.value, upstream, gradient),
            *(self.table_stride, pairs.stride(1), directions.stride(0), self.heads, self.s, self.t),
            *(self.scale, self.scale * LOG2_E, self.max_kv_len),
            OF_BIAS=counts[0],
            OF_WEIGHT=counts[1],
            **self.flags,
            **_blocks(tile),
        )
        bias, weight = sums.sum(dim=(1, 3)).T.split(counts, dim=1)
        return (
            gradient,
            None if of_bias is None else bias.to(of_bias.dtype),
            None if of_weight is None else (weight * self.scale).to(of_weight.dtype),
        )

    def key_value_gradients(self, upstream: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        tile = self.tiles.key_value
        gradients = torch.empty_like(self.key), torch.empty_like(self.value)
        self._launch(
            self.kernels.key_value_kernel,
            (-(-self.t // tile.keys), self.batch * self.heads),
            *(*self.inputs, upstream, pairs, *gradients),
            *self._strides(self.query, self.key, self.value, upstream, *gradients),
            *(self.table_stride, pairs.stride(1), self.heads, self.s, self.t),
            *(self.scale, self.scale * LOG2_E, self.max_kv_len),
            **self.flags,
            **_blocks(tile),
        )
        return gradients

    def table_gradients(
        self, upstream: Tensor, pairs: Tensor, of_bias: bool, of_weight: bool, dense: int | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Each as its table, for distances below `dense`, zero beyond and beyond the max_kv_len."""
        tile = self.tiles.tables
        side = tile.queries
        max_kv_len = self.max_kv_len if dense is None else min(self.max_kv_len, dense)
        # Block distances with a pair in sight, and parts of each: enough programs, and no more.
        count = 1 + min((self.t - self.s + -(-self.s // side) * side - 1) // side, (max_kv_len + side - 2) // side)
        tiles = self.batch * -(-self.s // side)
        parts = max(1, min(tiles, ENOUGH_PROGRAMS // (count * self.heads)))
        together = min(self.heads, max(1, TILES_BYTES // (parts * count * side * side * 4)))
        tables = [
            table if wanted else None for table, wanted in ((self.bias_table, of_bias), (self.weight_table, of_weight))
        ]
        gradients = [None if table is None else table.new_zeros(table.shape, dtype=torch.float32) for table in tables]
        workspaces = [
            self.query.new_empty((together, parts, count, side, side) if wanted else (1,), dtype=torch.float32)
            for wanted in (of_bias, of_weight)
        ]
        for head in range(0, self.heads, together):
            heads = min(together, self.heads - head)
            self._launch(
                self.kernels.sum_tiles_kernel,
                (count, parts, heads),
                *(*self.inputs, upstream, pairs, *workspaces),
                *self._strides(self.query, self.key, self.value, upstream),
                *(self.table_stride, pairs.stride(1), head, self.batch, self.heads, self.s, self.t),
                *(self.scale, self.scale * LOG2_E),
                **self.shape,
                OF_BIAS=of_bias,
                OF_WEIGHT=of_weight,
                BLOCK=side,
                warps=tile.warps,
                stages=tile.stages,
            )
            for gradient, workspace in zip(gradients, workspaces, strict=True):
                if gradient is None:
                    continue
                columns = min(32, side)
                self._launch(
                    self.kernels.sum_diagonals_kernel,
                    (count, side // columns, heads),
                    *(workspace, gradient[head:], gradient.stride(0), parts, max_kv_len),
                    BLOCK=side,
                    COLUMNS=columns,
                    warps=4,
                    stages=1,
                )
        bias, weight = (
            None if table is None else gradient.to(table.dtype)
            for gradient, table in zip(gradients, tables, strict=True)
        )
        return bias, weight


def _blocks(tile: Tile) -> dict[str, int]:
    return {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys, "warps": tile.warps, "stages": tile.stages}


FUSED = Backend(
    "fused",
    fused_attention,
    dropout=False,
    jacobians=True,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    max_head_size=LARGEST_HEAD,
    max_batch_heads=MOST_PROGRAMS,
    unavailable_reason=unavailable_reason,
)
