"""Attention with all scores in memory: from tables over distance, and as the original KERPLE code computes it.

Legend: b batch, s sequence length, h heads, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.attention.call import AttentionCall, Backend
from kerple.attention.tables import pair_distances
from kerple.positional import PositionalMethod
from megatron.model.gpt import GPT, PositionTables


def materialised_attention(call: AttentionCall) -> Tensor:
    """As `kerple.attention.attend`, in the dtype of query, with all scores and probabilities in memory."""
    queries, keys = range(call.offset, call.kv_len), range(call.kv_len)
    mask = call.span.mask(queries, keys, call.query.device)
    distance = pair_distances(queries, keys, mask)
    scores = call.query @ call.key.transpose(-1, -2) * call.scale
    if call.weight_table is not None:
        scores = scores * call.weight_table[:, distance].to(scores.dtype)
    if call.bias_table is not None:
        scores = scores + call.bias_table[:, distance].to(scores.dtype)
    return scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(dim=-1) @ call.value


MATERIALISED = Backend("materialised", materialised_attention)


class OriginalAttention:
    """Attention as in the original: each layer computes bias and weight for all `[s, s]` pairs instead of looking them
    up, and scores, their sums and probabilities are `[b, h, s, s]`. Distances are computed once.

    Replaces a layer's `kerple.attention.Attention`, without windows, cache and dropout.
    """

    def __init__(self, positional: PositionalMethod, length: int):
        position = torch.arange(length)
        distance = position[:, None] - position
        self.positional = positional
        self.mask = distance < 0
        self.distance = distance.clamp(min=0).float()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        scores = query * query.shape[3] ** -0.5 @ key.transpose(-1, -2)
        if self.positional.has_weight:
            scores = scores * self.positional.weight(self.distance)
        if self.positional.has_bias:
            scores = scores + self.positional.bias(self.distance)
        return scores.masked_fill(self.mask, torch.finfo(scores.dtype).min).softmax(dim=-1) @ value


def attend_as_the_original(model: GPT, length: int) -> GPT:
    """Replace the attention of all layers, for sequences of one length. Returns the model."""
    for block in model.blocks:
        layer = block.attention
        layer.attention = OriginalAttention(layer.rpe, length)
        layer.position_tables = lambda *_: PositionTables()  # this attention does not use tables
    return model


def with_whole_logits(model: nn.Module) -> nn.Module:
    """Compute the loss from all logits at once, instead of in pieces. Returns the model."""
    model.loss = lambda tokens, labels: F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    return model
