"""DAPE V2: the bias modifies_scores to the scores of neighbouring keys too (arXiv 2410.04798).

As `dape.py`, but the two layers of f are convolutions along the keys, three wide: what f gives for a key depends on the
scores of the two keys on either side. A key that the query does not see counts as zero before each of the two, so
nothing of the future enters, and a part of the queries or a cache gives what the whole gives.

    dape_v2_kerple, dape_v2_alibi, dape_v2_fire, dape_v2 (no bias)

Legend: b batch, h heads, c queries, l keys, w hidden units, i inputs per pair.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from kerple.positional.alibi import Alibi
from kerple.positional.dape import VARIANTS, Adaptive
from kerple.positional.fire import Fire
from kerple.positional.kerple import KerpleLog
from kerple.positional.registry import register

KEYS = 3  # of one convolution


class Convolved(Adaptive):
    """Version 2: f sees the pairs of one query with neighbouring keys."""

    def layers(self, inputs: int, width: int, outputs: int) -> tuple[nn.Module, nn.Module]:
        return nn.Conv2d(inputs, width, (1, KEYS)), nn.Conv2d(width, outputs, (1, KEYS))

    def apply_layer(self, layer: nn.Module, weight: Tensor, states: Tensor) -> Tensor:
        return F.conv2d(states, weight, padding=(0, KEYS // 2))

    def visible(self, states: Tensor, mask: Tensor) -> Tensor:
        return states.masked_fill(mask, 0.0)


@register("dape_v2")
class DapeV2(Convolved):
    """A + f(A), without a static bias."""

    def __init__(self, num_heads: int, mlp_width: int = 32):
        super().__init__(num_heads, mlp_width, VARIANTS[0], None)


@register("dape_v2_kerple")
class DapeV2Kerple(Convolved):
    """On KERPLE's logarithmic kernel, with p and a per layer."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0]):
        super().__init__(num_heads, mlp_width, variant, KerpleLog(num_heads))


@register("dape_v2_alibi")
class DapeV2Alibi(Convolved):
    """On ALiBi."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0]):
        super().__init__(num_heads, mlp_width, variant, Alibi(num_heads))


@register("dape_v2_fire")
class DapeV2Fire(Convolved):
    """On FIRE, whose threshold is an option here too."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0], threshold: float = 512.0):
        super().__init__(num_heads, mlp_width, variant, Fire(num_heads, threshold=threshold))
