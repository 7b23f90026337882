"""The transformer of the benchmark: an encoder, in which every position attends to all positions.

Methods that are defined only for keys before the query are extended to keys after it: the gates of
CoPE and the decays between query and key are summed in the direction of the key, and stick-breaking
is read from right to left.

Legend: b samples, s positions, h heads, d head size, e hidden size.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from kerple.attention import Attention
from kerple.positional import Chunk, ModelShape, PositionalMethod, build_layers
from megatron.utils.errors import UserError

ARCHITECTURES = ("pre-norm", "original")
DROPOUT = 0.1  # of the original architecture
EMBEDDING_STD = 0.02  # of the original architecture


def build_methods(name: str, shape: ModelShape) -> list[PositionalMethod]:
    """As `build_layers`, but raises UserError for an unknown method or an unsupported shape."""
    try:
        return build_layers(name, shape)
    except ValueError as error:
        raise UserError(str(error)) from error


class Encoder(nn.Module):
    """Symbols, int64 `[b, s]` -> logits `[b, s, classes]`, at any length.

    The default sizes are those of DAPE's experiment (section 4.6). architecture `original` is that
    of the benchmark's public code: norms after the residuals, ReLU, no biases in attention, dropout
    0.1 in training, and its initialization.
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
        # One method for each layer, or one that all share.
        super().__init__()
        head_size = hidden_size // num_heads
        shape = ModelShape(num_heads, head_size, hidden_size, num_layers, max_positions)
        methods = build_methods(pos_emb, shape)
        self.embedding = nn.Embedding(symbols, hidden_size)
        self.positional = nn.ModuleList(methods)
        original = architecture == "original"
        layers = [EncoderLayer(hidden_size, num_heads, original) for _ in range(num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm: nn.Module = nn.LayerNorm(hidden_size)
        self.output = nn.Linear(hidden_size, classes)
        self.dropout = nn.Dropout(0.0)

        # Initial values. The original architecture has its own, also for linear layers.
        if not original:
            nn.init.normal_(self.embedding.weight, std=hidden_size**-0.5)
            return
        self.norm = nn.Identity()
        if "embed" in methods[0].hooks:
            self.dropout.p = DROPOUT

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
        positions = torch.arange(symbols.shape[1])  # [s]
        methods = cast(Sequence[PositionalMethod], self.positional)  # for all layers, or per layer
        hidden = self.dropout(methods[0].embed(self.embedding(symbols), positions))
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, methods[min(index, len(methods) - 1)])
        return self.output(self.norm(hidden))


class EncoderLayer(nn.Module):
    """Attention over all positions, and an MLP: `[b, s, e] -> [b, s, e]`."""

    def __init__(self, hidden_size: int, num_heads: int, original: bool):
        super().__init__()
        self.num_heads, self.original = num_heads, original
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=not original)
        self.projection = nn.Linear(hidden_size, hidden_size, bias=not original)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        widen = nn.Linear(hidden_size, 4 * hidden_size)
        activation = nn.ReLU() if original else nn.GELU()
        self.mlp = nn.Sequential(widen, activation, nn.Linear(4 * hidden_size, hidden_size))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: Tensor, positional: PositionalMethod) -> Tensor:
        if self.original:
            hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, positional)))
            return self.mlp_norm(hidden + self.dropout(self.mlp(hidden)))
        hidden = hidden + self.attention(self.attention_norm(hidden), positional)
        return hidden + self.mlp(self.mlp_norm(hidden))

    def attention(self, hidden: Tensor, positional: PositionalMethod) -> Tensor:
        # [b, s, e] -> [b, s, 3, h, d] -> three times [b, h, s, d]
        batch, length, size = hidden.shape
        qkv = self.query_key_value(hidden).view(batch, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        method: PositionalMethod = positional
        if positional.causal_only:
            method = BothSides(positional, hidden)

        # The sequences are short, so all scores fit in memory, and training need not compute them
        # twice.
        backend = "reference" if method.hooks - {"embed", "rotate"} else "sdpa"
        context = Attention(method, backend)(query, key, value, causal=False)  # [b, h, s, d]
        return self.projection(context.transpose(1, 2).reshape(batch, length, size))


class BothSides(PositionalMethod):
    """A causal method, read in both directions, for the input of one layer.

    hidden: the input of attention, `[b, s, e]`, from which a decay is computed.
    """

    def __init__(self, method: PositionalMethod, hidden: Tensor):
        super().__init__()
        self.method = method
        self.sums: Tensor | None = None
        if "decay" in method.hooks:
            self.sums = method.decay(hidden).cumsum(dim=-1)

    def modify_scores(self, chunk: Chunk) -> Tensor:
        """The final scores of all pairs, `[b, h, s, s]`."""
        if self.sums is not None:
            return chunk.scores - (self.sums[..., :, None] - self.sums[..., None, :]).abs()
        follows = torch.ones_like(chunk.mask).triu(1)
        causal = replace(chunk, mask=follows, causal=True)
        before = self.method.modify_scores(causal)

        # Read from right to left, the keys after a query precede it.
        after = self.method.modify_scores(
            replace(causal, scores=chunk.scores.flip(-1, -2), query=chunk.query.flip(-2))
        )
        return torch.where(follows, after.flip(-1, -2), before)
