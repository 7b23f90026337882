"""How the chunked backend divides a call into chunks, and its view of a table over distance for the
pairs of a chunk.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size; in a chunk:
n heads (of one sample, or all heads of several samples), m key/value heads, c queries, l keys.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kerple.attention.call import AttentionCall

# Queries per chunk. More queries compute more masked scores; fewer make matrix products
# inefficient.
MIN_ROWS, MAX_ROWS = 64, 128
# Bytes of scores per chunk. On a CPU they should fit in the second-level caches; a GPU needs enough
# to be busy.
CPU_BYTES_PER_THREAD = 2 * 1024 * 1024
DEVICE_BYTES = 256 * 1024 * 1024
# For methods with modify_scores: bytes of scores per chunk, and queries per chunk. On a GPU a chunk
# needs about ten times as many bytes as its scores. Larger chunks launch fewer kernels, but compute
# more masked scores.
MODIFY_CPU_BYTES = 4 * 1024 * 1024
MODIFY_DEVICE_BYTES = 512 * 1024 * 1024
MODIFY_DEVICE_SHARE = 48  # at most 1/48 of a GPU's memory
MODIFY_MIN_ROWS, MODIFY_MAX_ROWS = 16, 128  # the maximum applies to CPUs only


@dataclass(frozen=True)
class QueryChunk:
    """Queries `first_query` ... + `rows` and keys `first_key` ... + `keys`; both end at the same
    position.
    """

    first_query: int
    rows: int
    first_key: int
    keys: int


@dataclass(frozen=True)
class ChunkPlan:
    """The division of a call into groups of heads, and of each group into chunks of queries.

    Attributes:
        batch, heads, kv_heads, q_len, kv_len: the sizes of the call.
        max_kv_len: the largest number of keys that a query attends to.
        rows: queries in a chunk; the chunk at the start of the sequence may be smaller.
        merges_samples: whether a group has all heads of several samples, rather than some heads of
            one sample.
        group_size: heads in a group; the last group may be smaller. They use whole key/value heads,
            or are a part of those that share one.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    max_kv_len: int
    rows: int
    merges_samples: bool
    group_size: int

    @classmethod
    def for_call(cls, call: AttentionCall) -> "ChunkPlan":
        batch, heads, s, _ = call.query.shape
        t = call.kv_len
        max_kv_len = call.max_kv_len
        rows = min(s, max(MIN_ROWS, min(s // 2, MAX_ROWS)))
        budget = DEVICE_BYTES
        if call.query.device.type == "cpu":
            budget = CPU_BYTES_PER_THREAD * torch.get_num_threads()
        head_bytes = rows * min(t, max_kv_len + rows - 1) * call.compute_dtype.itemsize
        # Copying keys and values into one tensor costs less than many small operations that each
        # synchronize threads.
        merges_samples = batch > 1 and 2 * heads * head_bytes <= budget
        if merges_samples:
            group_size = heads * min(batch, budget // (heads * head_bytes))
        else:
            # The largest group within the budget; a single head may exceed it.
            shared = call.queries_per_kv
            group_size = 1
            for size in range(2, heads + 1):
                divides = heads % size == 0 and (size % shared == 0 or shared % size == 0)
                if divides and size * head_bytes <= budget:
                    group_size = size
        return cls(
            batch=batch,
            heads=heads,
            kv_heads=call.kv_heads,
            q_len=s,
            kv_len=t,
            max_kv_len=max_kv_len,
            rows=rows,
            merges_samples=merges_samples,
            group_size=group_size,
        )

    def split(self, states: Tensor) -> list[Tensor]:
        """`[b, h, s, d]` -> `[n, s, d]` per group; views, unless merging samples needs a copy."""
        if self.merges_samples:
            return list(states.flatten(0, 1).split(self.group_size))
        parts: list[Tensor] = []
        for sample in states.unbind(0):
            parts.extend(sample.split(self.group_size))
        return parts

    def split_kv(self, states: Tensor) -> list[Tensor]:
        """`[b, g, t, d]` -> `[m, t, d]` per group, like `split`. Groups that share a key/value head
        get equal views.
        """
        shared = self.heads // self.kv_heads
        size = max(1, self.group_size // shared)
        repeats = max(1, shared // self.group_size)
        if self.merges_samples:
            return list(states.flatten(0, 1).split(size))
        parts: list[Tensor] = []
        for sample in states.unbind(0):
            for part in sample.split(size):
                parts.extend([part] * repeats)
        return parts

    def empty_context(self, like: Tensor, head_size: int) -> Tensor:
        """Uninitialized `[b, h, s, d]` for the result; if possible `[b, s, h, d]` in memory, as a
        model needs it.
        """
        if self.merges_samples:
            return like.new_empty(self.batch, self.heads, self.q_len, head_size)
        return like.new_empty(self.batch, self.q_len, self.heads, head_size).transpose(1, 2)

    def first_heads(self) -> list[int]:
        """The first head of each group."""
        if self.merges_samples:
            return [0] * -(-self.batch * self.heads // self.group_size)
        return list(range(0, self.heads, self.group_size)) * self.batch

    @cached_property
    def chunks(self) -> tuple[QueryChunk, ...]:
        """From the end of the sequence to its start."""
        chunks = []
        # The keys of a chunk are those of its first query's window, up to its last query.
        for last in range(self.q_len, 0, -self.rows):
            first = max(0, last - self.rows)
            end = self.kv_len - self.q_len + last
            first_key = max(0, end - (last - first) - self.max_kv_len + 1)
            chunks.append(QueryChunk(first, last - first, first_key, end - first_key))
        return tuple(chunks)

    @property
    def max_chunk_keys(self) -> int:
        """Keys of the widest chunk, which is the first one."""
        return self.chunks[0].keys


class ToeplitzTable:
    """A table over distance, laid out so that its values for all pairs of a chunk are a view.

    Entries are stored from the largest distance to the smallest, with a margin of `fill` values on
    both sides for masked pairs. With the queries of a chunk in reverse order, the pair in row r and
    column j of its scores has distance l-1 - (r+j). So the values of all pairs are an `as_strided`
    view in which both strides are 1, and no `[h, s, t]` tensor is needed.
    """

    def __init__(self, plan: ChunkPlan, heads: int, fill: float, like: Tensor):
        """heads: those of the plan, or 1 for a shared table. fill: the value for masked pairs."""
        self.max_kv_len = plan.max_kv_len
        self.margin = plan.rows - 1
        self.width = self.max_kv_len + 2 * self.margin
        # Heads of the table in a group: all of them if the group merges samples.
        self.group_heads = min(plan.group_size, heads)
        self.entries = like.new_full((heads, self.width), fill)

    @property
    def _table(self) -> Tensor:
        return self.entries[:, self.margin : self.margin + self.max_kv_len]

    def load(self, table: Tensor | None) -> None:
        """Copy a table `[h, >= max_kv_len]`, or zeros for None."""
        if table is None:
            self._table.zero_()
        else:
            self._table.copy_(table[:, : self.max_kv_len].flip(1))

    def to_table(self, length: int) -> Tensor:
        """`[h, length]` over distance, zero from max_kv_len on."""
        table = self.entries.new_zeros(len(self.entries), length)
        table[:, : self.max_kv_len] = self._table.flip(1)
        return table

    def align(self, first_head: int, scores: Tensor) -> tuple[Tensor, Tensor]:
        """A chunk's scores `[n, c, l]` as `[samples, h, c, l]`, and the table's values for its
        pairs, `[h, c, l]`.
        """
        values = self.values(first_head, *scores.shape[1:])
        return scores.view(-1, *values.shape), values

    def values(self, first_head: int, rows: int, keys: int) -> Tensor:
        """The table's values for the pairs of a chunk, whose queries are in reverse order: a
        read-only view `[h, c, l]`.
        """
        first = self._offset(keys)
        if len(self.entries) > 1:
            first += first_head * self.width
        return self.entries.as_strided((self.group_heads, rows, keys), (self.width, 1, 1), first)

    def add_gradient(self, first_head: int, gradient: Tensor) -> None:
        """Add the gradient of a chunk's pairs, contiguous `[n, c, l]` and zero for masked pairs, by
        distance.

        Pairs with the same distance have the same r+j. They are one column of a view whose rows are
        one element shorter than those of the matrix. Before its own first element, a row of this
        view contains the end of the previous row: pairs of masked keys, which are zero. The
        exception is the first column, where only the pair (0, 0) counts.
        """
        _, rows, keys = gradient.shape
        shorter_rows = (rows * keys, keys - 1, 1)
        diagonals = gradient.as_strided(gradient.shape, shorter_rows, gradient.storage_offset())
        sums = diagonals.sum(dim=1)  # [n, l]
        sums[:, 0] = gradient[:, 0, 0]
        offset = self._offset(keys)
        entries = self.entries[first_head : first_head + self.group_heads, offset : offset + keys]
        entries += sums.view(-1, self.group_heads, keys).sum(dim=0)

    def _offset(self, keys: int) -> int:
        """The index of the pair (0, 0) of a chunk with `keys` keys; its distance is keys-1."""
        return self.margin + self.max_kv_len - keys


def modify_budget(device: torch.device) -> int:
    """Bytes of scores per chunk, for methods with `modify_scores`."""
    if device.type == "cpu":
        return MODIFY_CPU_BYTES
    if device.type != "cuda":
        return MODIFY_DEVICE_BYTES
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(MODIFY_DEVICE_BYTES, memory // MODIFY_DEVICE_SHARE)


def modify_rows(query: Tensor, kv_len: int) -> int:
    """Queries per chunk of `[b, h, s, d]`, so that their scores for `kv_len` keys fit into
    `modify_budget`: at least MODIFY_MIN_ROWS, and on a CPU at most MODIFY_MAX_ROWS.
    """
    batch, heads, _, _ = query.shape
    row_bytes = max(1, 4 * batch * heads * kv_len)  # 0 for an empty batch
    rows = max(MODIFY_MIN_ROWS, modify_budget(query.device) // row_bytes)
    if query.device.type == "cpu":
        return min(rows, MODIFY_MAX_ROWS)
    return rows
