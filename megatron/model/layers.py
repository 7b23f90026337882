"""Norms and MLPs of a transformer block.

Legend: b batch, s tokens, h heads of this rank, d head size, e hidden size, f features of the MLP.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        has_bias = self.centers and config.use_bias_in_norms
        self.bias = nn.Parameter(torch.zeros(config.head_size)) if has_bias else None

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
    return GatedMLP(settings) if settings.config.gated else MLP(settings)
