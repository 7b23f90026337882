"""How the chunked backend cuts one call, and its views of tables over distance.

Legend: b batch, s query length, t key length, h heads, d head size; in a chunk: g heads (of one sample, or of several
samples), c queries, l keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Queries per chunk: more of them waste more of the causal half, fewer make thin matrix products.
CHUNK_ROWS = 128
# Bytes of scores at a time. On a CPU, a part of each thread's second-level cache; elsewhere, enough to fill the device.
CPU_BYTES_PER_THREAD = 512 * 1024
DEVICE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Piece:
    """What is computed at a time: some heads of a stack, a chunk of queries, and the keys that the chunk may see.

    Attributes:
        stack: index of the stack.
        places: the heads' places in the stack's first dimension.
        heads: their places in a table.
        rows: the queries.
        columns: the keys; the last one is the last query's own.
        first: no piece before it has the same keys and heads.
    """

    stack: int
    places: slice
    heads: slice
    rows: slice
    columns: slice
    first: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the scores: `g, c, l`."""
        return tuple(part.stop - part.start for part in (self.places, self.rows, self.columns))


@dataclass(frozen=True)
class Plan:
    """A call is cut into stacks (one sample each, or all samples when they are small), groups of heads, chunks of
    queries.

    Attributes:
        reach: the most keys that a query sees.
        rows: queries in a chunk; the first queries of the sequence may make a smaller one.
        merged: one stack holds all samples, `[b h, n, d]`.
        group: heads at a time; when merged, those of whole samples.
    """

    batch: int
    heads: int
    s: int
    t: int
    reach: int
    rows: int
    merged: bool
    group: int

    @classmethod
    def make(cls, query: Tensor, key: Tensor, window: int | None, dtype: torch.dtype) -> "Plan":
        batch, heads, s, _ = query.shape
        t = key.shape[2]
        reach = t if window is None else min(t, window)
        rows = min(CHUNK_ROWS, s)
        budget = CPU_BYTES_PER_THREAD * torch.get_num_threads() if query.device.type == "cpu" else DEVICE_BYTES
        fitting = max(1, budget // (rows * min(t, reach + rows - 1) * dtype.itemsize))
        merged = batch > 1 and fitting >= 2 * heads
        if merged:
            group = heads * min(batch, fitting // heads)
        else:
            group = max(size for size in range(1, heads + 1) if heads % size == 0 and size <= fitting)
        return cls(batch, heads, s, t, reach, rows, merged, group)

    @property
    def most_keys(self) -> int:
        """Keys of the widest chunk."""
        return min(self.t, self.reach + self.rows - 1)

    @property
    def largest(self) -> int:
        """Elements of the largest piece's scores."""
        return self.group * self.rows * self.most_keys

    def stacks(self, states: Tensor) -> list[Tensor]:
        """`[b, h, n, d]` -> one `[b h, n, d]`, or a view `[h, n, d]` per sample, contiguous or not."""
        return [states.flatten(0, 1)] if self.merged else list(states.unbind(0))

    def pieces(self) -> Iterator[Piece]:
        """All pieces. Those with the same stack and heads follow one another, from the sequence's end to its
        beginning."""
        places = self.batch * self.heads if self.merged else self.heads
        for stack in range(1 if self.merged else self.batch):
            for start in range(0, places, self.group):
                group = slice(start, min(start + self.group, places))
                heads = slice(0, self.heads) if self.merged else group
                for last in range(self.s, 0, -self.rows):
                    first = max(0, last - self.rows)
                    end = self.t - self.s + last
                    begin = max(0, end - (last - first) - self.reach + 1)
                    yield Piece(stack, group, heads, slice(first, last), slice(begin, end), last == self.s)


class Band:
    """A table over distance, from the farthest to the nearest, with room for pairs that are out of reach on either
    side.

    With the queries of a chunk in reverse order, row r and column j of its scores lie at distance l-1 - (r+j). So the
    table's values for all pairs of a chunk are a view of the band in which both strides are 1, and no `[h, s, t]`
    tensor is ever made.
    """

    def __init__(self, plan: Plan, heads: int, fill: float, like: Tensor):
        self.margin = plan.rows - 1
        self.reach = plan.reach
        self.entries = like.new_full((heads, self.reach + 2 * self.margin), fill)

    @property
    def _table(self) -> Tensor:
        return self.entries[:, self.margin : self.margin + self.reach]

    def load(self, table: Tensor | None) -> "Band":
        """Fill in a table `[h, >= reach]`; zeros for None."""
        if table is None:
            self._table.zero_()
        else:
            self._table.copy_(table[:, : self.reach].flip(1))
        return self

    def pairs(self, heads: slice, queries: int, keys: int) -> Tensor:
        """The values for a chunk's pairs, queries in reverse order: a view `[h, c, l]`, to be read only."""
        part = self.entries[heads, self._offset(keys) :]
        return part.as_strided((len(part), queries, keys), (part.stride(0), 1, 1))

    def add_gradient(self, heads: slice, gradient: Tensor) -> None:
        """Sum the gradient of a chunk's pairs over equal distances: contiguous `[g, c, l]`, zero where a key is unseen.

        Pairs at one distance have the same r+j, and fall into one column of a view whose rows are one element shorter
        than the matrix's. A row of that view reads, before its own first element, the end of the row before: pairs of
        the future, which are zero, except in the view's first column, to which (0, 0) alone belongs.
        """
        _, queries, keys = gradient.shape
        sums = gradient.as_strided(gradient.shape, (queries * keys, keys - 1, 1)).sum(dim=1)
        sums[:, 0] = gradient[:, 0, 0]
        part = self.entries[heads]
        offset = self._offset(keys)
        part[:, offset : offset + keys] += sums.view(-1, len(part), keys).sum(dim=0)

    def table(self, length: int) -> Tensor:
        """The band as a table again, `[h, length]`, zero beyond the reach."""
        table = self.entries.new_zeros(len(self.entries), length)
        table[:, : self.reach] = self._table.flip(1)
        return table

    def _offset(self, keys: int) -> int:
        """Where the pair (0, 0) of a chunk with so many keys is; its distance is keys-1."""
        return self.margin + self.reach - keys
