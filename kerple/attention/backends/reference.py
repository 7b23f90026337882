"""The yardstick: the scores as one matrix, in float32 (float64 for float64 inputs).

Legend: b batch, s query length, t key length, h heads, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.tables import pair_distances


def reference_attention(
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
    """As `attend`, with `[b, h, s, t]` scores in memory."""
    s, t = query.shape[2], key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    distance, unseen = pair_distances((t - s, t), (0, t), window, query.device)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * scale
    if weight_table is not None:
        scores = scores * weight_table[:, distance]
    if bias_table is not None:
        scores = scores + bias_table[:, distance]
    probabilities = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
    return (F.dropout(probabilities, dropout_p) @ value.to(dtype)).to(query.dtype)
