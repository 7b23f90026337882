"""The fused backend: attention in Triton kernels. Scores and probabilities are never stored, so
memory is O(length).

The algorithm is FlashAttention's online softmax (arXiv 2205.14135, 2307.08691), with bias and
weight over distance:

- **Tables instead of formulas.** Each pair in a tile loads its entry of the table `[h, length]`.
  The 32 lanes of a warp read a few neighboring words, which is one request to the first-level
  cache, otherwise idle during matrix products; half of the pairs share a load with another pair at
  the same distance. Computing a closed form is slower: a logarithm per pair is another pass of the
  special function unit, which the softmax already keeps busy. A Toeplitz matrix in memory would
  need 32 KiB of second-level cache traffic per tile, in addition to 16 KiB for its keys and values.
- **The table is the mask.** It contains -inf for distances that are not visible, so no tile
  computes a mask.
- **Gradients of a few coefficients per head, without atomics.** If a table depends on one to four
  coefficients, as KERPLE's kernels do, their gradients are sums over pairs of the scores' gradient
  times the table's derivative, which is a table as well (`TableJacobian`). The kernel for the
  query's gradient computes these sums without additional matrix products.
- **Gradients of any table.** A sum along diagonals is awkward within a tile, but all tiles at the
  same block distance have the same distances in the same places. In a separate kernel, each program
  handles one block distance, recomputes scores and their gradient (two matrix products in addition
  to the seven of the backward pass), and adds complete tiles in registers. Only the result is
  summed along diagonals. T5's buckets need it only for distances before the last bucket.
- **Decays as vectors.** The bias of forgetting attention is a difference of prefix sums of the
  query and the key, so each tile loads a vector of keys; the softmax cancels that of the queries.
  The gradient of a prefix sum is the sum of the scores' gradient over the keys of its query, minus
  the sum over the queries of its key. The former would be zero with exact numbers. But the rounded
  result is used for each row's sum (see below), and in the gradient of a decay, which adds up those
  of all later prefix sums, errors of all later queries would remain.
- **Deterministic.** Every sum is computed by one program in a fixed order. Tile sizes depend only
  on the GPU, the dtype, the head size and the presence of a weight, grouped queries and documents
  (`tiles.py`), never on timing.

As in FlashAttention, the gradient through the softmax uses the rounded result for each row's sum.
In half precision, this rounding limits the accuracy of the tables' gradients, which are summed in
float32.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size; k block
distances, p parts of the tiles at a block distance, or jacobian directions of a table; q tiles of
queries.
"""

import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.backend import Requirements
from kerple.attention.backends.triton.tiles import ROWS, Gpu, Tile, no_tiles_reason, tiles_for
from kerple.attention.documents import Documents, DocumentTiles

MAX_HEAD_SIZE = 128
# CUDA's limit for the second and third dimension of a grid.
MAX_GRID = 65_535
LOG2_E = 1.0 / math.log(2.0)
# Programs that keep a GPU busy while they add up tiles: a few for each of its multiprocessors.
TABLE_PROGRAMS = 1056
# The most columns of a program that sums tiles along diagonals; the side of a tile is a power of 2.
DIAGONAL_COLUMNS = 32
# Bytes of tiles to be summed along diagonals; if all heads need more, a few heads at a time are
# computed.
TILES_BYTES = 128 * 1024 * 1024


def unavailable_reason(requirements: Requirements) -> str | None:
    """Why the kernels cannot run this call on its device; None if they can."""
    kernels = _load_kernels()
    device = requirements.device
    assert device is not None
    # Software first, then hardware.
    if kernels is None:
        return "needs Triton, which is not installed"
    if torch.version.hip:
        return "supports only NVIDIA GPUs, and this PyTorch is built for AMD GPUs (ROCm)"
    if device.type != "cuda" and not kernels.INTERPRETED:
        return (
            f"runs on a GPU, not on {device.type} (TRITON_INTERPRET=1 runs it there, slowly, for "
            "tests)"
        )
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return no_tiles_reason(Gpu.of(device), requirements.dtype, requirements.head_size)


@functools.cache
def _load_kernels() -> ModuleType | None:
    """Import the kernels on first use, so that nothing else needs Triton."""
    try:
        from kerple.attention.backends.triton import kernels
    except ImportError:
        return None
    return kernels


def empty_outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    """The context `[b, h, s, d]`, in memory `[b, s, h, d]` as a model needs it; and lse, float32
    `[b, h, s]`.
    """
    batch, heads, s, head_size = query.shape
    context = query.new_empty(batch, s, heads, head_size).transpose(1, 2)
    return context, query.new_empty(batch, heads, s, dtype=torch.float32)


