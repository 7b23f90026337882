"""How the chunked backend cuts one call, and its views of tables over distance.

Legend: b batch, s query length, t key length, h heads, d head size; in a piece: g heads (of one sample, or of several
whole samples), c queries, l keys.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Queries per chunk: more of them waste more of the causal half, fewer make thin matrix products.
FEWEST_ROWS, MOST_ROWS = 64, 128
# Bytes of scores at a time. On a CPU about a second-level cache for each thread; elsewhere enough to fill the device.
CPU_BYTES_PER_THREAD = 2 * 1024 * 1024
DEVICE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Chunk:
    """`rows` queries from `first` on; `keys` keys, at least as many, from `begin` on, the last one the last query's."""

    first: int
    rows: int
    begin: int
    keys: int


@dataclass(frozen=True)
class Plan:
    """A call is cut into groups of heads, and for each group into chunks of queries.

    Attributes:
        batch, heads, s, t: the call's sizes.
        max_kv_len: the most keys that a query sees.
        rows: queries in a chunk; the sequence's first queries may make a smaller one.
        merged: a group takes all heads of several samples, or else some heads of one sample.
        group: heads in a group; the last one may be smaller.
    """

    batch: int
    heads: int
    s: int
    t: int
    max_kv_len: int
    rows: int
    merged: bool
    group: int

    @classmethod
    def make(cls, query: Tensor, key: Tensor, window: int | None, dtype: torch.dtype) -> "Plan":
        """The plan for `[b, h, s, d]` queries and `[b, h, t, d]` keys whose scores are computed in `dtype`."""
        batch, heads, s, _ = query.shape
        t = key.shape[2]
        max_kv_len = t if window is None else min(t, window)
        rows = min(s, max(FEWEST_ROWS, min(s // 2, MOST_ROWS)))
        budget = CPU_BYTES_PER_THREAD * torch.get_num_threads() if query.device.type == "cpu" else DEVICE_BYTES
        head_bytes = rows * min(t, max_kv_len + rows - 1) * dtype.itemsize
        # Copying keys and values together costs less than many small operations, each of which waits for all threads.
        merged = batch > 1 and 2 * heads * head_bytes <= budget
        if merged:
            group = heads * min(batch, budget // (heads * head_bytes))
        else:
            group = max(
                size for size in range(1, heads + 1) if heads % size == 0 and (size * head_bytes <= budget or size == 1)
            )
        return cls(batch, heads, s, t, max_kv_len, rows, merged, group)

    def split(self, states: Tensor) -> list[Tensor]:
        """`[b, h, n, d]` -> a `[g, n, d]` for each group, in order; views, unless merged states are too scattered."""
        if self.merged:
            return list(states.flatten(0, 1).split(self.group))
        return [part for sample in states.unbind(0) for part in sample.split(self.group)]

    def new_states(self, like: Tensor, length: int, size: int) -> Tensor:
        """Uninitialised `[b, h, length, size]`, which `split` views."""
        return like.new_empty(self.batch, self.heads, length, size)

    def new_context(self, like: Tensor, size: int) -> Tensor:
        """Uninitialised `[b, h, s, size]` for the result: in memory `[b, s, h, size]`, as a model reads it next."""
        if self.merged:
            return self.new_states(like, self.s, size)
        return like.new_empty(self.batch, self.s, self.heads, size).transpose(1, 2)

    def first_heads(self) -> list[int]:
        """The first head of each group, in order."""
        if self.merged:
            return [0] * -(-self.batch * self.heads // self.group)
        return list(range(0, self.heads, self.group)) * self.batch

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """From the sequence's end to its beginning."""
        chunks = []
        for last in range(self.s, 0, -self.rows):
            first = max(0, last - self.rows)
            end = self.t - self.s + last
            begin = max(0, end - (last - first) - self.max_kv_len + 1)
            chunks.append(Chunk(first, last - first, begin, end - begin))
        return tuple(chunks)

    @property
    def most_keys(self) -> int:
        """Keys of the widest chunk, which is the first one."""
        return self.chunks[0].keys


class Band:
    """A table over distance, from the farthest to the nearest, with a margin on either side for pairs out of max_kv_len.

    With the queries of a chunk in reverse order, row r and column j of its scores lie at distance l-1 - (r+j). So the
    table's values for all pairs of a chunk are a view of the band in which both strides are 1, and no `[h, s, t]`
    tensor is ever made.
    """

    def __init__(self, plan: Plan, heads: int, fill: float, like: Tensor):
        """`heads` is the plan's, or 1 for a band that serves all heads; `fill` is for pairs out of max_kv_len."""
        self.max_kv_len = plan.max_kv_len
        self.margin = plan.rows - 1
        self.width = self.max_kv_len + 2 * self.margin
        # Heads that share a group's first dimension: all of them when merged.
        self.span = 1 if heads == 1 else min(plan.group, heads)
        self.entries = like.new_full((heads, self.width), fill)

    def load(self, table: Tensor | None) -> "Band":
        """Fill in a table `[h, >= max_kv_len]`; zeros for None."""
        if table is None:
            self._table.zero_()
        else:
            self._table.copy_(table[:, : self.max_kv_len].flip(1))
        return self

    def pairs(self, first_head: int, rows: int, keys: int) -> Tensor:
        """The values for a piece's pairs, queries in reverse order: a view `[h, c, l]`, to be read only."""
        head = first_head if len(self.entries) > 1 else 0
        return self.entries.as_strided(
            (self.span, rows, keys), (self.width, 1, 1), head * self.width + self._offset(keys)
        )

    def matched(self, first_head: int, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of a piece, `[g, c, l]`, as `[samples, h, c, l]`; and the values for its pairs, `[h, c, l]`."""
        _, rows, keys = scores.shape
        return scores.view(-1, self.span, rows, keys), self.pairs(first_head, rows, keys)

    def add_gradient(self, first_head: int, gradient: Tensor) -> None:
        """Sum the gradient of a piece's pairs over equal distances: contiguous `[g, c, l]`, zero where a key is unseen.

        Pairs at one distance have the same r+j, and fall into one column of a view whose rows are one element shorter
        than the matrix's. A row of that view reads, before its own first element, the end of the row before: pairs of
        the future, which are zero, except in the view's first column, to which (0, 0) alone belongs.
        """
        _, rows, keys = gradient.shape
        sums = gradient.as_strided(gradient.shape, (rows * keys, keys - 1, 1), gradient.storage_offset()).sum(dim=1)
        sums[:, 0] = gradient[:, 0, 0]
        offset = self._offset(keys)
        part = self.entries[first_head : first_head + self.span, offset : offset + keys]
        part += sums.view(-1, self.span, keys).sum(dim=0)

    def table(self, length: int) -> Tensor:
        """The band as a table again, `[h, length]`, zero beyond the max_kv_len."""
        table = self.entries.new_zeros(len(self.entries), length)
        table[:, : self.max_kv_len] = self._table.flip(1)
        return table

    @property
    def _table(self) -> Tensor:
        return self.entries[:, self.margin : self.margin + self.max_kv_len]

    def _offset(self, keys: int) -> int:
        """Where the pair (0, 0) of a piece with so many keys is; its distance is keys-1."""
        return self.margin + self.max_kv_len - keys
