"""Attention for methods that make the final scores themselves, by chunks of queries.

Such a method sees a chunk's scores, queries and positions (`modify_scores`), and may mix heads and keys. Whatever it computes
is made for a chunk, used and forgotten, and made again in the backward pass: memory is O(chunk * t).

Legend: b batch, s query length, t key length, h heads, d head size; in a chunk: c queries, l keys; n distances.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kerple.attention.span import Span

# Queries per chunk, and the bytes of scores at a time that decide between the two.
FEWEST_ROWS, MOST_ROWS = 16, 128
CPU_BYTES, DEVICE_BYTES = 4 * 1024 * 1024, 64 * 1024 * 1024


def adaptive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    modify_scores: Callable[..., Tensor],
    table: Tensor | None,
    span: Span,
    dropout_p: float,
    scale: float,
    whole: bool = False,
) -> Tensor:
    """As `attend`, with the method's `modify_scores` and `table`. whole: the yardstick, all queries in one chunk and nothing
    made again. Scores and softmax are float32 (float64 for float64 inputs).
    """
    s, t = query.shape[2], key.shape[2]
    rows = s if whole else _rows(query, t)
    recompute = torch.is_grad_enabled() and not whole
    contexts = []
    for first in range(0, s, rows):
        last = min(first + rows, s)
        begin, end = span.first_key(t - s + first), t - s + last
        chunk = partial(
            _chunk,
            modify_scores=modify_scores,
            query_positions=torch.arange(t - s + first, end),
            key_positions=torch.arange(begin, end),
            span=span,
            dropout_p=dropout_p,
            scale=scale,
        )
        states = (query[:, :, first:last], key[:, :, begin:end], value[:, :, begin:end], table)
        if recompute:
            # With the generators' states kept, what is dropped is the same in both passes.
            contexts.append(checkpoint(chunk, *states, use_reentrant=False, preserve_rng_state=dropout_p > 0))
        else:
            contexts.append(chunk(*states))
    return torch.cat(contexts, dim=2) if len(contexts) > 1 else contexts[0]


def _rows(query: Tensor, t: int) -> int:
    """Queries per chunk for `[b, h, s, d]` queries and t keys."""
    budget = CPU_BYTES if query.device.type == "cpu" else DEVICE_BYTES
    row_bytes = 4 * query.shape[0] * query.shape[1] * t
    return max(FEWEST_ROWS, min(MOST_ROWS, budget // row_bytes))


def _chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    *,
    modify_scores: Callable[..., Tensor],
    query_positions: Tensor,
    key_positions: Tensor,
    span: Span,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """`[b, h, c, d]` queries and `[b, h, l, d]` keys and values at consecutive positions, given on the CPU."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * scale
    mask = masked_pairs(query_positions, key_positions, span, query.device)
    scores = modify_scores(scores, query, query_positions, key_positions, mask, table)
    probabilities = scores.masked_fill(mask, float("-inf")).softmax(dim=-1)
    return (F.dropout(probabilities, dropout_p) @ value.to(dtype)).to(query.dtype)


def masked_pairs(query_positions: Tensor, key_positions: Tensor, span: Span, device: torch.device) -> Tensor:
    """The pairs whose key the query does not see, bool `[c, l]`, of consecutive positions on the CPU.

    Made on the device: for a copy from the CPU the host would wait until the device has done all that came before.
    """
    query, key = (
        torch.arange(int(positions[0]), int(positions[-1]) + 1, device=device)
        for positions in (query_positions, key_positions)
    )
    return (key > query[:, None]) | (key < span.first_key(query)[:, None])
