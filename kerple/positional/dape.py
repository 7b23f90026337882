"""DAPE: a small MLP across the heads adapts the bias to the scores (arXiv 2405.14722), in two
versions.

With the scaled scores A = q.k / sqrt(d), a static bias B, and an MLP f that maps the heads' values
of one query-key pair to one number per head:

    Concat_Residual   A + B + f(A, B)     the default
    Concat            A + f(A, B)
    Add_Residual      A + B + f(A + B)

f(x) = W2 LeakyReLU(W1 x + b1) + b2 has `mlp_width` hidden units and its own weights in every layer
(1,196 at 12 heads). The static bias and its parameters are per layer too.

    dape_kerple (kerple_c)   B = -p log(1 + a δ)
    dape_alibi (alibi_c)     B = -s_h δ
    dape_fire (fire_c)       B = FIRE's bias, with LeakyReLU instead of ReLU, and `mlp_width` hidden
                             units too
    dape (nope_c)            no bias: A + f(A)
    dape_rotary (rope_dapev1)    the same, with rotary queries and keys

In version 2, the two layers of f are convolutions along the keys. The option `kernel_size` k is
their width: 3 by default, any odd number in general. f's value for a key depends on the scores of
the k - 1 keys on either side.

    dape_v2_kerple (kerple_dapev2)    arXiv 2410.04798
    dape_v2_alibi (alibi_dapev2)      arXiv 2410.04798
    dape_v2_fire (fire_dapev2)        arXiv 2410.04798
    dape_v2                           arXiv 2410.04798
    dape_v2_rotary (rope_dapev2)      arXiv 2410.04798

The scores of masked keys are set to zero before the first convolution, so no information from the
future enters. The hidden units of the k // 2 keys after the query do enter the second convolution:
they contain only scores of visible keys. Hidden units before the first visible key are zero, so
attention to a window equals attention to a text that starts there.

The authors' code (https://github.com/chuanyang-Zheng/DAPE), whose formulas, fixtures and names of
configurations (in parentheses) are used here, has no hidden units after the last key of a sequence,
so the scores of the last k // 2 queries change when the text continues. `modify_scores` computes
the same if it gets all keys of a sequence. Attention calls it through `final_scores`, which adds
the missing keys, so results are the same in chunks, with a KV cache, and for any length.

Legend: b batch, h heads, c queries, l keys, n distances, w hidden units, i inputs per pair.
"""

from abc import abstractmethod
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.positional.alibi import Alibi
from kerple.positional.base import Chunk, MLPLayer, PositionalMethod, ScoreModifier
from kerple.positional.fire import Fire
from kerple.positional.functional import (
    by_pair,
    cast_together,
    check_heads,
    check_num_heads,
    consecutive,
    positions_on,
)
from kerple.positional.kerple import KerpleLog
from kerple.positional.registry import register
from kerple.positional.rotary import Rotary, Rotation

VARIANTS = ("Concat_Residual", "Concat", "Add_Residual")
NEGATIVE_SLOPE = 0.01  # of LeakyReLU


