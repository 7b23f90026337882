"""CoPE: positions that count what the query finds worth counting (arXiv 2405.18719).

With the scaled scores A, a key k <= i that the query i sees is counted by the gate g_ik = sigmoid(A_ik), and the key
j's position as seen from i is the count from it up to the query,

    p_ij = sum of g_ik for k = j ... i, at most npos_max - 1.

The score becomes A_ij + q_i . e[p_ij], with a learned vector e per whole position, between two of which the products
are interpolated. One table for all heads of a layer, zero at first.

Legend: b batch, h heads, c queries, l keys, d head size, p positions.
"""

import torch
from torch import Tensor, nn

from kerple.positional.base import PositionalMethod
from kerple.positional.registry import register


@register("cope")
class Cope(PositionalMethod):
    """Parameter `pos_emb` `[d, p]`; the option `npos_max` is the number of positions, p."""

    shared = False

    def __init__(self, head_size: int, npos_max: int = 64):
        super().__init__()
        if npos_max < 2:
            raise ValueError(f"npos_max {npos_max}: CoPE interpolates between positions, so it needs at least 2")
        self.pos_emb = nn.Parameter(torch.empty(head_size, npos_max))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.pos_emb.zero_()

    def modify_scores(
        self,
        scores: Tensor,
        query: Tensor,
        query_positions: Tensor,
        key_positions: Tensor,
        mask: Tensor,
        table: Tensor | None,
    ) -> Tensor:
        gates = scores.sigmoid().masked_fill(mask, 0.0)
        # Summed from the query backwards, so that the sums near it, which are below the limit, are the exact ones.
        counts = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.pos_emb.shape[1] - 1)
        below = counts.detach().floor()
        products = query.to(scores.dtype) @ self.pos_emb.to(scores.dtype)
        low, high = (products.gather(-1, whole.long()) for whole in (below, counts.detach().ceil()))
        return scores + torch.lerp(low, high, counts - below)
