"""Attention with every score in memory: from tables over distance, and as the original KERPLE does it.

Legend: b batch, s query length, t key length, h heads, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.attention.call import AttentionCall, Backend
from kerple.attention.tables import pair_distances
from megatron.model.gpt import PositionTables


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
    """What the original does in each layer: bias and weight of a method are computed, not looked up, for every one of
    the `[s, s]` pairs, and scores, sums and probabilities are `[b, h, s, s]`. Distances are made once, as there.

    Takes the place of a layer's `kerple.attention.Attention`; no windows, no cache, no dropout.
    """

    def __init__(self, positional, length: int):
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


def attend_as_the_original(model: nn.Module, length: int) -> nn.Module:
    """Give all layers of a `megatron.model.gpt.GPT` this attention, for sequences of one length; the model again."""
    for block in model.blocks:
        layer = block.attention
        layer.attention = OriginalAttention(layer.rpe, length)
        layer.position_tables = lambda *_: PositionTables()  # this attention computes none
    return model


def with_whole_logits(model: nn.Module) -> nn.Module:
    """Give a `megatron.model.gpt.GPT` the loss of logits that are whole; the model again."""
    model.loss = lambda tokens, labels: F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    return model
