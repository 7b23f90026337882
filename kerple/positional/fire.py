"""FIRE: an MLP of the distance relative to the query's position (arXiv 2310.04418).

The bias of the query at position i and the key at position j, both counted from 0, is

    MLP( log(|c (i - j)| + 1) / (log(|c max(i, |m L|)| + 1) + 1e-6) )

with an MLP from 1 to `mlp_width` to the number of heads (ReLU), and c (0.1 at first) and m (1 at first) learned; a set
of all of them per layer. L is the option `threshold`: below that position the bias depends on the distance alone.

Legend: b batch, h heads, c queries, l keys, w hidden units.
"""

import torch
from torch import Tensor, nn

from kerple.positional.base import PositionalMethod, draw_layer
from kerple.positional.pairs import distances, on_device
from kerple.positional.registry import register

FIRST_C, FIRST_M = 0.1, 1.0
SMALLEST = 1e-6


@register("fire")
class Fire(PositionalMethod):
    """Parameters `c` and `m` `[1]`, and those of the layers `first` and `second`, with PyTorch's default initialization
    of them.
    """

    shared = False
    per_pair = True

    def __init__(self, num_heads: int, mlp_width: int = 32, threshold: float = 512.0):
        super().__init__()
        if mlp_width < 1:
            raise ValueError(f"mlp_width {mlp_width}: FIRE's MLP needs at least one hidden unit")
        if not threshold > 0:
            raise ValueError(f"threshold {threshold}: FIRE's is a number of tokens above 0")
        self.threshold = float(threshold)
        self.c, self.m = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.first, self.second = nn.Linear(1, mlp_width), nn.Linear(mlp_width, num_heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.c.fill_(FIRST_C)
        self.m.fill_(FIRST_M)
        for layer in (self.first, self.second):
            draw_layer(layer, generator)

    def pair_bias(self, query_positions: Tensor, key_positions: Tensor, like: Tensor) -> Tensor:
        """`[h, c, l]`, with the dtype and device of `like`."""
        c, m = self.c.to(like.dtype), self.m.to(like.dtype)
        position = on_device(query_positions, like)
        farthest = torch.maximum(position, (m * self.threshold).abs())
        distance = distances(query_positions, key_positions, like)
        relative = (c * distance).abs().log1p() / ((c * farthest).abs().log1p() + SMALLEST)[:, None]
        first, second = self.first, self.second
        hidden = first.weight.to(like.dtype) * relative.flatten() + first.bias.to(like.dtype)[:, None]
        mixed = second.weight.to(like.dtype) @ hidden.relu() + second.bias.to(like.dtype)[:, None]
        return mixed.unflatten(-1, relative.shape)

    def modify_scores(
        self,
        scores: Tensor,
        query: Tensor,
        query_positions: Tensor,
        key_positions: Tensor,
        mask: Tensor,
        table: Tensor | None,
    ) -> Tensor:
        return scores + self.pair_bias(query_positions, key_positions, scores)
