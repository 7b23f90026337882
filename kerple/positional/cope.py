"""CoPE: positions that count keys selected by the query (arXiv 2405.18719).

With the scaled scores A, each key k <= i counts for the query i by its gate g_ik = sigmoid(A_ik).
The position of key j for the query i is the sum of the gates from j to i, limited to the learned
positions:

    p_ij = min(sum of g_ik for k = j ... i, npos_max - 1)

The final score is A_ij + q_i . e[p_ij], with a learned vector e per integer position. At fractional
positions the products are interpolated linearly. Each layer has one table for all heads, which
starts at zero.

Legend: b batch, h heads, c queries, l keys, d head size, p positions.
"""

import torch
from torch import Tensor, nn

from kerple.positional.base import Chunk, ScoreModifier
from kerple.positional.registry import register


@register("cope")
class Cope(ScoreModifier):
    """Parameter `pos_emb` `[d, p]`. The option `npos_max` is the number of positions, p."""

    def __init__(self, head_size: int, npos_max: int = 64):
        super().__init__()
        if npos_max < 2:
            raise ValueError(
                f"npos_max {npos_max}: CoPE interpolates between positions, so it needs at least 2"
            )
        self.pos_emb = nn.Parameter(torch.empty(head_size, npos_max))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.pos_emb.zero_()

    def modify_scores(self, chunk: Chunk) -> Tensor:
        scores = chunk.scores
        gates = scores.sigmoid().masked_fill(chunk.mask, 0.0)  # [b, h, c, l]
        # Summing backwards from the query keeps the small sums exact; the large ones are clamped
        # anyway.
        positions = gates.flip(-1).cumsum(-1).flip(-1)
        positions = positions.clamp(max=self.pos_emb.shape[1] - 1)
        below = positions.detach().long()
        above = positions.detach().ceil().long()

        # The products with the vectors of the integer positions on both sides.
        products = chunk.query.to(scores.dtype) @ self.pos_emb.to(scores.dtype)  # [b, h, c, p]
        low = products.gather(-1, below)
        high = products.gather(-1, above)
        return scores + torch.lerp(low, high, positions - below)
