"""KERPLE's logarithmic bias on the scores of rotary queries and keys: a rotation and a bias together."""

from kerple.positional.kerple import KerpleLog
from kerple.positional.registry import register
from kerple.positional.rotary import Rotary, Rotation


@register("kerple_log_rotary")
class KerpleLogRotary(Rotation, KerpleLog):
    """Bias -p log(1 + a δ), with rotary queries and keys.

    Options `fraction` and `base`: see `Rotary`; `parameters`: see `Kerple`.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        parameters: str = "shared",
        fraction: float = 1.0,
        base: float = 10_000.0,
    ):
        super().__init__(num_heads, parameters)
        self.angles = Rotary(head_size, fraction=fraction, base=base).angles
