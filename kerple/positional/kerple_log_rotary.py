"""KERPLE's logarithmic bias on the scores of rotary queries and keys: a rotation and a bias together."""

from torch import Tensor

from kerple.positional.base import PositionalMethod
from kerple.positional.kerple import KerpleLog
from kerple.positional.registry import register
from kerple.positional.rotary import Rotary


@register("kerple_log_rotary")
class KerpleLogRotary(KerpleLog):
    """Bias -p log(1 + a δ), with rotary queries and keys.

    Options `fraction` and `base`: see `Rotary`; `parameters`: see `Kerple`.
    """

    turns = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        parameters: str = "shared",
        fraction: float = 1.0,
        base: float = 10_000.0,
    ):
        super().__init__(num_heads, parameters)
        self.rotary = Rotary(head_size, fraction=fraction, base=base)

    def rotate(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.rotary.rotate(query, key, query_positions, key_positions)

    def stretched(self, factor: float) -> PositionalMethod | None:
        return self.rotary.stretched(factor)
