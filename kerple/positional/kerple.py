"""KERPLE: relative positions by conditionally positive definite kernels of the distance (arXiv 2205.09921).

With distance δ = m - n >= 0 and, per head, the scalars that training learns:

    kerple_log           bias -p log(1 + a δ)             a, p > 0                 logarithmic
    kerple_log3          bias -r1 log(1 + r2 δ^r3)        r1, r2 > 0, 0 < r3 <= 2  3-para-log
    kerple_power_ap_     bias -a δ^p                      a > 0, 0 < p <= 2        power
    kerple_gaussian      bias r1 exp(-r2 δ^2)             r1, r2 > 0               2-para-bias (appendix A.3)
    kerple_gaussian3     bias r1 exp(-r2 δ^r3)            r1, r2 > 0, 0 < r3 <= 2  3-para-bias (A.3)
    kerple_square__a     weight exp(-r1 δ^2)              r1 > 0                   1-para-wht (A.3)
    kerple_power__ap     weight exp(-a δ^p)               a > 0, 0 < p <= 2        2-para-wht (A.3)
    kerple_power_ap_ap   power bias and 2-para-wht, with parameters of their own   bias+wht
    kerple               bias and weight as expressions: any sum of the kernels of `kernels.py`

The bias is added to the scores after their division by sqrt(d), as the authors' code has it; equation 1 of the paper
adds it before. Parameter names, shapes and initial distributions are those of the authors' checkpoints where these have
the method.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from kerple.positional.base import PositionalMethod, TableJacobian, bounded, draw
from kerple.positional.kernels import HIGHEST_EXPONENT, KERNELS, LOWEST, Scalar, Term, parse_sum
from kerple.positional.registry import register

SHARING = ("shared", "per-layer")


class Kerple(PositionalMethod):
    """Sums of kernels as bias and as logarithm of the weight, with scalars per head, each a parameter `[h, 1, 1]`.

    `bias_terms` and `weight_terms` map what the names of a term's parameters begin with to the term.

    parameters: "shared", one set for all layers as in the paper, or "per-layer". highest_exponent: the bound of the
    exponents, at most 2, beyond which the kernels are not CPD. Raises ValueError for options outside of these.
    """

    bias_terms: ClassVar[dict[str, Term]] = {}
    weight_terms: ClassVar[dict[str, Term]] = {}

    def __init__(self, num_heads: int, parameters: str = "shared", highest_exponent: float | None = None):
        super().__init__()
        if parameters not in SHARING:
            raise ValueError(f"parameters {parameters!r} must be one of {', '.join(SHARING)}")
        self.shared = parameters == "shared"
        self.scalars: dict[str, Scalar] = {
            prefix + name: scalar
            for prefix, term in (*self.bias_terms.items(), *self.weight_terms.items())
            for name, scalar in KERNELS[term.kernel].scalars.items()
        }
        self.highest_exponent = self._exponents_end(highest_exponent)
        for name in self.scalars:
            self.register_parameter(name, nn.Parameter(torch.empty(num_heads, 1, 1)))
        self.reset_parameters()

    def _exponents_end(self, asked: float | None) -> float:
        if asked is None:
            return HIGHEST_EXPONENT
        if not any(scalar.exponent for scalar in self.scalars.values()):
            raise ValueError(f"highest_exponent {asked}: no kernel of this method has an exponent; remove the option")
        if not LOWEST <= asked <= HIGHEST_EXPONENT:
            raise ValueError(
                f"highest_exponent {asked} is not in {LOWEST} ... {HIGHEST_EXPONENT:g}: with an exponent above "
                f"{HIGHEST_EXPONENT:g} the kernel is not conditionally positive definite"
            )
        return float(asked)

    @property
    def has_bias(self) -> bool:
        return bool(self.bias_terms)

    @property
    def has_weight(self) -> bool:
        return bool(self.weight_terms)

    def bias(self, distance: Tensor) -> Tensor:
        """The sum of the terms; zero where there is none."""
        return self._sum(self.bias_terms, distance, self.scalar)

    def weight(self, distance: Tensor) -> Tensor:
        """The exponential of the sum of the terms; one where there is none."""
        return torch.exp(self._sum(self.weight_terms, distance, self.scalar))

    def bias_jacobian(self, distance: Tensor) -> TableJacobian | None:
        return self._jacobian(self.bias_terms, distance, lambda total: total)

    def weight_jacobian(self, distance: Tensor) -> TableJacobian | None:
        return self._jacobian(self.weight_terms, distance, torch.exp)

    def _sum(self, terms: dict[str, Term], distance: Tensor, scalar: Callable[[str], Tensor]) -> Tensor:
        """`scalar` gives the values `[h]` of a name."""
        distance = distance.float()
        if not terms:
            heads = max((len(parameter) for parameter in self.parameters()), default=1)
            return distance.new_zeros(heads, *distance.shape)
        total: Tensor | None = None
        for prefix, (name, factor) in terms.items():
            kernel = KERNELS[name]
            values = (scalar(prefix + each).reshape(-1, *[1] * distance.dim()) for each in kernel.scalars)
            value = kernel.value(distance, *values)
            value = value if factor == 1.0 else factor * value
            total = value if total is None else total + value
        return total

    def _jacobian(
        self, terms: dict[str, Term], distance: Tensor, outer: Callable[[Tensor], Tensor]
    ) -> TableJacobian | None:
        names = [prefix + each for prefix, term in terms.items() for each in KERNELS[term.kernel].scalars]
        if not names:
            return None
        coefficients = torch.stack([self.scalar(name) for name in names], dim=1)

        def table(values: Tensor) -> Tensor:
            of = dict(zip(names, values.unbind(1), strict=True))
            return outer(self._sum(terms, distance, of.__getitem__))

        held = coefficients.detach()
        each = torch.eye(len(names), dtype=held.dtype, device=held.device)
        # A head's row of the table depends on that head's scalars alone, so one derivative along all heads' is enough.
        directions = [torch.func.jvp(table, (held,), (one.expand_as(held),))[1] for one in each]
        return TableJacobian(coefficients, torch.stack(directions, dim=1))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for name, scalar in self.scalars.items():
            below = min(scalar.drawn_below, self.highest_exponent) if scalar.exponent else scalar.drawn_below
            draw(getattr(self, name), "uniform", 0.0, below, generator)

    def statistics(self) -> dict[str, Tensor]:
        return {name: self.scalar(name).detach() for name in self.scalars}

    def scalar(self, name: str) -> Tensor:
        """A parameter as used: float32, within its bounds, `[h]`."""
        high = self.highest_exponent if self.scalars[name].exponent else None
        return bounded(getattr(self, name), LOWEST, high).flatten()


@register("kerple_log")
class KerpleLog(Kerple):
    """Bias -p log(1 + a δ)."""

    bias_terms: ClassVar = {"bias_": Term("log")}


@register("kerple_log3", "kerple_3_para_log")
class KerpleLog3(Kerple):
    """Bias -r1 log(1 + r2 δ^r3)."""

    bias_terms: ClassVar = {"bias_": Term("log3")}


@register("kerple_power_ap_", "kerple_power")
class KerplePower(Kerple):
    """Bias -a δ^p."""

    bias_terms: ClassVar = {"bias_": Term("power")}


@register("kerple_gaussian", "kerple_2_para_bias")
class KerpleGaussian(Kerple):
    """Bias r1 exp(-r2 δ^2)."""

    bias_terms: ClassVar = {"bias_": Term("gaussian")}


@register("kerple_gaussian3", "kerple_3_para_bias")
class KerpleGaussian3(Kerple):
    """Bias r1 exp(-r2 δ^r3)."""

    bias_terms: ClassVar = {"bias_": Term("gaussian3")}


@register("kerple_square__a", "kerple_1_para_wht")
class KerpleSquareWeight(Kerple):
    """Weight exp(-r1 δ^2)."""

    weight_terms: ClassVar = {"wei_": Term("square")}


@register("kerple_power__ap", "kerple_2_para_wht")
class KerpleWeight(Kerple):
    """Weight exp(-a δ^p)."""

    weight_terms: ClassVar = {"wei_": Term("power")}


@register("kerple_power_ap_ap", "kerple_bias_wht")
class KerpleBiasWeight(Kerple):
    """Bias -a δ^p and weight exp(-a' δ^p')."""

    bias_terms: ClassVar = {"bias_": Term("power")}
    weight_terms: ClassVar = {"wei_": Term("power")}


@register("kerple")
class KerpleSum(Kerple):
    """Bias a sum of kernels, weight the exponential of another: expressions such as "log + 0.5 power".

    Each term has parameters of its own, `bias_1_log_p`, `bias_1_log_a`, `bias_2_power_a` ... `wei_1_power_a` ...
    Raises ValueError for an expression that is none, and where bias and weight are both None.
    """

    def __init__(
        self,
        num_heads: int,
        bias: str | None = "log + power",
        weight: str | None = None,
        parameters: str = "shared",
        highest_exponent: float | None = None,
    ):
        if bias is None and weight is None:
            raise ValueError("kerple needs an expression: give the option bias, or weight, or both")
        self.bias_terms = _numbered("bias", bias)
        self.weight_terms = _numbered("wei", weight)
        super().__init__(num_heads, parameters, highest_exponent)


def _numbered(prefix: str, expression: str | None) -> dict[str, Term]:
    terms = () if expression is None else parse_sum(expression)
    return {f"{prefix}_{number}_{term.kernel}_": term for number, term in enumerate(terms, start=1)}
