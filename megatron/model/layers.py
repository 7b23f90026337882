"""Parts of a transformer block: norms, MLPs, and the layout of query, key and value.

Legend: b batch, s tokens, h heads of this rank, g heads of keys and values of this rank, d head
size, e hidden size, f features of the MLP.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.model.parallel import column_linear, row_linear, sum_head_gradients
from megatron.model.settings import ModelSettings

if TYPE_CHECKING:  # GPU benchmarks run without pydantic
    from megatron.config.schema.model import ModelConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda hidden: F.gelu(hidden, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

# The activation of the gate in a gated MLP ("GLU Variants Improve Transformer", arXiv 2002.05202).
GATES = {"swiglu": "silu", "geglu": "gelu"}


def make_norm(config: "ModelConfig") -> nn.Module:
    """The configured norm layer over the hidden size. An RMS norm has no bias."""
    if config.norm == "layernorm":
        return nn.LayerNorm(
            config.hidden_size, eps=config.norm_epsilon, bias=config.use_bias_in_norms
        )
    return nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)


class HeadNorm(nn.Module):
    """The configured norm over the dimensions of each head, `[b, h, s, d] -> [b, h, s, d]`, for
    queries or keys.

    All heads share the parameters. Each tensor-parallel rank has a copy, and computes the gradient
    of its own heads.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        config, self.tp = settings.config, settings.tp
        self.epsilon = config.norm_epsilon
        self.centers = config.norm == "layernorm"
        self.weight = nn.Parameter(torch.ones(config.head_size))
        self.bias: nn.Parameter | None = None
        if self.centers and config.use_bias_in_norms:
            self.bias = nn.Parameter(torch.zeros(config.head_size))

    def forward(self, states: Tensor) -> Tensor:
        # Each rank's gradient is that of its own heads; summed, it is the same on all ranks.
        weight, bias = sum_head_gradients(self.weight, self.tp), None
        if not self.centers:
            return F.rms_norm(states, weight.shape, weight, self.epsilon)
        if self.bias is not None:
            bias = sum_head_gradients(self.bias, self.tp)
        return F.layer_norm(states, weight.shape, weight, bias, self.epsilon)


class _SplitHeads(torch.autograd.Function):
    """`[b, s, 3 h d]` -> query, key and value `[b, h, s, d]`.

    GPT-NeoX groups the rows of query_key_value by head: each head's query, key and value are
    adjacent. The backward pass copies nothing if attention wrote the gradients in this layout.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, head_size: int) -> tuple[Tensor, ...]:
        return qkv.view(*qkv.shape[:2], -1, 3, head_size).permute(3, 0, 2, 1, 4).unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        query = grads[0]  # [b, h, s, d]
        batch, heads, length, head_size = query.shape
        row = 3 * heads * head_size
        if not torch.compiler.is_compiling():
            # The gradients are packed if each follows the one before it in the same memory.
            strides, start = (length * row, 3 * head_size, row, 1), query.storage_offset()
            layouts = [(grad.stride(), grad.storage_offset() - start) for grad in grads]
            is_packed = layouts == [(strides, index * head_size) for index in range(3)]
            if is_packed and len({grad.untyped_storage()._cdata for grad in grads}) == 1:
                return query.as_strided((batch, length, row), (length * row, row, 1)), None
        # Gradients in other memory are copied into the layout of the projection.
        stacked = torch.stack([grad.transpose(1, 2) for grad in grads], dim=3)  # [b, s, h, 3, d]
        return stacked.view(batch, length, row), None


def split_heads(qkv: Tensor, head_size: int, queries_per_key: int) -> tuple[Tensor, Tensor, Tensor]:
    """`[b, s, (h + 2 g) d]` -> query `[b, h, s, d]`, key and value `[b, g, s, d]`, for h = g *
    `queries_per_key`.

    Rows of query_key_value are grouped by key head: the queries that share a key, the key, and its
    value. With one query per key, this is GPT-NeoX's layout. With more, GPT-NeoX has all queries of
    a tensor-parallel rank, then its keys, then its values, so that its layout depends on the number
    of ranks.
    """
    if queries_per_key == 1:
        return cast(tuple[Tensor, Tensor, Tensor], _SplitHeads.apply(qkv, head_size))
    # A group per key head: its queries, its key and its value.
    groups = qkv.unflatten(-1, (-1, queries_per_key + 2, head_size))  # [b, s, g, h / g + 2, d]
    query, key, value = groups.transpose(1, 2).split((queries_per_key, 1, 1), dim=3)
    return query.transpose(2, 3).flatten(1, 2), key.squeeze(3), value.squeeze(3)


class MLP(nn.Module):
    """`[b, s, e] -> [b, s, f] -> [b, s, e]`."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        config, tp = settings.config, settings.tp
        hidden, features, bias = config.hidden_size, config.mlp_features, config.use_bias_in_mlp
        self.dense_h_to_4h = column_linear(hidden, features, bias=bias, tp=tp)
        self.dense_4h_to_h = row_linear(features, hidden, bias=bias, tp=tp)
        self.activation_name = config.activation_function
        self.activation = ACTIVATIONS[self.activation_name]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(hidden)))


class GatedMLP(nn.Module):
    """w2(activation(w1(x)) * w3(x)), `[b, s, e] -> [b, s, f] -> [b, s, e]`; w1 computes the gate.

    The names are those of Llama and of GPT-NeoX 2.0.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        config, tp = settings.config, settings.tp
        hidden, features, bias = config.hidden_size, config.mlp_features, config.use_bias_in_mlp
        self.w1 = column_linear(hidden, features, bias=bias, tp=tp)
        self.w3 = column_linear(hidden, features, bias=bias, tp=tp)
        self.w2 = row_linear(features, hidden, bias=bias, tp=tp)
        self.activation_name = GATES[config.activation]
        self.activation = ACTIVATIONS[self.activation_name]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(self.activation(self.w1(hidden)) * self.w3(hidden))


def make_mlp(settings: ModelSettings) -> MLP | GatedMLP:
    """The MLP for the configured activation."""
    if settings.config.gated:
        return GatedMLP(settings)
    return MLP(settings)
