"""Sandwich: inner products of sinusoidal embeddings as fixed biases (arXiv 2212.10356)."""

import torch
from torch import Tensor

from kerple.positional.base import Bias
from kerple.positional.functional import check_num_heads
from kerple.positional.registry import register

# Number of distances per chunk, which limits the memory for their cosines.
CHUNK = 4096


@register("sandwich")
class Sandwich(Bias):
    """Bias (sum_i cos(δ / base^(2i/D)) - D/2) / (8 n / H) for head n = 1 ... H, i = 0 ... D/2 - 1;
    no parameters.

    The sum is the inner product of two sinusoidal embeddings of D dimensions (option `dimensions`,
    128 in the paper). 8 n / H is the head's compression ratio. D/2, which the paper does not
    subtract, is the sum at δ = 0. The softmax cancels it; subtracting it makes the bias start at 0,
    as for other methods, and precise in half-precision masks.
    """

    def __init__(self, num_heads: int, dimensions: int = 128, base: float = 10_000.0):
        super().__init__()
        if dimensions < 2 or dimensions % 2 or not base > 1:
            raise ValueError(
                "sandwich needs an even number of dimensions and a base above 1; got dimensions "
                f"{dimensions}, base {base}"
            )
        check_num_heads(num_heads)
        self.num_heads = num_heads
        self.dimensions = dimensions
        self.base = float(base)

    def bias(self, distance: Tensor) -> Tensor:
        # float64, because the angles reach 65,536 and many of them are summed. The heads share the
        # sum.
        half = self.dimensions // 2
        exponents = torch.arange(half, dtype=torch.float64, device=distance.device) / half
        frequencies = self.base**-exponents
        # cos x - 1 = -2 sin(x/2)^2, which is accurate for small x.
        sums = []
        for chunk in distance.flatten().double().split(CHUNK):
            angles = chunk[:, None] * frequencies  # [n, D/2]
            squares = (angles / 2).sin().square()
            sums.append(-2 * squares.sum(dim=1))
        heads = torch.arange(1, self.num_heads + 1, dtype=torch.float64, device=distance.device)
        # The compression ratio of each head, [h, 1, ...].
        ratio = (8 * heads / self.num_heads).reshape(-1, *[1] * distance.dim())
        return (torch.cat(sums).reshape(distance.shape) / ratio).float()
