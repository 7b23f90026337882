"""ALiBi: a fixed linear bias per head (arXiv 2108.12409)."""

from torch import Tensor

from kerple.positional.base import Bias
from kerple.positional.functional import DeviceConstant, check_num_heads
from kerple.positional.registry import register


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """2^(-8 i / H) for i = 1 ... H, if the number of heads H is a power of two.

    Otherwise the slopes for the largest power of two P below H, followed by every second slope for
    2P.
    """
    # Of 2P, the slopes between those of P: the first, the third and so on.
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    intermediate = [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * power + 1, 2)]
    return tuple(slopes + intermediate[: num_heads - power])


@register("alibi")
class Alibi(Bias):
    """Bias -slope_h δ, without parameters."""

    lowest_slope = 0.0

    def __init__(self, num_heads: int):
        super().__init__()
        check_num_heads(num_heads)
        self.slopes = tuple(max(slope, self.lowest_slope) for slope in alibi_slopes(num_heads))
        self._slopes_on = DeviceConstant(self.slopes)

    def bias(self, distance: Tensor) -> Tensor:
        slopes = self._slopes_on(distance.device)  # [h]
        slopes = slopes.reshape(-1, *[1] * distance.dim())  # [h, 1, ...]
        return -slopes * distance.float()


@register("kerple_power_original")
class KerplePowerOriginal(Alibi):
    """ALiBi as a special case of KERPLE: the power kernel with p = 1 and a fixed at ALiBi's slopes.

    The original KERPLE code clamps this `a`, like every scalar, to at least 0.01, so its flattest
    heads are steeper than ALiBi's.
    """

    lowest_slope = 0.01
    computed = ("bias_a",)
