"""Attention as GPT-NeoX and the original KERPLE do it: every score in memory, and the bias made for every element.

Legend: b batch, s query length, t key length, h heads, d head size.
"""

import torch
from torch import Tensor


def materialised_attention(
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
    """As `megatron.model.attention.attend`, in the states' dtype, with `[b, h, s, t]` scores and probabilities."""
    s, t = query.shape[2], key.shape[2]
    distance = torch.arange(t - s, t, device=query.device)[:, None] - torch.arange(t, device=query.device)
    unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
    distance = distance.masked_fill(unseen, 0)
    scores = query @ key.transpose(-1, -2) * scale
    if weight_table is not None:
        scores = scores * weight_table[:, distance].to(scores.dtype)
    if bias_table is not None:
        scores = scores + bias_table[:, distance].to(scores.dtype)
    return scores.masked_fill(unseen, torch.finfo(scores.dtype).min).softmax(dim=-1) @ value
