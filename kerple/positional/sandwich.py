"""Sandwich: what sinusoidal positions say about each other, as a fixed bias per head (arXiv 2212.10356)."""

import torch
from torch import Tensor

from kerple.positional.base import PositionalMethod
from kerple.positional.registry import register

# Cosines in memory at a time.
DISTANCES = 4096


@register("sandwich")
class Sandwich(PositionalMethod):
    """Bias (sum_i cos(δ / base^(2i/D)) - D/2) / (8 n / H) for head n = 1 ... H, i = 0 ... D/2 - 1; nothing is learned.

    The sum is the inner product of two sinusoidal embeddings of D dimensions (`dimensions`, 128 in the paper), 8 n / H
    the compression ratio of the head. D/2 is the sum at δ = 0, which the paper leaves in: the softmax takes it out, and
    without it the bias begins at 0 as that of other methods does, and loses nothing to a half-precision mask.
    """

    def __init__(self, num_heads: int, dimensions: int = 128, base: float = 10_000.0):
        super().__init__()
        if dimensions < 2 or dimensions % 2 or base <= 1:
            raise ValueError(
                f"sandwich needs an even number of dimensions and a base above 1; got dimensions {dimensions}, "
                f"base {base}"
            )
        self.num_heads, self.dimensions, self.base = num_heads, dimensions, float(base)

    def bias(self, distance: Tensor) -> Tensor:
        # Angles up to 65,536 and more, summed with one another: float64, and as far as the distances, no heads.
        half = self.dimensions // 2
        exponents = torch.arange(half, dtype=torch.float64, device=distance.device) / half
        frequencies = self.base**-exponents
        flat = distance.flatten().double()
        # cos x - 1 = -2 sin(x/2)^2, which is exact for small x.
        sums = [-2 * ((part[:, None] * frequencies) / 2).sin().square().sum(dim=1) for part in flat.split(DISTANCES)]
        heads = torch.arange(1, self.num_heads + 1, dtype=torch.float64, device=distance.device)
        total = torch.cat(sums).reshape(distance.shape)
        ratio = (8 * heads / self.num_heads).reshape(-1, *[1] * distance.dim())
        return (total / ratio).float()
