"""Attention in Triton: scores, bias, weight and probabilities are never in memory, and memory is O(length).

An online softmax as in FlashAttention (arXiv 2205.14135, 2307.08691), with bias and weight looked up by distance:

- **Tables, not formulas.** A tile of 128 queries and 64 keys has 8,192 pairs and 191 distances. Each pair loads its
  own from the table `[h, length]`: the 32 lanes of a warp then read a few neighbouring words, one request of the
  first-level cache, which stands idle beside the tensor cores. On Hopper that is 256 requests for a tile with 512
  cycles of matrix products (head size 64) and 512 of exponentials. A closed form costs more: a logarithm per pair is
  another 512 cycles of the special-function unit, the one that is full already. Toeplitz bands in memory would turn
  into 32 KiB of second-level traffic per tile, beside 16 KiB for its keys and values.
- **Gradients of tables without atomics.** A sum along diagonals is awkward within a tile, but all tiles at one block
  distance have the same distances at the same places. A third kernel owns block distances, recomputes scores and their
  gradient (two matrix products more than the seven of the backward pass), and adds whole tiles up in registers; only
  its result is summed along diagonals. It runs only where a table needs its gradient (not for ALiBi). A sum over
  diagonals in the kernels for query or key would save the two products, and pay for every tile with a way through
  shared memory about as long as the tile's own work, and with a table of partial sums per program.
- **The same bits in every run.** Every sum has one owner and one order; tile sizes follow from dtype and head size
  alone, never from timing.

The gradient through the softmax takes each row's sum from the rounded result, as FlashAttention does, so in half
precision tables' gradients are as exact as that rounding allows, summed in float32.

Legend: b batch, s query length, t key length, h heads, d head size; k block distances, p parts.
"""

import contextlib
import math
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.model.attention.precision import no_autocast

LARGEST_HEAD = 128
LOG2_E = 1.0 / math.log(2.0)
# Programs that keep a GPU busy while they add up tiles: a few for each of its multiprocessors.
ENOUGH_PROGRAMS = 1056
# Bytes of tiles that wait for their sum along diagonals; beyond it heads take turns.
TILES_BYTES = 128 * 1024 * 1024
# CUDA's limit of a grid's second and third dimension.
MOST_PROGRAMS = 65_535


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
        return Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
    if size <= 64:
        warps = 8 if weight else 4
        return Tiles(Tile(128, 64, warps, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2))
    return Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2))


def refusal(device: torch.device, dtype: torch.dtype, size: int, dropout_p: float) -> str | None:
    """Why this backend cannot serve a call; None where it can."""
    if dropout_p:
        return "has no attention dropout"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"takes float32, bfloat16 and float16, not {dtype}"
    if size > LARGEST_HEAD:
        return f"takes head sizes up to {LARGEST_HEAD}, not {size}"
    if _kernels() is None:
        return "needs Triton, which is not installed"
    if torch.version.hip:
        return "runs on NVIDIA's GPUs alone"
    if device.type != "cuda" and not _kernels().INTERPRETED:
        return f"runs on a GPU, not on {device.type} (TRITON_INTERPRET=1 runs it there, slowly, for tests)"
    return None


def _kernels() -> ModuleType | None:
    try:
        from megatron.model.attention.kernels import entry
    except ImportError:
        return None
    return entry


