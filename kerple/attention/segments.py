"""Attention whose queries and keys are scaled by their positions, in segments of queries.

Legend: b batch, s query length, t key length, h heads, d head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kerple.attention.span import Span


def decayed(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    method,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: Span,
) -> Tensor:
    """`attention` of `[b, h, s, d]` queries, the last of the `[b, h, t, d]` keys' positions, both scaled by the
    method's `scale_qk`: once for every `method.segment` queries, whose scales must fit the keys that they see.
    """
    held = key.shape[2] - query.shape[2]
    contexts = []
    for first in range(0, query.shape[2], method.segment):
        last = min(first + method.segment, query.shape[2])
        # For blocks, the first key is the first of its block: their borders stay where they are.
        begin, end = span.first_key(held + first), held + last
        scaled = method.scale_qk(
            query[:, :, first:last], key[:, :, begin:end], torch.arange(held + first, end), torch.arange(begin, end)
        )
        contexts.append(attention(*scaled, value[:, :, begin:end]))
    return torch.cat(contexts, dim=2) if len(contexts) > 1 else contexts[0]
