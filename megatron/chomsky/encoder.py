"""The transformer of the benchmark: an encoder, in which every position attends to all positions.

Relative methods are defined for a distance >= 0, so their bias and weight are used symmetrically. For a pair whose key
follows the query, DAPE and FIRE get the transposed scores, i.e. they treat the pair as if query and key were swapped.
Rotary and absolute positions also encode the direction.

Legend: b samples, s positions, h heads, d head size, e hidden size.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.attention import tables
from kerple.positional import ModelShape, PositionalMethod, build, method_class
from megatron.utils.errors import UserError


def check_method(name: str) -> None:
    """Raises UserError if the method is unknown, or is only defined for causal attention."""
    try:
        method = method_class(name)
    except ValueError as error:
        raise UserError(str(error)) from error
    causal = getattr(method, "modify_scores", None) is not None and not method.per_pair
    if causal or getattr(method, "scale_qk", None) is not None:
        raise UserError(
            f"{name} is only defined for keys before the query, but the benchmark's encoder attends to all keys; "
            "choose another method"
        )


class Encoder(nn.Module):
    """Symbols, int64 `[b, s]` -> logits `[b, s, classes]`, at any length.

    The default sizes are those of DAPE's experiment (section 4.6).
    """

    def __init__(
        self,
        symbols: int,
        classes: int,
        pos_emb: str,
        *,
        num_layers: int = 5,
        hidden_size: int = 256,
        num_heads: int = 8,
        max_positions: int = 2048,
    ):
        super().__init__()
        check_method(pos_emb)
        shape = ModelShape(num_heads, hidden_size // num_heads, hidden_size, num_layers, max_positions)
        methods = [build(pos_emb, shape)]
        while not methods[0].shared and len(methods) < num_layers:
            methods.append(build(pos_emb, shape))
        self.embedding = nn.Embedding(symbols, hidden_size)
        self.positional = nn.ModuleList(methods)
        self.layers = nn.ModuleList(EncoderLayer(hidden_size, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.output = nn.Linear(hidden_size, classes)
        nn.init.normal_(self.embedding.weight, std=hidden_size**-0.5)

    def forward(self, symbols: Tensor) -> Tensor:
        positions = torch.arange(symbols.shape[1])
        methods = cast(Sequence[PositionalMethod], self.positional)  # one for all layers, or one per layer
        hidden = methods[0].embed(self.embedding(symbols), positions)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, methods[min(index, len(methods) - 1)], positions)
        return self.output(self.norm(hidden))


class EncoderLayer(nn.Module):
    """Pre-norm attention over all positions, and an MLP: `[b, s, e] -> [b, s, e]`."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.projection = nn.Linear(hidden_size, hidden_size)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size)
        )

    def forward(self, hidden: Tensor, positional: PositionalMethod, positions: Tensor) -> Tensor:
        batch, length, size = hidden.shape
        qkv = self.query_key_value(self.attention_norm(hidden)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = positional.rotate(query, key, positions, positions)
        if positional.has_bias or positional.has_weight or positional.modifies_scores:
            scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
            scores = bidirectional_scores(scores, query, positional, positions)
            context = scores.softmax(dim=-1).to(value.dtype) @ value
        else:
            context = F.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.projection(context.transpose(1, 2).reshape(batch, length, size))
        return hidden + self.mlp(self.mlp_norm(hidden))


def bidirectional_scores(scores: Tensor, query: Tensor, positional: PositionalMethod, positions: Tensor) -> Tensor:
    """The final scores `[b, h, s, s]`: with the method's weight and bias, or modified by its `modify_scores`, for pairs
    in both directions.
    """
    if not positional.modifies_scores:
        distance = (positions[:, None] - positions).abs().to(scores.device)
        bias, weight = tables(positional, len(positions), scores.device)
        scores = scores if weight is None else scores * weight[:, distance]
        return scores if bias is None else scores + bias[:, distance]
    key_follows = torch.ones(len(positions), len(positions), dtype=torch.bool, device=scores.device).triu(1)
    table = positional.table(positions.to(scores.device, torch.float32))
    causal, swapped = (
        positional.modify_scores(direction, query, positions, positions, key_follows, table)
        for direction in (scores, scores.transpose(-1, -2))
    )
    return torch.where(key_follows, swapped.transpose(-1, -2), causal)
