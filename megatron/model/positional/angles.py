"""Angles position * base^(-2i/n) of sinusoidal and rotary positions."""

import torch
from torch import Tensor


class Angles:
    """Cosines and sines `[s, n/2]` float32 of `n/2` frequencies at integer positions `[s]`.

    The angles are float64: in float32 an angle near 65,536 is off by up to 0.004, and a cast model would make it
    worse. `dtype` float32 is for comparing with models that compute them so. All layers ask for the same positions, so
    the last results are kept and found again by the positions' values; only for positions on the CPU, since comparing
    them elsewhere would wait for the device.
    """

    KEPT = 2

    def __init__(self, size: int, base: float, dtype: torch.dtype = torch.float64):
        self.size = size
        self.base = float(base)
        self.dtype = dtype
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
        exponents = torch.arange(0, self.size, 2, dtype=self.dtype, device=positions.device) / self.size
        angles = positions.to(self.dtype)[:, None] * (1.0 / self.base**exponents)
        return angles.cos().float().to(device), angles.sin().float().to(device)
