"""xPos: rotary positions whose products decay with the distance, per pair of dimensions (LEX, arXiv 2212.10554).

Dimensions 2i and 2i + 1 are rotated by position * 10000^(-2i/d). Their part of the product of the query at n and the
key at m is multiplied by zeta_i^((n - m) / scale_base), zeta_i = (i / (d/2) + 0.4) / 1.4.

The authors multiply the query by zeta^(n / scale_base) and the key by zeta^(-m / scale_base), which soon exceeds the
range of half precision. Here keys are cached rotated but unscaled, and both factors are computed in attention, relative
to the middle of a segment of queries: those of the queries stay near 1 and those of far keys go to zero, at any length.

Legend: b batch, h heads, s queries, t keys, d head size.
"""

import torch
from torch import Tensor

from kerple.positional.functional import Angles, DeviceConstant, may_cache, positions_on
from kerple.positional.registry import register
from kerple.positional.rotary import Rotation

# Smaller factors are set to zero: they would produce denormal numbers, which are slow on a CPU.
MIN_FACTOR = 1e-18
# Length of a segment of queries in units of scale_base; its factors are 0.4 / 1.4 to the power of -2 ... 2.
SEGMENT = 4


@register("xpos")
class XPos(Rotation):
    """The option `scale_base` is the distance at which the first pair of dimensions has decayed to 0.4 / 1.4."""

    CACHE_SIZE = 2

    def __init__(self, head_size: int, base: float = 10_000.0, scale_base: float = 512.0):
        super().__init__()
        if head_size % 2:
            raise ValueError(f"xpos rotates pairs of dimensions, so the head size must be even; got {head_size}")
        if not scale_base >= 1:
            raise ValueError(f"scale_base {scale_base} must be at least 1 (a number of tokens)")
        self.scale_base = float(scale_base)
        self.angles = Angles(head_size, base)
        half = head_size // 2
        zeta = (torch.arange(half, dtype=torch.float64, device="cpu") / half + 0.4) / 1.4
        self.log_zeta = DeviceConstant(zeta.log().tolist(), torch.float64)
        self._cache: list[tuple[Tensor, Tensor, torch.device, tuple[Tensor, Tensor]]] = []

    @property
    def segment(self) -> int:
        return int(SEGMENT * self.scale_base)

    def turn(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        even, odd = states.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), dim=-1)
        return rotated.flatten(-2).to(states.dtype)

    def scale_qk(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        query_factors, key_factors = self._factors(query_positions, key_positions, query.device)
        return (query * query_factors).to(query.dtype), (key * key_factors).to(key.dtype)

    def _factors(self, queries: Tensor, keys: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The factors of queries `[s, d]` and keys `[t, d]`, float32, for their positions, int64 or float64.

        The latest results are cached, because all layers need the same factors.
        """
        for cached_queries, cached_keys, cached_device, factors in self._cache:
            if cached_device == device and torch.equal(cached_queries, queries) and torch.equal(cached_keys, keys):
                return factors
        # Autograd cannot save inference tensors, and training may use tensors that an evaluation cached.
        with torch.inference_mode(False), torch.no_grad():
            log_zeta = self.log_zeta(device) / self.scale_base
            middle = float(queries[0] + queries[-1]) / 2
            both = []
            for positions, sign in ((queries, 1), (keys, -1)):
                offsets = sign * (positions_on(positions, device, torch.float64) - middle)
                powers = torch.threshold((offsets[:, None] * log_zeta).exp(), MIN_FACTOR, 0.0)
                both.append(powers.float().repeat_interleave(2, dim=-1))
            cached = queries.clone(), keys.clone(), device, (both[0], both[1])
        if may_cache():
            self._cache = [cached, *self._cache[: self.CACHE_SIZE - 1]]
        return cached[3]