def add_margins(
    table: Tensor, factor: float = 1.0, fill: float = 0.0, *, max_kv_len: int
) -> Tensor:
    """`[..., >= max_kv_len]` -> float32 `[..., MARGIN + max_kv_len + MARGIN]`, times a factor."""
    from kerple.attention.backends.triton.kernels import MARGIN

    table = table[..., :max_kv_len].detach().float()
    if factor != 1.0:
        table = table * factor
    return F.pad(table, (MARGIN, MARGIN), value=fill)


def document_tiles(documents: Documents) -> DocumentTiles:
    """The tiles of documents with `ranges`, on their device. The largest positions, where most keys
    are visible, come first. They are computed once for all layers.
    """
    if documents.tiles is not None:
        return documents.tiles
    ranges = documents.ranges
    assert ranges is not None  # `AttentionCall.is_packed` has checked it

    # The tiles of each document in turn, then ordered by their position in it.
    row, first, length = ranges.unbind(1)
    count = -(-length // ROWS)  # tiles of each document
    place = (count.cumsum(0) - count) * ROWS
    document = torch.arange(len(ranges), device="cpu").repeat_interleave(count)
    position = torch.arange(len(document), device="cpu") * ROWS - place[document]
    order = position.argsort(descending=True, stable=True)
    row = row[document]
    first = first[document]
    length = length[document]
    tiles = torch.stack((row, first, length, place[document], position), dim=1)[order]

    # How many tiles are at each position or later.
    row_length = documents.ids.shape[1]
    positions = torch.arange(0, row_length, ROWS, device="cpu")
    counts = (position >= positions[:, None]).sum(1)

    # The tokens of padded documents.
    in_document = position[:, None] + torch.arange(ROWS, device="cpu")
    in_document = torch.minimum(in_document, length[:, None] - 1)
    tokens = (row * row_length + first)[:, None] + in_document
    parts = tiles.int(), counts.int(), tokens.flatten()
    on_device = [part.to(documents.ids.device, non_blocking=True) for part in parts]
    documents.tiles = DocumentTiles(*on_device)
    return documents.tiles


class Launcher:
    """Launches the kernels of a call."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        weight: Tensor | None,
        decay_sums: Tensor | None,
        documents: Sequence[Tensor],
        scale: float,
        window: int | None,
        *,
        has_table: bool,
    ):
        """bias, weight: see `KernelTables`. documents: `DocumentTiles`, for as many queries as
        keys, or empty. has_table: the scores have a bias or a weight.
        """
        from kerple.attention.backends.triton import gradient_kernels, kernels, table_kernels

        self.kernels, self.table_kernels = kernels, table_kernels
        self.gradient_kernels = gradient_kernels
        self.query, self.key, self.value = query, key, value
        self.batch, self.heads, self.s, self.head_size = query.shape
        self.kv_heads = key.shape[1]
        self.t = key.shape[2]
        self.scale = scale
        self.group = self.heads // self.kv_heads
        self.max_kv_len = self.t
        if window is not None:
            self.max_kv_len = min(self.t, window)
        has_weight = weight is not None
        self.documents: DocumentTiles | None = None
        document_table = None
        if documents:
            self.documents = DocumentTiles(*documents)
            document_table = self.documents.tiles
        self.tiles = tiles_for(
            Gpu.of(query.device),
            query.dtype,
            self.head_size,
            weight=has_weight,
            grouped=self.group > 1,
            documents=self.documents is not None,
        )

        # Without a weight or a decay, the kernels get a pointer that they do not read.
        self.bias = bias
        if weight is None:
            weight = query
        decay, bases = query, query
        self.has_decay = decay_sums is not None
        if decay_sums is not None:
            decay, bases = self._split(decay_sums)
        self.inputs = (query, key, value, bias, weight, decay, bases, document_table)

        # Between the heads of the tables and of the decay.
        table_stride = 0
        if has_table:
            table_stride = bias.stride(0)
        self.strides = (table_stride, decay.stride(1), bases.stride(1))
        self.sizes = (self.heads, self.group, self.s, self.t)
        self.block_d = max(16, 1 << (self.head_size - 1).bit_length())
        self.constants = {
            "SIZE": self.head_size,
            "BLOCK_D": self.block_d,
            "MARGIN": self.kernels.MARGIN,
            "PRECISION": self.tiles.precision,
            "HAS_WEIGHT": has_weight,
            "HAS_DECAY": self.has_decay,
            "HAS_DOCUMENTS": self.documents is not None,
        }
        self.flags = {
            "HAS_TABLE": has_table or not self.tiles.skip_mask,
            "HAS_WINDOW": self.max_kv_len < self.t,
        }

    def _split(self, decay_sums: Tensor) -> tuple[Tensor, Tensor]:
        """The kernels' `decay` and `bases`: their sums are the prefix sums in units of log2."""
        from kerple.attention.backends.triton.memory import DECAY_BLOCK

        margin = self.kernels.MARGIN
        block = DECAY_BLOCK.value
        # The kernels take both results as contiguous; those of a view, such as blocks, would have
        # its memory order.
        sums = decay_sums.detach().contiguous() * LOG2_E
        if self.documents is not None:
            sums = sums.transpose(0, 1).flatten(1)[None, :, self.documents.tokens]
        bases = sums[..., ::block].float().contiguous()
        decay = (sums - bases.repeat_interleave(block, dim=2)[..., : sums.shape[2]]).float()
        return F.pad(decay, (margin, margin)), bases

    def _grid(self, length: int, tile: int, heads: int) -> tuple[int, int]:
        """The programs for tiles of `tile` tokens, in rows of `length` or in documents."""
        if self.documents is None:
            return -(-length // tile), self.batch * heads
        return len(self.documents.tiles) * (ROWS // tile), heads

    def _new_empty(self, *shape: int) -> Tensor:
        """Space for float32 results; zero if there are documents, because padding and empty tiles
        get no result.
        """
        if self.documents is None:
            return self.query.new_empty(shape, dtype=torch.float32)
        return self.query.new_zeros(shape, dtype=torch.float32)

    def _launch(
        self, kernel: Any, grid: Sequence[int], *arguments: object, **options: object
    ) -> None:
        with torch.cuda.device_of(self.query):
            kernel[grid](*arguments, **options)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The context `[b, h, s, d]`, and lse, the log2 of the softmax's denominators, float32
        `[b, h, s]`.
        """
        tile = self.tiles.forward
        context, lse = empty_outputs(self.query)
        if self.documents is not None:
            context.zero_()
        self._launch(
            self.kernels.forward_kernel,
            self._grid(self.s, tile.queries, self.heads),
            *self.inputs,
            context,
            lse,
            *_strides(self.query, self.key, self.value, context),
            *self.strides,
            *self.sizes,
            self.scale * LOG2_E,
            self.max_kv_len,
            **self.constants,
            **self.flags,
            **_tile_options(tile),
        )
        return context, lse

    def row_stats(self, context: Tensor, grad_context: Tensor, lse: Tensor) -> Tensor:
        """lse and delta of each query, `[b, h, rows, 2]`; see `row_stats_kernel`."""
        tiles, heads = self._grid(self.s, ROWS, self.heads)
        row_stats = self.query.new_empty(
            heads // self.heads, self.heads, tiles * ROWS, 2, dtype=torch.float32
        )
        self._launch(
            self.kernels.row_stats_kernel,
            (tiles, heads),
            context,
            grad_context,
            lse,
            self.inputs[-1],
            row_stats,
            *_strides(context, grad_context),
            self.heads,
            self.s,
            SIZE=self.head_size,
            HAS_DOCUMENTS=self.documents is not None,
            BLOCK_M=ROWS,
            BLOCK_D=self.block_d,
            num_warps=4,
            num_stages=1,
        )
        return row_stats

    def query_gradient(
        self,
        grad_context: Tensor,
        row_stats: Tensor,
        directions: Tensor | None,
        bias_directions: int,
        *,
        out: Tensor,
    ) -> tuple[list[Tensor], Tensor]:
        """Write the query's gradient to `out`. Return the float32 gradients of the coefficients
        `[h, p]` of the first `bias_directions` directions and of the others, without empty ones;
        and with a decay the sums of the scores' gradient over keys, float32 `[b, h, s]`.
        """
        tile = self.tiles.query
        tiles, heads = self._grid(self.s, tile.queries, self.heads)
        # Without directions, the kernel gets a pointer that it does not read.
        count = 0
        read = self.bias
        if directions is not None:
            count = len(directions)
            read = directions
        sums = self._new_empty(count, heads // self.heads, self.heads, tiles)
        row_sums = self._sums(self.s)
        self._launch(
            self.gradient_kernels.query_kernel,
            (tiles, heads),
            *self.inputs,
            grad_context,
            row_stats,
            read,
            out,
            sums,
            row_sums,
            *_strides(self.query, self.key, self.value, grad_context, out),
            *self.strides,
            row_stats.stride(1),
            read.stride(0),
            *self.sizes,
            self.scale,
            self.scale * LOG2_E,
            self.max_kv_len,
            BIAS_DIRECTIONS=bias_directions,
            WEIGHT_DIRECTIONS=count - bias_directions,
            **self.constants,
            **self.flags,
            **_tile_options(tile),
        )
        grads = []
        if count:
            # Of strides (1, h), which the operator's fake implementation promises to torch.compile.
            grad = sums.sum(dim=(1, 3)).T
            if bias_directions:
                grads.append(grad[:, :bias_directions])
            if bias_directions < count:
                grads.append(grad[:, bias_directions:] * self.scale)
        return grads, row_sums

    def key_value_gradients(
        self, grad_context: Tensor, row_stats: Tensor, *, out: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Write the gradients of key and value to `out`. Return with a decay the sums of the
        scores' gradient over queries, float32 `[b, h, t]`.
        """
        tile = self.tiles.key_value
        column_sums = self._sums(self.t)
        self._launch(
            self.gradient_kernels.key_value_kernel,
            self._grid(self.t, tile.keys, self.kv_heads),
            *self.inputs,
            grad_context,
            row_stats,
            *out,
            column_sums,
            *_strides(self.query, self.key, self.value, grad_context, *out),
            *self.strides,
            row_stats.stride(1),
            *self.sizes,
            self.scale,
            self.scale * LOG2_E,
            self.max_kv_len,
            **self.constants,
            **self.flags,
            **_tile_options(tile),
        )
        return column_sums

    def _sums(self, length: int) -> Tensor:
        """Space for a number per head and token; without a decay, a tensor that is not written."""
        if not self.has_decay:
            return self.query
        return self._new_empty(self.batch, self.heads, length)

    def table_gradients(
        self,
        grad_context: Tensor,
        row_stats: Tensor,
        tables: Sequence[Tensor | None],
        dense: int | None,
    ) -> list[Tensor]:
        """The gradients of a bias and a weight table, of those that are not None, for distances
        below `dense`; zero beyond these and max_kv_len.
        """
        # Sums by block distance, for blocks of a side.
        tile = self.tiles.tables
        side = tile.queries
        length = self.max_kv_len
        if dense is not None:
            length = min(length, dense)

        # Block distances with a visible pair.
        farthest = self.t - self.s + -(-self.s // side) * side - 1
        count = 1 + min(farthest // side, (length + side - 2) // side)

        # Parts of each, and heads at a time: enough programs, and no more.
        sample_tiles, _ = self._grid(self.s, side, 1)
        counts = None
        if self.documents is None:
            sample_tiles *= self.batch
        else:
            counts = self.documents.counts
        parts = max(1, min(sample_tiles, TABLE_PROGRAMS // (count * self.heads)))
        group_heads = min(self.heads, max(1, TILES_BYTES // (parts * count * side * side * 4)))

        # Tiles of some heads at a time, which limits the memory.
        grads: list[Tensor | None] = [None, None]
        workspaces = [self.query.new_empty(1, dtype=torch.float32)] * 2
        for index, table in enumerate(tables):
            if table is not None:
                grads[index] = table.new_zeros(table.shape, dtype=torch.float32)
                workspaces[index] = workspaces[index].new_empty(
                    group_heads, parts, count, side, side
                )

        # Sum the pairs by tile of distances, then the diagonals of each tile.
        for first_head in range(0, self.heads, group_heads):
            heads = min(group_heads, self.heads - first_head)
            self._launch(
                self.table_kernels.sum_tiles_kernel,
                (count, parts, heads),
                *self.inputs,
                counts,
                grad_context,
                row_stats,
                *workspaces,
                *_strides(self.query, self.key, self.value, grad_context),
                *self.strides,
                row_stats.stride(1),
                first_head,
                self.batch,
                *self.sizes,
                self.scale,
                self.scale * LOG2_E,
                **self.constants,
                GRAD_BIAS=tables[0] is not None,
                GRAD_WEIGHT=tables[1] is not None,
                BLOCK=side,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
            for grad, workspace in zip(grads, workspaces, strict=True):
                if grad is None:
                    continue
                columns = min(DIAGONAL_COLUMNS, side)
                self._launch(
                    self.table_kernels.sum_diagonals_kernel,
                    (count, side // columns, heads),
                    workspace,
                    grad[first_head:],
                    grad.stride(0),
                    parts,
                    length,
                    BLOCK=side,
                    COLUMNS=columns,
                    num_warps=4,
                    num_stages=1,
                )

        # The sums are float32.
        results = []
        for grad, table in zip(grads, tables, strict=True):
            if grad is not None and table is not None:
                results.append(grad.to(table.dtype))
        return results


def _strides(*states: Tensor) -> list[int]:
    """The strides of all dimensions but the last."""
    strides: list[int] = []
    for tensor in states:
        strides += tensor.stride()[:3]
    return strides


def _tile_options(tile: Tile) -> dict[str, int]:
    return {
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
