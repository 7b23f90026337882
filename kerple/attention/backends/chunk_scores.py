"""The probabilities of a chunk of the chunked backend, in both of its passes.

Legend: s query length, t key length, h heads, d head size; in a chunk: n heads, m key/value heads,
c queries, l keys.
"""

import torch
from torch import Tensor

from kerple.attention.backends.chunk_plan import ChunkPlan, QueryChunk, ToeplitzTable
from kerple.attention.call import AttentionCall

# Scores this far below the maximum of their row (probabilities below e^-40), and weights below this
# fraction of the head's largest weight, are treated as masked. They are below float32's precision,
# but products and gradients turn them into denormal numbers, with which a CPU multiplies thirty
# times slower.
MIN_SCORE = -40.0
MIN_WEIGHT = 1e-10


def by_kv_head(states: Tensor, key: Tensor) -> Tensor:
    """`[n, c, ...]` -> `[m, n/m c, ...]`: the rows of all heads that share a key/value head of
    `[m, l, d]` are the rows of one matrix.
    """
    return states.view(len(key), -1, states.shape[-1])


def masked_bias(plan: ChunkPlan, call: AttentionCall, like: Tensor) -> ToeplitzTable:
    """The bias of a call, -inf for masked pairs; without a bias, 0 for the others and one head."""
    bias = call.tables.bias
    heads = plan.heads
    if bias is None:
        heads = 1
    table = ToeplitzTable(plan, heads, float("-inf"), like)
    table.load(bias)
    return table


class ChunkScores:
    """Computes the probabilities of a chunk, in both passes. The chunk's queries are in reverse
    order, as its tables require (see `ToeplitzTable`).
    """

    def __init__(self, plan: ChunkPlan, call: AttentionCall, like: Tensor):
        self.scale = call.scale
        bias = call.tables.bias
        weight = call.tables.weight
        # On a CPU, float32 numbers that are almost zero are treated as zero; see MIN_SCORE.
        on_cpu = like.device.type == "cpu"
        avoids_denormals = on_cpu and like.dtype == torch.float32
        if weight is not None and avoids_denormals:
            size = weight.abs()
            largest = size.amax(dim=1, keepdim=True)  # [h, 1]
            is_tiny = size < MIN_WEIGHT * largest
            weight = weight.masked_fill(is_tiny, 0.0)
        # Heads whose biases alone cause such probabilities.
        self.steep_heads: list[bool] = []
        if bias is not None and avoids_denormals:
            visible = bias[:, : plan.max_kv_len]
            lowest = visible.amin(dim=1)  # [h]
            is_steep = lowest - visible.amax(dim=1) < MIN_SCORE
            self.steep_heads = is_steep.tolist()
        # A query sees at least itself, at distance 0. Elsewhere than on a CPU, asking would wait
        # for the device.
        self.may_be_empty = bias is not None
        if bias is not None and on_cpu:
            hides_itself = bias[:, 0] == float("-inf")
            self.may_be_empty = bool(hides_itself.any())
        # The tables in the layout of the chunks.
        self.bias = masked_bias(plan, call, like)
        self.weight: ToeplitzTable | None = None
        if weight is not None:
            self.weight = ToeplitzTable(plan, plan.heads, 0.0, like)
            self.weight.load(weight)
        # Without a bias the table is only a mask. Without a window, it masks only pairs of a
        # chunk's last `rows` keys.
        self.only_causal = bias is None and plan.max_kv_len == plan.kv_len
        reverse = torch.arange(plan.rows - 1, -1, -1, device=like.device)
        self.reverse_order: dict[int, Tensor] = {}
        for chunk in plan.chunks:
            self.reverse_order[chunk.rows] = reverse[-chunk.rows :]

    def reversed_rows(self, states: Tensor, chunk: QueryChunk) -> Tensor:
        """A chunk's rows of `[n, s, d]`, last query first: `[n, c, d]`."""
        rows = states.narrow(1, chunk.first_query, chunk.rows)
        return rows.index_select(1, self.reverse_order[chunk.rows])

    def write_reversed(self, states: Tensor, chunk: QueryChunk, rows: Tensor) -> None:
        """Write a chunk's rows, last query first, to `[n, s, d]`."""
        rows = rows.index_select(1, self.reverse_order[chunk.rows])
        target = states.narrow(1, chunk.first_query, chunk.rows)
        target.copy_(rows)

    def products(self, query: Tensor, key: Tensor, out: Tensor) -> Tensor:
        """scale * q.k of `[n, c, d]` and `[m, l, d]`, in `out` `[n, c, l]`."""
        rows = by_kv_head(out, key)  # [m, n/m c, l]
        query_rows = by_kv_head(query, key)  # [m, n/m c, d]
        columns = key.transpose(1, 2)  # [m, d, l]
        torch.baddbmm(rows, query_rows, columns, beta=0, alpha=self.scale, out=rows)
        return out

    def probabilities(self, first_head: int, products: Tensor, out: Tensor) -> Tensor:
        """softmax(weight * products + bias), in `out`, which is `products` without a weight."""
        self.multiply_weight(first_head, products, out)
        scores, bias = self.bias.align(first_head, out)
        if self.only_causal:
            rows = out.shape[1]
            scores = scores[..., -rows:]
            bias = bias[..., -rows:]
        scores.add_(bias)
        # A row that is -inf everywhere gets probabilities of 0 instead of NaN.
        if self.may_be_empty:
            highest = out.amax(dim=-1, keepdim=True)  # [n, c, 1]
            is_empty = highest == float("-inf")
            out.masked_fill_(is_empty, 0.0)
            torch.softmax(out, dim=-1, out=out)
            return out.masked_fill_(is_empty, 0.0)
        # Masks the scores of steep heads that are far below the maximum of their row.
        end = first_head + self.bias.group_heads
        if any(self.steep_heads[first_head:end]):
            highest = out.amax(dim=-1, keepdim=True)  # [n, c, 1]
            out.sub_(highest)
            torch.threshold_(out, MIN_SCORE, float("-inf"))
        return torch.softmax(out, dim=-1, out=out)

    def multiply_weight(self, first_head: int, scores: Tensor, out: Tensor) -> None:
        """weight * scores, in `out`, both `[n, c, l]`. Does nothing if there is no weight."""
        if self.weight is not None:
            scores, weight = self.weight.align(first_head, scores)
            torch.mul(scores, weight, out=out.view_as(scores))
