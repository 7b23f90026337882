"""DAPE: a bias that modifies_scores to the scores by a small MLP across the heads (arXiv 2405.14722).

With the scaled scores A = q.k / sqrt(d) and a static bias B, and f an MLP that takes the heads' values of one pair of
query and key and gives one number per head:

    Concat_Residual   A + B + f(A, B)     the default
    Concat            A + f(A, B)
    Add_Residual      A + B + f(A + B)

f(x) = W2 LeakyReLU(W1 x + b1) + b2 has `mlp_width` hidden units, a set of weights per layer: 1,196 of them at 12 heads.
The static bias and its parameters are per layer too.

    dape_kerple (kerple_c)   B = -p log(1 + a δ)
    dape_alibi (alibi_c)     B = -s_h δ
    dape_fire (fire_c)       B = FIRE's
    dape                     no bias: A + f(A)

The second names are those of the authors' configurations.

Legend: b batch, h heads, c queries, l keys, n distances, w hidden units, i inputs per pair.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.positional.alibi import Alibi
from kerple.positional.base import PositionalMethod, draw_layer
from kerple.positional.fire import Fire
from kerple.positional.kerple import KerpleLog
from kerple.positional.pairs import over_pairs
from kerple.positional.registry import register

VARIANTS = ("Concat_Residual", "Concat", "Add_Residual")
SLOPE = 0.01  # LeakyReLU's, below zero


class Adaptive(PositionalMethod):
    """What the two versions of DAPE have in common: a static bias or none, and how f's result joins the scores.

    The layers of f are `first` and `second`, whose parameters have PyTorch's default initialization.
    """

    shared = False

    def __init__(self, num_heads: int, mlp_width: int, variant: str, static: PositionalMethod | None):
        super().__init__()
        if variant not in VARIANTS:
            raise ValueError(f"DAPE has no variant {variant!r}; choose one of {', '.join(VARIANTS)}")
        if mlp_width < 1:
            raise ValueError(f"mlp_width {mlp_width}: DAPE's MLP needs at least one hidden unit")
        self.variant = variant
        self.static = static
        inputs = 2 * num_heads if static is not None and variant != "Add_Residual" else num_heads
        self.first, self.second = self.layers(inputs, mlp_width, num_heads)
        self.reset_parameters()

    def layers(self, inputs: int, width: int, outputs: int) -> tuple[nn.Module, nn.Module]:
        """The two layers of f, each with `weight` `[outputs, inputs, ...]` and `bias`."""
        raise NotImplementedError

    def apply_layer(self, layer: nn.Module, weight: Tensor, states: Tensor) -> Tensor:
        """The product of a layer, `weight` being (a part of) its weights, with states `[..., i, c, l]`; no bias."""
        raise NotImplementedError

    def visible(self, states: Tensor, mask: Tensor) -> Tensor:
        """States `[..., c, l]` as f's layers may see them."""
        return states

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        if self.static is not None:
            self.static.reset_parameters(generator)
        for layer in (self.first, self.second):
            draw_layer(layer, generator)

    def table(self, distance: Tensor) -> Tensor | None:
        """The static bias over distance, `[h, n]`; None where there is none, or it is not of the distance alone."""
        return self.static.bias(distance) if self.static is not None and self.static.has_bias else None

    def modify_scores(
        self,
        scores: Tensor,
        query: Tensor,
        query_positions: Tensor,
        key_positions: Tensor,
        mask: Tensor,
        table: Tensor | None,
    ) -> Tensor:
        bias = self._static_bias(scores, query_positions, key_positions, table)
        if bias is None:
            return scores + self._between_heads((scores,), mask)
        if self.variant == "Add_Residual":
            scores = scores + bias
            return scores + self._between_heads((scores,), mask)
        found = scores + self._between_heads((scores, bias), mask)
        return found if self.variant == "Concat" else found + bias

    def statistics(self) -> dict[str, Tensor]:
        return {} if self.static is None else self.static.statistics()

    def _static_bias(
        self, scores: Tensor, query_positions: Tensor, key_positions: Tensor, table: Tensor | None
    ) -> Tensor | None:
        """B of every pair, `[h, c, l]`."""
        if self.static is None:
            return None
        if table is None:
            return self.static.pair_bias(query_positions, key_positions, scores)
        return over_pairs(table, query_positions, key_positions).to(scores.dtype)

    def _between_heads(self, inputs: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        """f of inputs `[b, h, c, l]` and `[h, c, l]`, side by side on the head axis; `[b, h, c, l]`."""
        dtype = inputs[0].dtype
        weights = self.first.weight.to(dtype).split([part.shape[-3] for part in inputs], dim=1)
        # A bias without a batch goes through its part of the weights once.
        hidden = sum(
            self.apply_layer(self.first, weight, self.visible(part, mask))
            for weight, part in zip(weights, inputs, strict=True)
        )
        hidden = F.leaky_relu(hidden + self.first.bias.to(dtype)[:, None, None], SLOPE)
        mixed = self.apply_layer(self.second, self.second.weight.to(dtype), self.visible(hidden, mask))
        return mixed + self.second.bias.to(dtype)[:, None, None]


class PerPair(Adaptive):
    """Version 1: f sees one pair of query and key at a time."""

    per_pair = True

    def layers(self, inputs: int, width: int, outputs: int) -> tuple[nn.Module, nn.Module]:
        return nn.Linear(inputs, width), nn.Linear(width, outputs)

    def apply_layer(self, layer: nn.Module, weight: Tensor, states: Tensor) -> Tensor:
        return (weight @ states.flatten(-2)).unflatten(-1, states.shape[-2:])


@register("dape")
class Dape(PerPair):
    """A + f(A), without a static bias."""

    def __init__(self, num_heads: int, mlp_width: int = 32):
        super().__init__(num_heads, mlp_width, VARIANTS[0], None)


@register("dape_kerple", "kerple_c")
class DapeKerple(PerPair):
    """On KERPLE's logarithmic kernel, with p and a per layer."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0]):
        super().__init__(num_heads, mlp_width, variant, KerpleLog(num_heads))


@register("dape_alibi", "alibi_c")
class DapeAlibi(PerPair):
    """On ALiBi."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0]):
        super().__init__(num_heads, mlp_width, variant, Alibi(num_heads))


@register("dape_fire", "fire_c")
class DapeFire(PerPair):
    """On FIRE, whose threshold is an option here too."""

    def __init__(self, num_heads: int, mlp_width: int = 32, variant: str = VARIANTS[0], threshold: float = 512.0):
        super().__init__(num_heads, mlp_width, variant, Fire(num_heads, threshold=threshold))
