"""Norms and MLPs of a transformer block.

Legend: b batch, s tokens, h heads of this rank, d head size, e hidden size, f features of the MLP.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.parallel import column_linear, row_linear, sum_head_gradients
from megatron.model.settings import ModelSettings

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda hidden: F.gelu(hidden, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

# The activation of the gate in a gated MLP ("GLU Variants Improve Transformer", arXiv 2002.05202).
GATES = {"swiglu": "silu", "geglu": "gelu"}


def make_norm(settings: ModelSettings) -> nn.Module:
    """The configured norm layer over the hidden size. An RMS norm has no bias."""
    if settings.norm == "layernorm":
        return nn.LayerNorm(settings.hidden_size, eps=settings.norm_epsilon, bias=settings.norm_bias)
    if settings.norm == "rmsnorm":
        return nn.RMSNorm(settings.hidden_size, eps=settings.norm_epsilon)
    raise ValueError(f"norm {settings.norm!r} is unknown; choose layernorm or rmsnorm")


class HeadNorm(nn.Module):
    """The configured norm over the dimensions of each head, `[b, h, s, d] -> [b, h, s, d]`, for queries or keys.

    All heads share the parameters. Each tensor-parallel rank has a copy, and computes the gradient of its own heads.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.tp = settings.tp
        self.epsilon = settings.norm_epsilon
        self.centers = settings.norm == "layernorm"
        self.weight = nn.Parameter(torch.ones(settings.head_size))
        self.bias = nn.Parameter(torch.zeros(settings.head_size)) if self.centers and settings.norm_bias else None

    def forward(self, states: Tensor) -> Tensor:
        weight = sum_head_gradients(self.weight, self.tp)
        if not self.centers:
            return F.rms_norm(states, weight.shape, weight, self.epsilon)
        bias = None if self.bias is None else sum_head_gradients(self.bias, self.tp)
        return F.layer_norm(states, weight.shape, weight, bias, self.epsilon)


class MLP(nn.Module):
    """`[b, s, e] -> [b, s, f] -> [b, s, e]`."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        hidden, features, tp, bias = settings.hidden_size, settings.intermediate_size, settings.tp, settings.mlp_bias
        self.dense_h_to_4h = column_linear(hidden, features, bias=bias, tp=tp)
        self.dense_4h_to_h = row_linear(features, hidden, bias=bias, tp=tp)
        self.activation_name = settings.activation
        self.activation = ACTIVATIONS[settings.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(hidden)))


class GatedMLP(nn.Module):
    """w2(activation(w1(x)) * w3(x)), `[b, s, e] -> [b, s, f] -> [b, s, e]`; w1 computes the gate.

    The names are those of Llama and of GPT-NeoX 2.0.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        hidden, features, tp, bias = settings.hidden_size, settings.intermediate_size, settings.tp, settings.mlp_bias
        self.w1 = column_linear(hidden, features, bias=bias, tp=tp)
        self.w3 = column_linear(hidden, features, bias=bias, tp=tp)
        self.w2 = row_linear(features, hidden, bias=bias, tp=tp)
        self.activation_name = GATES[settings.activation]
        self.activation = ACTIVATIONS[self.activation_name]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(self.activation(self.w1(hidden)) * self.w3(hidden))


def make_mlp(settings: ModelSettings) -> MLP | GatedMLP:
    """The MLP for the configured activation."""
    return GatedMLP(settings) if settings.activation in GATES else MLP(settings)
