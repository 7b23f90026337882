"""The transformer of the benchmark: an encoder, in which every position attends to all positions.

Relative methods are defined for keys before the query. Here they are extended to keys after it:

    KERPLE, ALiBi, T5, Sandwich    the bias and weight of the absolute distance
    DAPE (both versions)           its static bias of the absolute distance; its network sees the scores of all keys
    FIRE                           the pair is treated as if query and key were swapped
    xPos                           the products decay with the absolute distance; the rotation encodes the direction
    Transformer-XL                 r of the negative distance, as in the benchmark's own relative encoding
    CoPE                           the gates between query and key are summed in the direction of the key

Rotary and absolute positions already encode the direction.

Legend: b samples, s positions, h heads, d head size, e hidden size.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.attention import tables
from kerple.positional import Chunk, Fire, ModelShape, PositionalMethod, TransformerXL, build_layers, method_class
from kerple.positional.dape import Adaptive
from megatron.utils.errors import UserError

ARCHITECTURES = ("pre-norm", "original")
DROPOUT = 0.1  # of the original architecture
EMBEDDING_STD = 0.02  # of the original architecture


def check_method(name: str) -> None:
    """Raises UserError if the method is unknown."""
    try:
        method_class(name)
    except ValueError as error:
        raise UserError(str(error)) from error


class Encoder(nn.Module):
    """Symbols, int64 `[b, s]` -> logits `[b, s, classes]`, at any length.

    The default sizes are those of DAPE's experiment (section 4.6). architecture `original` is that of the benchmark's
    public code: norms after the residuals, ReLU, no biases in attention, dropout 0.1 in training, and its
    initialization.
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
        architecture: str = "pre-norm",
    ):
        super().__init__()
        check_method(pos_emb)
        shape = ModelShape(num_heads, hidden_size // num_heads, hidden_size, num_layers, max_positions)
        methods = build_layers(pos_emb, shape)
        self.embedding = nn.Embedding(symbols, hidden_size)
        self.positional = nn.ModuleList(methods)
        original = architecture == "original"
        layer = PostNormLayer if original else PreNormLayer
        self.layers = nn.ModuleList(layer(hidden_size, num_heads) for _ in range(num_layers))
        self.norm = nn.Identity() if original else nn.LayerNorm(hidden_size)
        self.output = nn.Linear(hidden_size, classes)
        self.dropout = nn.Dropout(DROPOUT if original and "embed" in methods[0].hooks else 0.0)
        if not original:
            nn.init.normal_(self.embedding.weight, std=hidden_size**-0.5)
            return
        # The code multiplies the embeddings by sqrt(e).
        std = EMBEDDING_STD * math.sqrt(hidden_size)
        nn.init.trunc_normal_(self.embedding.weight, std=std, a=-2 * std, b=2 * std)
        for module in (*self.layers.modules(), self.output):
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, symbols: Tensor) -> Tensor:
        positions = torch.arange(symbols.shape[1])
        methods = cast(Sequence[PositionalMethod], self.positional)  # one for all layers, or one per layer
        hidden = self.dropout(methods[0].embed(self.embedding(symbols), positions))
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, methods[min(index, len(methods) - 1)], positions)
        return self.output(self.norm(hidden))


