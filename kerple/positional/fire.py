"""FIRE: an MLP of the distance relative to the query's position (arXiv 2310.04418).

The bias of the query at position i and the key at position j, both counted from 0, is

    MLP( log(|c (i - j)| + 1) / (log(|c max(i, |m L|)| + 1) + 1e-6) )

with a ReLU MLP of sizes 1, `mlp_width`, number of heads, and learned c and m, initially 0.1 and 1.
Each layer has its own parameters. L is the option `threshold`: below position |m L|, the bias
depends only on the distance.

Legend: b batch, h heads, c queries, l keys, w hidden units.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.positional.base import Chunk, MLPLayer, ScoreModifier
from kerple.positional.functional import (
    by_pair,
    cast_together,
    check_heads,
    check_num_heads,
    positions_on,
)
from kerple.positional.registry import register

INITIAL_C, INITIAL_M = 0.1, 1.0
EPSILON = 1e-6


@register("fire")
class Fire(ScoreModifier):
    """Parameters `c` and `m` `[1]`, and the layers `first` and `second` of the MLP, initialized as
    nn.Linear is.
    """

    per_pair = True
    causal_only = False
    counts_from_start = True
    activation = staticmethod(F.relu)

    def __init__(self, num_heads: int, mlp_width: int = 32, threshold: float = 512.0):
        super().__init__()
        if mlp_width < 1:
            raise ValueError(f"mlp_width {mlp_width}: FIRE's MLP needs at least one hidden unit")
        if not threshold > 0:
            raise ValueError(
                f"threshold {threshold}: FIRE's threshold is a number of tokens above 0"
            )
        check_num_heads(num_heads)
        self.num_heads = num_heads
        self.threshold = float(threshold)
        self.c = nn.Parameter(torch.empty(1))
        self.m = nn.Parameter(torch.empty(1))
        self.first = MLPLayer(1, mlp_width)
        self.second = MLPLayer(mlp_width, num_heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.c.fill_(INITIAL_C)
        self.m.fill_(INITIAL_M)
        self.first.reset_parameters(generator)
        self.second.reset_parameters(generator)

    def mapped_table(self, distance: Tensor) -> Tensor:
        """The mapped distances `[n]`, because the bias also depends on the query's position."""
        return distance

    def pair_bias(
        self,
        query_positions: Tensor,
        key_positions: Tensor,
        like: Tensor,
        mapped: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor:
        """The bias of all pairs, `[h, c, l]`, with the dtype and device of `like`. If not causal, a
        key after the query takes the query's place.

        mapped: a distance map's values for the distances 0 ... n-1, `[n]`. The query's position is
            mapped like a distance: it is the distance to the first token.
        """
        # Positions and parameters in the dtype of the scores.
        query = positions_on(query_positions, like.device, like.dtype)
        key = positions_on(key_positions, like.device, like.dtype)
        parameters = *self.first.weight_and_bias(), *self.second.weight_and_bias(), self.c, self.m
        first_weight, first_bias, second_weight, second_bias, c, m = cast_together(
            parameters, like.dtype
        )
        if mapped is None:
            distance = (query[:, None] - key).abs_()  # [c, l]
        else:
            mapped = mapped.to(like.dtype)
            distance = by_pair(mapped, query_positions, key_positions)
            query = mapped[query.long()]
        later = query[:, None]
        if not causal:
            later = torch.maximum(later, key)

        # The relative distance, and the MLP of all pairs.
        normalizer = (c.abs() * torch.maximum(later, m.abs() * self.threshold)).log1p() + EPSILON
        relative = (c.abs() * distance).log1p() / normalizer  # [c, l]
        hidden = torch.addcmul(first_bias[:, None], first_weight, relative.flatten())  # [w, c l]
        bias = second_weight @ self.activation(hidden) + second_bias[:, None]  # [h, c l]
        return bias.view(-1, *relative.shape)

    def modify_scores(self, chunk: Chunk) -> Tensor:
        check_heads(chunk.scores, self.num_heads, "FIRE")
        positions = chunk.query_positions, chunk.key_positions
        return chunk.scores + self.pair_bias(*positions, chunk.scores, chunk.table, chunk.causal)
