"""DAPE V2: the bias adapts to the scores of neighboring keys too (arXiv 2410.04798).

Like `dape.py`, but the two layers of f are convolutions along the keys with kernel size 3, so f's value for a key
depends on the scores of two keys on either side. Masked keys are set to zero before each convolution, so no information
from the future enters, and the results are the same in chunks and with a KV cache.

    dape_v2_kerple, dape_v2_alibi, dape_v2_fire, dape_v2 (no bias)

Legend: b batch, h heads, c queries, l keys, w hidden units, i inputs per pair.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from kerple.positional.alibi import Alibi
from kerple.positional.dape import VARIANTS, Adaptive, Layer
from kerple.positional.fire import Fire
from kerple.positional.kerple import KerpleLog
from kerple.positional.registry import register

KERNEL_SIZE = 3


class DapeConvolution(Adaptive):
    """Version 2: f processes the pairs of a query with neighboring keys together."""

    def layers(self, inputs: int, width: int, outputs: int) -> tuple[Layer, Layer]:
        return nn.Conv2d(inputs, width, (1, KERNEL_SIZE)), nn.Conv2d(width, outputs, (1, KERNEL_SIZE))

    def apply_weight(self, weight: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        return F.conv2d(states.masked_fill(mask, 0.0), weight, padding=(0, KERNEL_SIZE // 2))


@register("dape_v2")
class DapeV2(DapeConvolution):
    """A + f(A), without a static bias."""

    def __init__(self, num_heads: int, mlp_width: int = 32):
        super().__init__(num_heads, mlp_width, VARIANTS[0], None)


@register("dape_v2_kerple")
class DapeV2Kerple(DapeConvolution):
    """With KERPLE's logarithmic kernel, whose p and a are per layer here."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0]):
        super().__init__(num_heads, mlp_width, variant, KerpleLog(num_heads))


@register("dape_v2_alibi")
class DapeV2Alibi(DapeConvolution):
    """With ALiBi's bias."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0]):
        super().__init__(num_heads, mlp_width, variant, Alibi(num_heads))


@register("dape_v2_fire")
class DapeV2Fire(DapeConvolution):
    """With FIRE's bias, and its option `threshold`."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0], threshold: float = 512.0):
        super().__init__(num_heads, mlp_width, variant, Fire(num_heads, threshold=threshold))
