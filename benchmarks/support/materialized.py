"""Attention that materializes all scores: with tables over distance, and as the original KERPLE
code computes it.

Legend: b batch, s sequence length, h heads, d head size.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.backend import Backend
from kerple.attention.call import AttentionCall
from kerple.attention.tables import NO_TABLES, PositionTables
from megatron.model.attention import SelfAttention
from megatron.model.gpt import GPT


def materialized_attention(call: AttentionCall) -> Tensor:
    """Like `kerple.attention.attend`, with all scores and probabilities in memory, in the dtype of
    the query.
    """
    queries = slice(call.offset, call.kv_len)
    keys = slice(0, call.kv_len)
    mask = call.span.mask(queries, keys, call.query.device)
    distance = call.distances(queries, keys)

    # Every operation stores all scores, [b, h, s, s].
    scores = call.query @ call.key.transpose(-1, -2)
    scores = scores * call.scale
    if call.tables.weight is not None:
        weight = call.tables.weight[:, distance]
        scores = scores * weight.to(scores.dtype)
    if call.tables.bias is not None:
        bias = call.tables.bias[:, distance]
        scores = scores + bias.to(scores.dtype)
    return _average(scores, mask, call.value)


def _average(scores: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """The values `[b, h, s, d]` weighted by the softmax of the scores outside the mask."""
    smallest = torch.finfo(scores.dtype).min
    probabilities = scores.masked_fill(mask, smallest).softmax(dim=-1)
    return probabilities @ value


MATERIALIZED = Backend("materialized", materialized_attention)


@functools.cache
def original_distances(length: int) -> tuple[Tensor, Tensor]:
    """The mask of later keys, and the distances, float32 `[s, s]`. As in the original, they are
    computed once.
    """
    position = torch.arange(length)
    distance = position[:, None] - position
    return distance < 0, distance.clamp(min=0).float()


class OriginalAttention(SelfAttention):
    """The original's attention: each layer evaluates bias and weight for all `[s, s]` pairs,
    without tables, and stores scores, biased scores and probabilities as `[b, h, s, s]`. Without
    windows, KV cache, rotation and dropout.
    """

    def position_tables(self, *_: object, **__: object) -> PositionTables:
        return NO_TABLES

    def context(self, qkv: Tensor, *_: object, **__: object) -> Tensor:
        query, key, value = self.heads(qkv)  # [b, h, s, d]
        mask, distance = original_distances(qkv.shape[1])
        scaled = query * self.head_size**-0.5
        scores = scaled @ key.transpose(-1, -2)

        # The method is evaluated for every pair, in each layer.
        method = self.positional
        if "weight" in method.hooks:
            scores = scores * method.weight(distance)
        if "bias" in method.hooks:
            scores = scores + method.bias(distance)
        context = _average(scores, mask, value)
        return context.transpose(1, 2).flatten(2)


def use_original_attention(model: GPT) -> GPT:
    """Replace the attention of all layers. Returns the model."""
    for index, block in enumerate(model.blocks):
        attention = block.attention
        original = OriginalAttention(model.settings, attention.positional, index)
        original.load_state_dict(attention.state_dict())
        block.attention = original
    return model


def materialized_loss(model: GPT, tokens: Tensor, labels: Tensor) -> Tensor:
    """The loss of a model with all logits in memory, instead of chunks of them."""
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten())
