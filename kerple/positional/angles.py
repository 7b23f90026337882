"""Angles position * frequency of sinusoidal and rotary positions, the frequencies base^(-2i/n) unless given."""

from collections.abc import Sequence

import torch
from torch import Tensor


def frequencies(size: int, base: float) -> tuple[float, ...]:
    """base^(-2i/size) for i = 0 ... size/2 - 1."""
    return tuple(float(base) ** (-2.0 * i / size) for i in range((size + 1) // 2))


class Angles:
    """Cosines and sines `[s, n/2]` float32 of `n/2` frequencies at positions `[s]`, times `scale`.

    The angles are float64: in float32 an angle near 65,536 is off by up to 0.004, and a cast model would make it
    worse. `dtype` float32 is for comparing with models that compute them so. All layers ask for the same positions, so
    the last results are kept and found again by the positions' values; only for positions on the CPU, since comparing
    them elsewhere would wait for the device.
    """

    KEPT = 2

    def __init__(
        self,
        size: int,
        base: float,
        dtype: torch.dtype = torch.float64,
        own: Sequence[float] | None = None,
        scale: float = 1.0,
    ):
        """`own`: n/2 frequencies to take instead of those of the base."""
        self.size = size
        self.base = float(base)
        self.dtype = dtype
        self.own = own
        self.scale = scale
        self._kept: list[tuple[Tensor, torch.device, tuple[Tensor, Tensor]]] = []

    def __call__(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        if positions.device.type != "cpu":
            return self._compute(positions, device)
        for known, where, result in self._kept:
            if where == device and torch.equal(known, positions):
                return result
        # What an evaluation leaves here, training must be able to save for its backward pass.
        with torch.inference_mode(False):
            result = self._compute(positions, device)
            self._kept = [(positions.clone(), device, result), *self._kept[: self.KEPT - 1]]
        return result

    @torch.no_grad()
    def _compute(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        if self.own is None:
            exponents = torch.arange(0, self.size, 2, dtype=self.dtype, device=positions.device) / self.size
            chosen = 1.0 / self.base**exponents
        else:
            chosen = torch.tensor(self.own, dtype=self.dtype, device=positions.device)
        angles = positions.to(self.dtype)[:, None] * chosen
        return tuple((part * self.scale).float().to(device) for part in (angles.cos(), angles.sin()))
