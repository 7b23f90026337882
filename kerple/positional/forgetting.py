"""Biases that depend on the tokens between query and key: forgetting attention and CABLE.

    forgetting   the forget gate of token k is sigmoid(w.x_k + b), per head and layer (FoX, arXiv 2503.02130); the bias
                 of query i and key j is the sum of the gates' logarithms for k = j+1 ... i
    cable        the bias is the sum of -softplus(w.x_k + b) for the same tokens (arXiv 2503.08067)

x is the input of the layer's attention, after its norm. Since -softplus(z) = log sigmoid(-z), both are the same family
of functions, with opposite signs of w and b; at initialization the biases of both have the same distribution. Neither
uses other positions. The weights w start from N(0, 0.02) and the biases b at zero, as in both codes. CABLE's published
code does not divide the products of queries and keys by sqrt(d); here they are divided, as for all methods.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.positional.base import PositionalMethod, draw
from kerple.positional.registry import register

INIT_STD = 0.02


@register("forgetting", "fox")
class Forgetting(PositionalMethod):
    """Bias: the sum of log sigmoid(w.x + b) over the tokens after the key, up to the query.

    Parameters `gate.weight` `[h, e]` and `gate.bias` `[h]`, in each layer.
    """

    shared = False
    causal_only = True
    sign = 1.0

    def __init__(self, num_heads: int, hidden_size: int):
        super().__init__()
        self.gate = nn.Linear(hidden_size, num_heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        draw(self.gate.weight, "normal", 0.0, INIT_STD, generator)
        self.gate.bias.zero_()

    def decay(self, hidden: Tensor) -> Tensor:
        logits = self.gate(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.logsigmoid(self.sign * logits).transpose(1, 2)

    def statistics(self) -> dict[str, Tensor]:
        """The gates of hidden states of zeros."""
        return {"gate": (self.sign * self.gate.bias.detach().float()).sigmoid()}


@register("cable")
class Cable(Forgetting):
    """Bias: the sum of -softplus(w.x + b) over the tokens after the key, up to the query.

    Parameters `gate.weight` `[h, e]` and `gate.bias` `[h]`, in each layer.
    """

    sign = -1.0
