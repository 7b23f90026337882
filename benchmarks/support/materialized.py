"""Attention that materializes all scores: with tables over distance, and as the original KERPLE code computes it.

Legend: b batch, s sequence length, h heads, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.attention.call import AttentionCall, Backend
from kerple.attention.tables import NO_TABLES
from kerple.positional import PositionalMethod
from megatron.model.gpt import GPT


def materialized_attention(call: AttentionCall) -> Tensor:
    """Like `kerple.attention.attend`, with all scores and probabilities in memory, in the dtype of the query."""
    queries, keys = range(call.offset, call.kv_len), range(call.kv_len)
    mask = call.span.mask(queries, keys, call.query.device)
    distance = call.distances(queries, keys)
    scores = call.query @ call.key.transpose(-1, -2) * call.scale
    if call.tables.weight is not None:
        scores = scores * call.tables.weight[:, distance].to(scores.dtype)
    if call.tables.bias is not None:
        scores = scores + call.tables.bias[:, distance].to(scores.dtype)
    return scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(dim=-1) @ call.value


MATERIALIZED = Backend("materialized", materialized_attention)


class OriginalAttention:
    """The original's attention: each layer evaluates bias and weight for all `[s, s]` pairs, without tables, and stores
    scores, biased scores and probabilities as `[b, h, s, s]`. As in the original, distances are computed once.

    Replaces a layer's `kerple.attention.Attention`. Windows, KV cache and dropout are not supported.
    """

    def __init__(self, positional: PositionalMethod, length: int):
        position = torch.arange(length)
        distance = position[:, None] - position
        self.positional = positional
        self.mask = distance < 0
        self.distance = distance.clamp(min=0).float()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        scores = query * query.shape[3] ** -0.5 @ key.transpose(-1, -2)
        if "weight" in self.positional.hooks:
            scores = scores * self.positional.weight(self.distance)
        if "bias" in self.positional.hooks:
            scores = scores + self.positional.bias(self.distance)
        return scores.masked_fill(self.mask, torch.finfo(scores.dtype).min).softmax(dim=-1) @ value


def use_original_attention(model: GPT, length: int) -> GPT:
    """Replace the attention of all layers, for sequences of one length. Returns the model."""
    for block in model.blocks:
        layer = block.attention
        layer.attention = OriginalAttention(layer.rpe, length)
        layer.position_tables = lambda *_: NO_TABLES  # this attention does not use tables
    return model


def use_materialized_logits(model: nn.Module) -> nn.Module:
    """Materialize all logits for the loss, instead of chunks of them. Returns the model."""
    model.loss = lambda tokens, labels: F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    return model
