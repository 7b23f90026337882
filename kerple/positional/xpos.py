"""xPos: rotary positions whose products fade with the distance, pair by pair of dimensions (LEX, arXiv 2212.10554).

Dimensions 2i and 2i + 1 are turned by position * 10000^(-2i/d); their part of the product of the query at n and the key
at m is multiplied by zeta_i^((n - m) / scale_base), zeta_i = (i / (d/2) + 0.4) / 1.4.

The authors multiply the query by zeta^(n / scale_base) and the key by zeta^(-m / scale_base), which leaves the range of
half precision soon. Here keys are cached turned, but not scaled, and both factors are made when attention is computed,
around the middle of a segment of queries: a query's stay near 1 and a far key's become zero, at any length.

Legend: b batch, h heads, s queries, t keys, d head size.
"""

import torch
from torch import Tensor

from kerple.positional.angles import Angles
from kerple.positional.base import PositionalMethod
from kerple.positional.registry import register

# Factors below it count as zero; they would become denormal numbers, with which a CPU is slow.
LOWEST_FACTOR = 1e-18
# Queries of a segment, in units of scale_base: the factors within it are then 0.4 / 1.4 to the power of -2 ... 2.
SEGMENT = 4


@register("xpos")
class XPos(PositionalMethod):
    """The option `scale_base` is the distance over which the first pair of dimensions fades to 0.4 / 1.4."""

    KEPT = 2

    def __init__(self, head_size: int, base: float = 10_000.0, scale_base: float = 512.0):
        super().__init__()
        if head_size % 2:
            raise ValueError(f"xpos turns pairs of dimensions, so the head size must be even; got {head_size}")
        if not scale_base >= 1:
            raise ValueError(f"scale_base {scale_base}: xpos's is a number of tokens from 1 on")
        self.scale_base = float(scale_base)
        self.segment = int(SEGMENT * scale_base)
        self.angles = Angles(head_size, base)
        half = head_size // 2
        self.logarithms = (((torch.arange(half, dtype=torch.float64, device="cpu") / half) + 0.4) / 1.4).log().tolist()
        self._kept: list[tuple[tuple, tuple[Tensor, Tensor]]] = []

    def rotate(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._turn(query, query_positions), self._turn(key, key_positions)

    def scale_qk(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        ends = [int(positions[end]) for positions in (query_positions, key_positions) for end in (0, -1)]
        factors = self._factors(*ends, query.device)
        return tuple((states * factor).to(states.dtype) for states, factor in zip((query, key), factors, strict=True))

    def _turn(self, states: Tensor, positions: Tensor) -> Tensor:
        cosine, sine = self.angles(positions, states.device)
        first, second = states.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
        return turned.flatten(-2).to(states.dtype)

    def _factors(
        self, first_query: int, last_query: int, first_key: int, last_key: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """`[s, d]` and `[t, d]` float32. All layers ask for the same ones, so the last are kept."""
        asked = (first_query, last_query, first_key, last_key, device)
        for known, factors in self._kept:
            if known == asked:
                return factors
        # What an evaluation leaves here, training must be able to save for its backward pass.
        with torch.inference_mode(False), torch.no_grad():
            logarithms = torch.tensor(self.logarithms, dtype=torch.float64, device=device) / self.scale_base
            origin = (first_query + last_query) / 2
            query = torch.arange(first_query, last_query + 1, dtype=torch.float64, device=device) - origin
            key = origin - torch.arange(first_key, last_key + 1, dtype=torch.float64, device=device)
            factors = tuple(
                torch.threshold((exponents[:, None] * logarithms).exp(), LOWEST_FACTOR, 0.0)
                .float()
                .repeat_interleave(2, dim=-1)
                for exponents in (query, key)
            )
        self._kept = [(asked, factors), *self._kept[: self.KEPT - 1]]
        return factors
