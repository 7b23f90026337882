"""DAPE V2: the bias adapts to the scores of neighboring keys too (arXiv 2410.04798).

Like `dape.py`, but the two layers of f are convolutions along the keys. The option `kernel_size` k is their width: 3 by
default, any odd number in general. f's value for a key depends on the scores of the k - 1 keys on either side.

The scores of masked keys are set to zero before the first convolution, so no information from the future enters. The
hidden units of the k // 2 keys after the query do enter the second convolution: they contain only scores of visible
keys. Hidden units before the first visible key are zero, so attention to a window equals attention to a text that
starts there.

The authors' code (see `dape.py`) has no hidden units after the last key of a sequence, so the scores of the last k // 2
queries change when the text continues. `modify_scores` computes the same if it gets all keys of a sequence. Attention
calls it through `final_scores`, which adds the missing keys, so results are the same in chunks, with a KV cache, and
for any length.

    dape_v2_kerple (kerple_dapev2), dape_v2_alibi (alibi_dapev2), dape_v2_fire (fire_dapev2),
    dape_v2 (no bias), dape_v2_rotary (no bias, rotary queries and keys; rope_dapev2)

Legend: b batch, h heads, c queries, l keys, w hidden units, i inputs per pair.
"""

import torch.nn.functional as F
from torch import Tensor

from kerple.positional.alibi import Alibi
from kerple.positional.base import PositionalMethod
from kerple.positional.dape import VARIANTS, Adaptive, LeakyFire
from kerple.positional.functional import consecutive, positions_on
from kerple.positional.kerple import KerpleLog
from kerple.positional.registry import register
from kerple.positional.rotary import Rotary, Rotation


class DapeConvolution(Adaptive):
    """Version 2: f processes the pairs of a query with neighboring keys together."""

    def __init__(self, num_heads: int, mlp_width: int, variant: str, static: PositionalMethod | None, kernel_size: int):
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size {kernel_size}: DAPE's convolutions have an odd width of at least 1")
        super().__init__(num_heads, mlp_width, variant, static, 1, kernel_size)
        self.lookahead = kernel_size // 2

    def apply_weight(self, weight: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        return F.conv2d(states.masked_fill(mask, 0.0), weight, padding=(0, weight.shape[-1] // 2))

    def hidden_mask(self, mask: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        # Only masked keys before the query: with consecutive positions, those below a diagonal.
        if consecutive(query_positions) and consecutive(key_positions):
            return mask.tril(int(query_positions[0] - key_positions[0]) - 1)
        query, key = (positions_on(positions, mask.device) for positions in (query_positions, key_positions))
        return mask & (key < query[:, None])


@register("dape_v2")
class DapeV2(DapeConvolution):
    """A + f(A), without a static bias."""

    def __init__(self, num_heads: int, mlp_width: int = 32, kernel_size: int = 3):
        super().__init__(num_heads, mlp_width, VARIANTS[0], None, kernel_size)


@register("dape_v2_kerple", "kerple_dapev2")
class DapeV2Kerple(DapeConvolution):
    """With KERPLE's logarithmic kernel, whose p and a are per layer here."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0], kernel_size: int = 3):
        super().__init__(num_heads, mlp_width, variant, KerpleLog(num_heads), kernel_size)


@register("dape_v2_alibi", "alibi_dapev2")
class DapeV2Alibi(DapeConvolution):
    """With ALiBi's bias."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0], kernel_size: int = 3):
        super().__init__(num_heads, mlp_width, variant, Alibi(num_heads), kernel_size)


@register("dape_v2_fire", "fire_dapev2")
class DapeV2Fire(DapeConvolution):
    """With FIRE's bias, and its option `threshold`. `mlp_width` is the width of f and of FIRE's MLP."""

    def __init__(
        self,
        num_heads: int,
        mlp_width: int = 32,
        variant: str = VARIANTS[0],
        threshold: float = 512.0,
        kernel_size: int = 3,
    ):
        super().__init__(num_heads, mlp_width, variant, LeakyFire(num_heads, mlp_width, threshold), kernel_size)


@register("dape_v2_rotary", "rope_dapev2")
class DapeV2Rotary(Rotation, DapeConvolution):
    """A + f(A) without a static bias, where A are the scores of rotary queries and keys.

    Options `fraction` and `base`: see `Rotary`. The authors' module has twice as many input channels as it gets.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        mlp_width: int = 32,
        kernel_size: int = 3,
        fraction: float = 1.0,
        base: float = 10_000.0,
    ):
        super().__init__(num_heads, mlp_width, VARIANTS[0], None, kernel_size)
        self.angles = Rotary(head_size, fraction=fraction, base=base).angles