def fused_attention(
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
    """As `attend`. Raises NotImplementedError for what it cannot serve (see `refusal`)."""
    reason = refusal(query.device, query.dtype, query.shape[3], dropout_p)
    if reason is not None:
        raise NotImplementedError(f"attention-backend 'fused' {reason}; use auto or chunked")
    if query.shape[0] * query.shape[1] > MOST_PROGRAMS:
        raise NotImplementedError(
            f"attention-backend 'fused' takes up to {MOST_PROGRAMS} heads of samples at a time, not "
            f"{query.shape[0]} x {query.shape[1]}; use auto or chunked"
        )
    if window is not None and window >= key.shape[2]:
        window = None
    return _Fused.apply(query, key, value, bias_table, weight_table, window, scale)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, bias_table, weight_table, window, scale):
        query, key, value = (_rows(states) for states in (query, key, value))
        call = _Call(query, key, value, bias_table, weight_table, window, scale)
        context, log_sum = call.forward()
        ctx.save_for_backward(query, key, value, bias_table, weight_table, context, log_sum)
        ctx.window, ctx.scale = window, scale
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        query, key, value, bias_table, weight_table, context, log_sum = ctx.saved_tensors
        call = _Call(query, key, value, bias_table, weight_table, ctx.window, ctx.scale)
        wanted = ctx.needs_input_grad
        with no_autocast(query.device):
            upstream = _rows(upstream)
            row_products = call.row_products(context, upstream)
            gradients = [None] * 5
            if wanted[0]:
                gradients[0] = call.query_gradient(upstream, log_sum, row_products)
            if wanted[1] or wanted[2]:
                gradients[1:3] = call.key_value_gradients(upstream, log_sum, row_products)
            if wanted[3] or wanted[4]:
                gradients[3:5] = call.table_gradients(upstream, log_sum, row_products, wanted[3], wanted[4])
        return *gradients, None, None


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
        self.reach = self.t if window is None else window
        self.scale = scale
        self.bias_table, self.weight_table = bias_table, weight_table
        self.bias = self._margined(bias_table, LOG2_E)
        self.weight = self._margined(weight_table, 1.0)
        self.tiles = tiles_for(query.dtype, self.size, weight=weight_table is not None)
        self.flags = {
            "SIZE": self.size,
            "BLOCK_D": max(16, 1 << (self.size - 1).bit_length()),
            "HAS_BIAS": bias_table is not None,
            "HAS_WEIGHT": weight_table is not None,
            "HAS_WINDOW": window is not None,
            "MARGIN": self.kernels.MARGIN,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        }

    def _margined(self, table: Tensor | None, factor: float) -> Tensor | None:
        if table is None:
            return None
        margin = self.kernels.MARGIN
        return F.pad(table[:, : self.reach].detach().float() * factor, (margin, margin))

    def _inputs(self) -> tuple[Tensor, ...]:
        """query, key, value, bias, weight; where there is no table, something that is not read stands for it."""
        none = self.query
        bias, weight = (none if table is None else table for table in (self.bias, self.weight))
        return self.query, self.key, self.value, bias, weight

    @property
    def _table_stride(self) -> int:
        return self.reach + 2 * self.kernels.MARGIN

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
            *self._inputs(),
            context,
            log_sum,
            *self._strides(self.query, self.key, self.value, context),
            *(self._table_stride, self.heads, self.s, self.t, self.scale * LOG2_E, self.reach),
            **self.flags,
            **_blocks(tile),
        )
        return context, log_sum

    def row_products(self, context: Tensor, upstream: Tensor) -> Tensor:
        products = self.query.new_empty(self.batch, self.heads, self.s, dtype=torch.float32)
        rows = 64
        self._launch(
            self.kernels.row_products_kernel,
            (-(-self.s // rows), self.batch * self.heads),
            *(context, upstream, products, *self._strides(context, upstream), self.heads, self.s),
            SIZE=self.size,
            BLOCK_M=rows,
            BLOCK_D=self.flags["BLOCK_D"],
            warps=4,
            stages=1,
        )
        return products

    def query_gradient(self, upstream: Tensor, log_sum: Tensor, row_products: Tensor) -> Tensor:
        tile = self.tiles.query
        gradient = torch.empty_like(self.query)
        self._launch(
            self.kernels.query_kernel,
            (-(-self.s // tile.queries), self.batch * self.heads),
            *self._inputs(),
            *(upstream, log_sum, row_products, gradient),
            *self._strides(self.query, self.key, self.value, upstream, gradient),
            *(self._table_stride, self.heads, self.s, self.t, self.scale, self.scale * LOG2_E, self.reach),
            **self.flags,
            **_blocks(tile),
        )
        return gradient

    def key_value_gradients(self, upstream: Tensor, log_sum: Tensor, row_products: Tensor) -> tuple[Tensor, Tensor]:
        tile = self.tiles.key_value
        gradients = torch.empty_like(self.key), torch.empty_like(self.value)
        self._launch(
            self.kernels.key_value_kernel,
            (-(-self.t // tile.keys), self.batch * self.heads),
            *self._inputs(),
            *(upstream, log_sum, row_products, *gradients),
            *self._strides(self.query, self.key, self.value, upstream, *gradients),
            *(self._table_stride, self.heads, self.s, self.t, self.scale, self.scale * LOG2_E, self.reach),
            **self.flags,
            **_blocks(tile),
        )
        return gradients

    def table_gradients(
        self, upstream: Tensor, log_sum: Tensor, row_products: Tensor, of_bias: bool, of_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Each as its table, zero beyond the reach."""
        tile = self.tiles.tables
        side = tile.queries
        # Block distances with a pair in sight, and parts of each: enough programs, and no more.
        count = 1 + min((self.t - self.s + -(-self.s // side) * side - 1) // side, (self.reach + side - 2) // side)
        pairs = self.batch * -(-self.s // side)
        parts = max(1, min(pairs, ENOUGH_PROGRAMS // (count * self.heads)))
        together = min(self.heads, max(1, TILES_BYTES // (parts * count * side * side * 4)))
        tables = [
            table if wanted else None for table, wanted in ((self.bias_table, of_bias), (self.weight_table, of_weight))
        ]
        gradients = [None if table is None else table.new_zeros(table.shape, dtype=torch.float32) for table in tables]
        workspaces = [
            self.query.new_empty((together, parts, count, side, side) if exists else (1,), dtype=torch.float32)
            for exists in (self.bias is not None, self.weight is not None)
        ]
        flags = {**self.flags, "BLOCK": side}
        for head in range(0, self.heads, together):
            heads = min(together, self.heads - head)
            self._launch(
                self.kernels.sum_tiles_kernel,
                (count, parts, heads),
                *self._inputs(),
                *(upstream, log_sum, row_products, *workspaces),
                *self._strides(self.query, self.key, self.value, upstream),
                *(self._table_stride, head, self.batch, self.heads, self.s, self.t),
                *(self.scale, self.scale * LOG2_E, self.reach),
                **flags,
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
                    *(workspace, gradient[head:], gradient.stride(0), parts, self.reach),
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
