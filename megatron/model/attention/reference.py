"""The yardstick: the scores as one matrix, in float32 (float64 for float64 inputs).

Legend: b batch, s query length, t key length, h heads, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias_table: Tensor | None = None,
    weight_table: Tensor | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    s, t, d = query.shape[2], key.shape[2], query.shape[3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * (d**-0.5 if scale is None else scale)
    distance = torch.arange(t - s, t, device=query.device)[:, None] - torch.arange(t, device=query.device)
    unseen = distance < 0
    if window is not None:
        unseen |= distance >= window
    # Unseen pairs look up distance 0; the mask then takes them out, of the gradient too.
    distance = distance.masked_fill(unseen, 0)
    if weight_table is not None:
        scores = scores * weight_table[:, distance]
    if bias_table is not None:
        scores = scores + bias_table[:, distance]
    probabilities = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
    return (F.dropout(probabilities, dropout_p) @ value.to(dtype)).to(query.dtype)