class Adaptive(ScoreModifier):
    """Base class of both versions of DAPE: combines the scores, an optional static bias and the
    output of f.

    The layers of f are called `first` and `second`. kernel: the size of their kernels, if they are
    convolutions.
    """

    causal_only = False

    def __init__(
        self,
        num_heads: int,
        mlp_width: int,
        variant: str,
        static: PositionalMethod | None,
        *kernel: int,
    ):
        super().__init__()
        if variant not in VARIANTS:
            raise ValueError(
                f"DAPE has no variant {variant!r}; choose one of {', '.join(VARIANTS)}"
            )
        if mlp_width < 1:
            raise ValueError(f"mlp_width {mlp_width}: DAPE's MLP needs at least one hidden unit")
        check_num_heads(num_heads)
        self.num_heads = num_heads
        self.variant = variant
        self.static = static
        # The MLP, and what it reads for each pair: the scores, or scores and biases.
        inputs = num_heads
        if static is not None and variant != "Add_Residual":
            inputs = 2 * num_heads
        self.first = MLPLayer(inputs, mlp_width, *kernel)
        self.second = MLPLayer(mlp_width, num_heads, *kernel)
        self.reset_parameters()

    @abstractmethod
    def apply_weight(self, weight: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        """Apply the weight of a layer, or a part of it, to states `[..., i, c, l]`, without its
        bias.

        mask: bool `[c, l]`, True for pairs whose states must not influence other pairs.
        """

    def hidden_mask(self, mask: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """The mask `[c, l]` for the hidden units."""
        return mask

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        if self.static is not None:
            self.static.reset_parameters(generator)
        self.first.reset_parameters(generator)
        self.second.reset_parameters(generator)

    def table(self, distance: Tensor) -> Tensor | None:
        """The static bias over distance, `[h, n]`; None if there is none, or if it is not a
        function of distance.
        """
        if self.static is None or "bias" not in self.static.hooks:
            return None
        return self.static.bias(distance)

    def mapped_table(self, distance: Tensor) -> Tensor | None:
        if isinstance(self.static, Fire):
            return self.static.mapped_table(distance)
        return self.table(distance)

    def modify_scores(self, chunk: Chunk) -> Tensor:
        check_heads(chunk.scores, self.num_heads, "DAPE")
        positions = chunk.query_positions, chunk.key_positions
        # Keys after the query have the same distances as keys before it, and are not hidden.
        after = chunk.table
        hidden_mask = chunk.mask
        if chunk.causal:
            after = None
            hidden_mask = self.hidden_mask(chunk.mask, *positions)
        bias = None
        # FIRE's bias also depends on the query's position, so it is computed for each pair.
        if isinstance(self.static, Fire):
            bias = self.static.pair_bias(*positions, chunk.scores, chunk.table, chunk.causal)
        elif chunk.table is not None:
            bias = by_pair(chunk.table, *positions, after).to(chunk.scores.dtype)  # [h, c, l]
        return self.adapt(chunk.scores, bias, (chunk.mask, hidden_mask))

    def adapt(self, scores: Tensor, bias: Tensor | None, masks: tuple[Tensor, Tensor]) -> Tensor:
        """The final scores for scores `[b, h, c, l]` and a static bias `[h, c, l]`. masks: see
        `apply_weight`, for each layer.
        """
        # One input per head, or two.
        if bias is not None and self.variant == "Add_Residual":
            scores = scores + bias
            bias = None

        # The parameters of both layers; their biases are columns [w, 1, 1] and [h, 1, 1].
        parameters = *self.first.weight_and_bias(), *self.second.weight_and_bias()
        weight_1, offset_1, weight_2, offset_2 = cast_together(parameters, scores.dtype)
        offset_1 = offset_1[:, None, None]
        offset_2 = offset_2[:, None, None]
        if bias is not None:
            # The bias is multiplied by its own columns of the weight, so it is not repeated along
            # the batch.
            weight_1, of_bias = weight_1.split([scores.shape[-3], bias.shape[-3]], dim=1)
            offset_1 = self.apply_weight(of_bias, bias, masks[0]) + offset_1
            if self.variant == "Concat_Residual":
                offset_2 = bias + offset_2
        # In place, because the hidden units are the largest tensors. In-place operations on a view
        # would copy them.
        hidden = self.apply_weight(weight_1, scores, masks[0]) + offset_1  # [b, w, c, l]
        hidden = F.leaky_relu_(hidden, NEGATIVE_SLOPE)
        return (self.apply_weight(weight_2, hidden, masks[1]) + scores).add_(offset_2)

    def statistics(self) -> dict[str, Tensor]:
        if self.static is None:
            return {}
        return self.static.statistics()


# -- version 1 -------------------------------------------------------------------------------------


class DapePerPair(Adaptive):
    """Version 1: f processes each query-key pair on its own."""

    per_pair = True

    def apply_weight(self, weight: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        # Scores [b, i, c, l], or the static bias [i, c, l].
        if states.dim() == 4:
            # `@` would copy the states to merge the batch into one product.
            products = torch.bmm(weight.expand(len(states), -1, -1), states.flatten(2))
        else:
            products = weight @ states.flatten(1)
        return products.view(*products.shape[:-1], *states.shape[-2:])


@register("dape", "nope_c")
class Dape(DapePerPair):
    """A + f(A), without a static bias."""

    def __init__(self, num_heads: int, mlp_width: int = 32):
        super().__init__(num_heads, mlp_width, VARIANTS[0], None)


@register("dape_kerple", "kerple_c")
class DapeKerple(DapePerPair):
    """With KERPLE's logarithmic kernel, whose p and a are per layer here."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0]):
        super().__init__(num_heads, mlp_width, variant, KerpleLog(num_heads))


@register("dape_alibi", "alibi_c")
class DapeAlibi(DapePerPair):
    """With ALiBi's bias."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0]):
        super().__init__(num_heads, mlp_width, variant, Alibi(num_heads))


class LeakyFire(Fire):
    """FIRE with LeakyReLU, as in the authors' modules that combine it with DAPE."""

    activation = staticmethod(partial(F.leaky_relu, negative_slope=NEGATIVE_SLOPE))


@register("dape_fire", "fire_c")
class DapeFire(DapePerPair):
    """With FIRE's bias, and its option `threshold`. `mlp_width` is the width of both MLPs."""

    counts_from_start = True

    def __init__(
        self,
        num_heads: int,
        mlp_width: int = 32,
        variant: str = VARIANTS[0],
        threshold: float = 512.0,
    ):
        super().__init__(num_heads, mlp_width, variant, LeakyFire(num_heads, mlp_width, threshold))


@register("dape_rotary", "rope_dapev1")
class DapeRotary(Rotation, DapePerPair):
    """A + f(A) without a static bias, where A are the scores of rotary queries and keys.

    Options `fraction` and `base`: see `Rotary`.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        mlp_width: int = 32,
        fraction: float = 1.0,
        base: float = 10_000.0,
    ):
        super().__init__(num_heads, mlp_width, VARIANTS[0], None)
        self.angles = Rotary(head_size, fraction=fraction, base=base).angles


# -- version 2 -------------------------------------------------------------------------------------


class DapeConvolution(Adaptive):
    """Version 2: f processes the pairs of a query with neighboring keys together."""

    def __init__(
        self,
        num_heads: int,
        mlp_width: int,
        variant: str,
        static: PositionalMethod | None,
        kernel_size: int,
    ):
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(
                f"kernel_size {kernel_size}: DAPE's convolutions have an odd width of at least 1"
            )
        super().__init__(num_heads, mlp_width, variant, static, 1, kernel_size)
        self.lookahead = kernel_size // 2

    def apply_weight(self, weight: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        # Along the keys only: the kernel has a height of 1.
        return F.conv2d(states.masked_fill(mask, 0.0), weight, padding=(0, weight.shape[-1] // 2))

    def hidden_mask(self, mask: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        # Only masked keys before the query: with consecutive positions, those below a diagonal.
        if consecutive(query_positions) and consecutive(key_positions):
            return mask.tril(int(query_positions[0] - key_positions[0]) - 1)
        query = positions_on(query_positions, mask.device)
        key = positions_on(key_positions, mask.device)
        return mask & (key < query[:, None])


@register("dape_v2")
class DapeV2(DapeConvolution):
    """A + f(A), without a static bias."""

    def __init__(self, num_heads: int, mlp_width: int = 32, kernel_size: int = 3):
        super().__init__(num_heads, mlp_width, VARIANTS[0], None, kernel_size)


@register("dape_v2_kerple", "kerple_dapev2")
class DapeV2Kerple(DapeConvolution):
    """With KERPLE's logarithmic kernel, whose p and a are per layer here."""

    def __init__(
        self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0], kernel_size: int = 3
    ):
        super().__init__(num_heads, mlp_width, variant, KerpleLog(num_heads), kernel_size)


@register("dape_v2_alibi", "alibi_dapev2")
class DapeV2Alibi(DapeConvolution):
    """With ALiBi's bias."""

    def __init__(
        self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0], kernel_size: int = 3
    ):
        super().__init__(num_heads, mlp_width, variant, Alibi(num_heads), kernel_size)


@register("dape_v2_fire", "fire_dapev2")
class DapeV2Fire(DapeConvolution):
    """With FIRE's bias and its option `threshold`. `mlp_width` is the width of both MLPs."""

    counts_from_start = True

    def __init__(
        self,
        num_heads: int,
        mlp_width: int = 32,
        variant: str = VARIANTS[0],
        threshold: float = 512.0,
        kernel_size: int = 3,
    ):
        super().__init__(
            num_heads, mlp_width, variant, LeakyFire(num_heads, mlp_width, threshold), kernel_size
        )


@register("dape_v2_rotary", "rope_dapev2")
class DapeV2Rotary(Rotation, DapeConvolution):
    """A + f(A) without a static bias, where A are the scores of rotary queries and keys.

    Options `fraction` and `base`: see `Rotary`. The authors' module has twice as many input
    channels as it gets.
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
