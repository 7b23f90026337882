"""KERPLE: relative positions by conditionally positive definite kernels of the distance (arXiv 2205.09921).

With distance δ = m - n >= 0 and, per head, the scalars that training learns:

    kerple_log           bias -p log(1 + a δ)             a, p > 0           logarithmic
    kerple_power_ap_     bias -a δ^p                      a > 0, 0 < p <= 2  power
    kerple_power__ap     weight exp(-a δ^p)               a > 0, 0 < p <= 2  2-para-wht (appendix A.3)
    kerple_power_ap_ap   both, with parameters of its own each               bias+wht

The bias is added to the scores after their division by sqrt(d), as the authors' code has it; equation 1 of the paper
adds it before. Parameter names, shapes and initial distributions are those of the authors' checkpoints.
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megatron.model.positional.base import PositionalMethod, bounded, draw
from megatron.model.positional.registry import register

LOWEST = 0.01
HIGHEST_EXPONENT = 2.0


class Scalar(NamedTuple):
    """A learned number per head: drawn from U(0, `drawn_below`), used within [0.01, `high`]."""

    drawn_below: float
    high: float | None


SCALE = Scalar(1.0, None)
LOG_SCALE = Scalar(2.0, None)
EXPONENT = Scalar(2.0, HIGHEST_EXPONENT)


class Kerple(PositionalMethod):
    """A kernel with scalars per head, each a parameter `[h, 1, 1]`."""

    scalars: ClassVar[dict[str, Scalar]]

    def __init__(self, num_heads: int):
        super().__init__()
        for name in self.scalars:
            self.register_parameter(name, nn.Parameter(torch.empty(num_heads, 1, 1)))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for name, scalar in self.scalars.items():
            draw(getattr(self, name), "uniform", 0.0, scalar.drawn_below, generator)

    def statistics(self) -> dict[str, Tensor]:
        return {name: self.scalar(name).detach().flatten() for name in self.scalars}

    def scalar(self, name: str, dims: int = 0) -> Tensor:
        """A parameter as used: float32, within its bounds, `[h]` followed by `dims` dimensions of size 1."""
        value = bounded(getattr(self, name), LOWEST, self.scalars[name].high)
        return value.reshape(-1, *[1] * dims)

    def _power(self, distance: Tensor, scale: str, exponent: str) -> Tensor:
        """a δ^p, `[h, *distance.shape]`."""
        distance = distance.float()
        return self.scalar(scale, distance.dim()) * distance.pow(self.scalar(exponent, distance.dim()))


@register("kerple_log")
class KerpleLog(Kerple):
    """Bias -p log(1 + a δ)."""

    scalars: ClassVar[dict[str, Scalar]] = {"bias_p": LOG_SCALE, "bias_a": SCALE}

    def bias(self, distance: Tensor) -> Tensor:
        distance = distance.float()
        p, a = (self.scalar(name, distance.dim()) for name in ("bias_p", "bias_a"))
        return -p * torch.log1p(a * distance)


@register("kerple_power_ap_", "kerple_power")
class KerplePower(Kerple):
    """Bias -a δ^p."""

    scalars: ClassVar[dict[str, Scalar]] = {"bias_a": SCALE, "bias_p": EXPONENT}

    def bias(self, distance: Tensor) -> Tensor:
        return -self._power(distance, "bias_a", "bias_p")


@register("kerple_power__ap")
class KerpleWeight(Kerple):
    """Weight exp(-a δ^p)."""

    scalars: ClassVar[dict[str, Scalar]] = {"wei_a": SCALE, "wei_p": EXPONENT}

    def weight(self, distance: Tensor) -> Tensor:
        return torch.exp(-self._power(distance, "wei_a", "wei_p"))


@register("kerple_power_ap_ap", "kerple_bias_wht")
class KerpleBiasWeight(Kerple):
    """Bias -a δ^p and weight exp(-a' δ^p')."""

    scalars: ClassVar[dict[str, Scalar]] = {"bias_a": SCALE, "bias_p": EXPONENT, "wei_a": SCALE, "wei_p": EXPONENT}

    def bias(self, distance: Tensor) -> Tensor:
        return -self._power(distance, "bias_a", "bias_p")

    def weight(self, distance: Tensor) -> Tensor:
        return torch.exp(-self._power(distance, "wei_a", "wei_p"))