class EncoderLayer(nn.Module):
    """Attention over all positions, and an MLP: `[b, s, e] -> [b, s, e]`."""

    def __init__(self, hidden_size: int, num_heads: int, *, attention_biases: bool, activation: nn.Module):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=attention_biases)
        self.projection = nn.Linear(hidden_size, hidden_size, bias=attention_biases)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size), activation, nn.Linear(4 * hidden_size, hidden_size)
        )

    def attention(self, hidden: Tensor, positional: PositionalMethod, positions: Tensor) -> Tensor:
        batch, length, size = hidden.shape
        qkv = self.query_key_value(hidden).view(batch, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = positional.rotate(query, key, positions, positions)
        if positional.hooks - {"embed", "rotate"}:
            scores = bidirectional_products(query, key, positional, positions)
            scores = bidirectional_scores(scores, query, positional, positions)
            if "decay" in positional.hooks:
                sums = positional.decay(hidden).cumsum(dim=-1)
                scores = scores - (sums[..., :, None] - sums[..., None, :]).abs()
            context = scores.softmax(dim=-1).to(value.dtype) @ value
        else:
            context = F.scaled_dot_product_attention(query, key, value)
        return self.projection(context.transpose(1, 2).reshape(batch, length, size))


class PreNormLayer(EncoderLayer):
    """Norms before attention and MLP, GELU, biases everywhere, no dropout."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__(hidden_size, num_heads, attention_biases=True, activation=nn.GELU())

    def forward(self, hidden: Tensor, positional: PositionalMethod, positions: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), positional, positions)
        return hidden + self.mlp(self.mlp_norm(hidden))


class PostNormLayer(EncoderLayer):
    """The benchmark's own layer: norms after the residuals, ReLU, no biases in attention, dropout."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__(hidden_size, num_heads, attention_biases=False, activation=nn.ReLU())
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: Tensor, positional: PositionalMethod, positions: Tensor) -> Tensor:
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, positional, positions)))
        return self.mlp_norm(hidden + self.dropout(self.mlp(hidden)))


def bidirectional_products(query: Tensor, key: Tensor, positional: PositionalMethod, positions: Tensor) -> Tensor:
    """The scaled products `[b, h, s, s]` of queries and keys, with the method's `scale_qk` in both directions."""
    if "scale_qk" not in positional.hooks:
        return query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5

    def decaying(first: Tensor, second: Tensor) -> Tensor:
        """The products of all pairs, valid where the position of `second` is not after that of `first`."""
        rows = []
        for part, part_positions in zip(
            first.split(positional.segment, dim=2), positions.split(positional.segment), strict=True
        ):
            scaled, others = positional.scale_qk(part, second, part_positions, positions)
            rows.append(scaled @ others.transpose(-1, -2))
        return torch.cat(rows, dim=2) * query.shape[-1] ** -0.5

    return torch.where(_key_follows(positions, query), decaying(key, query).transpose(-1, -2), decaying(query, key))


def bidirectional_scores(scores: Tensor, query: Tensor, positional: PositionalMethod, positions: Tensor) -> Tensor:
    """The final scores `[b, h, s, s]`: with the method's weight and bias, or modified by its `modify_scores`, for pairs
    in both directions.
    """
    distances = positions.to(scores.device, torch.float32)
    key_follows = _key_follows(positions, scores)
    if "modify_scores" not in positional.hooks:
        distance = (positions[:, None] - positions).abs().to(scores.device)
        bias, weight = tables(positional, len(positions), scores.device)
        scores = scores if weight is None else scores * weight[:, distance]
        return scores if bias is None else scores + bias[:, distance]
    if isinstance(positional, Adaptive):
        static, bias = positional.static, None
        if isinstance(static, Fire):
            bias = static.pair_bias(positions, positions, scores)
            bias = torch.where(key_follows, bias.transpose(-1, -2), bias)
        elif static is not None:
            distance = (positions[:, None] - positions).abs().to(scores.device)
            bias = static.bias(distances)[:, distance].to(scores.dtype)
        visible = torch.zeros_like(key_follows)
        return positional.adapt(scores, bias, (visible, visible))

    def before(scores: Tensor, query: Tensor, table: Tensor | None) -> Tensor:
        return positional.modify_scores(Chunk(scores, query, positions, positions, key_follows, table))

    causal = before(scores, query, positional.table(distances))
    if positional.per_pair and not positional.shift_invariant:  # the position of the query matters, not only distances
        following = before(scores.transpose(-1, -2), query, positional.table(distances)).transpose(-1, -2)
    else:
        # Read from right to left, the keys after a query precede it, at the same distances.
        signed = -distances if isinstance(positional, TransformerXL) else distances
        following = before(scores.flip(-1, -2), query.flip(-2), positional.table(signed)).flip(-1, -2)
    return torch.where(key_follows, following, causal)


def _key_follows(positions: Tensor, like: Tensor) -> Tensor:
    """bool `[s, s]`: True for the pairs whose key is after the query."""
    return torch.ones(len(positions), len(positions), dtype=torch.bool, device=like.device).triu(1)
