"""One transformer block: pre-norm attention and MLP, sequential or parallel residuals.

Legend: b batch, s query length, t key length, h heads of this rank, d head size, e hidden size.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.attention import FULL, Attention, Span, jacobians, score_table, tables
from kerple.positional import PositionalMethod, TableJacobian
from megatron.model.cache import LayerCache
from megatron.model.parallel import column_linear, row_linear, sum_head_gradients
from megatron.model.settings import ModelSettings

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda hidden: F.gelu(hidden, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def make_norm(settings: ModelSettings) -> nn.Module:
    """The configuration's `norm`, over the hidden size."""
    if settings.norm == "layernorm":
        return nn.LayerNorm(settings.hidden_size, eps=settings.norm_epsilon)
    if settings.norm == "rmsnorm":
        return nn.RMSNorm(settings.hidden_size, eps=settings.norm_epsilon)
    raise ValueError(f"norm {settings.norm!r} is not known; choose layernorm or rmsnorm")


class PositionTables(NamedTuple):
    """What attention needs of a positional method for the distances below a max_kv_len; None for what it has not."""

    bias: Tensor | None = None
    weight: Tensor | None = None
    bias_jacobian: TableJacobian | None = None
    weight_jacobian: TableJacobian | None = None
    modify_scores: Tensor | None = None


class SelfAttention(nn.Module):
    """Causal self-attention with a positional method; the parameter names are those of GPT-NeoX's checkpoints."""

    def __init__(self, settings: ModelSettings, positional: PositionalMethod):
        super().__init__()
        hidden, tp = settings.hidden_size, settings.tp
        self.head_size = settings.head_size
        self.tp = tp
        self.local_heads = tp.heads(settings.num_heads)
        self.query_key_value = column_linear(hidden, 3 * hidden, bias=True, tp=tp)
        if not positional.embeds:
            self.rpe = positional
        self.rotates = positional.rotates
        self.rounded = settings.release_bf16_distances
        self.has_table = positional.has_bias or positional.has_weight
        self.modifies_scores = positional.modifies_scores
        self.dropout = settings.attention_dropout
        self.attention = Attention(settings.attention_backend, positional)
        self.dense = row_linear(hidden, hidden, bias=True, tp=tp)

    def forward(
        self,
        hidden: Tensor,
        cache: LayerCache | None = None,
        span: Span = FULL,
        tables: PositionTables | None = None,
    ) -> Tensor:
        """`[b, s, e] -> [b, s, e]`; with a cache the new tokens follow those it holds. Tables not given are made."""
        return self.dense(self.context(self.query_key_value(hidden), cache, span, tables))

    def context(self, qkv: Tensor, cache: LayerCache | None, span: Span, tables: PositionTables | None) -> Tensor:
        """What the heads make of the tokens' queries, keys and values, `[b, s, 3e]`: `[b, s, e]`."""
        batch, new, _ = qkv.shape
        # Rows are grouped by head: each head's query, key and value stand together.
        qkv = qkv.view(batch, new, -1, 3, self.head_size)
        query, key, value = (part.squeeze(3).transpose(1, 2) for part in qkv.split(1, dim=3))
        if self.rotates:
            held = cache.length if cache is not None else 0
            positions = torch.arange(held, held + new)
            query, key = self.rpe.rotate(query, key, positions, positions)
        if cache is not None:
            key, value = cache.append(key, value)
        if tables is None:
            tables = self.position_tables(span.max_kv_len(key.shape[2]), query)
        context = self.attention(
            query,
            key,
            value,
            bias_table=tables.bias,
            weight_table=tables.weight,
            bias_jacobian=tables.bias_jacobian,
            weight_jacobian=tables.weight_jacobian,
            table=tables.modify_scores,
            window=span.window,
            block=span.block,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return context.transpose(1, 2).reshape(batch, new, -1)

    def position_tables(self, max_kv_len: int, states: Tensor) -> PositionTables:
        """Over the distances below `max_kv_len`, of this rank's heads, for states `[b, ..., s, e or d]`. All layers of a
        shared method may use the same.
        """
        device = states.device
        if self.modifies_scores:
            return PositionTables(modify_scores=score_table(self.rpe, max_kv_len, device))
        if not self.has_table:
            return PositionTables()
        found = PositionTables(
            *(
                None if table is None else self._of_rank(table)
                for table in tables(self.rpe, max_kv_len, device, rounded=self.rounded)
            )
        )
        heads = self.local_heads.stop - self.local_heads.start
        shape = (len(states), heads, states.shape[-2], self.head_size)
        if self.rounded or not self.attention.uses_jacobians(device, states.dtype, shape):
            return found
        bias, weight = (
            one
            and replace(one, coefficients=self._of_rank(one.coefficients), directions=one.directions[self.local_heads])
            for one in jacobians(self.rpe, max_kv_len, device)
        )
        return found._replace(bias_jacobian=bias, weight_jacobian=weight)

    def _of_rank(self, whole: Tensor) -> Tensor:
        """`[h, ...]` of all heads, made from replicated parameters, for the heads of this rank."""
        return sum_head_gradients(whole, self.tp)[self.local_heads]


class MLP(nn.Module):
    """`[b, s, e] -> [b, s, 4e] -> [b, s, e]`."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        hidden, tp = settings.hidden_size, settings.tp
        self.dense_h_to_4h = column_linear(hidden, 4 * hidden, bias=True, tp=tp)
        self.dense_4h_to_h = row_linear(4 * hidden, hidden, bias=True, tp=tp)
        self.activation = ACTIVATIONS[settings.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(hidden)))


class TransformerBlock(nn.Module):
    """`[b, s, e] -> [b, s, e]`."""

    def __init__(self, settings: ModelSettings, positional: PositionalMethod):
        super().__init__()
        self.input_layernorm = make_norm(settings)
        self.attention = SelfAttention(settings, positional)
        self.post_attention_layernorm = make_norm(settings)
        self.mlp = MLP(settings)
        self.dropout = nn.Dropout(settings.hidden_dropout)
        self.parallel_residual = settings.parallel_residual

    def forward(
        self,
        hidden: Tensor,
        cache: LayerCache | None = None,
        span: Span = FULL,
        tables: PositionTables | None = None,
    ) -> Tensor:
        attended = self.dropout(self.attention(self.input_layernorm(hidden), cache, span, tables))
        if self.parallel_residual:
            return hidden + attended + self.dropout(self.mlp(self.post_attention_layernorm(hidden)))
        hidden = hidden + attended
        return hidden + self.dropout(self.mlp(self.post_attention_layernorm(hidden)))
