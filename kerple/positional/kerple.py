"""KERPLE: relative positions by conditionally positive definite kernels of the distance (arXiv
2205.09921).

With distance δ = m - n >= 0 and scalars learned per head:

    kerple_log           bias -p log(1 + a δ)             a, p > 0                 logarithmic
    kerple_log3          bias -r1 log(1 + r2 δ^r3)        r1, r2 > 0, 0 < r3 <= 2  3-para-log
    kerple_power_ap_     bias -a δ^p                      a > 0, 0 < p <= 2        power
    kerple_gaussian      bias r1 exp(-r2 δ^2)             r1, r2 > 0               2-para-bias (A.3)
    kerple_gaussian3     bias r1 exp(-r2 δ^r3)            r1, r2 > 0, 0 < r3 <= 2  3-para-bias (A.3)
    kerple_square__a     weight exp(-r1 δ^2)              r1 > 0                   1-para-wht (A.3)
    kerple_power__ap     weight exp(-a δ^p)               a > 0, 0 < p <= 2        2-para-wht (A.3)
    kerple_power_ap_ap   power bias and 2-para-wht, each with its own parameters   bias+wht
    kerple_log_rotary    bias of kerple_log, on the scores of rotary queries and keys
    kerple               bias and weight as expressions: any sum of the kernels in `kernels.py`

The bias is added after dividing the scores by sqrt(d), as in the authors' code; equation 1 of the
paper adds it before. Parameter names, shapes and initial distributions are those of the authors'
checkpoints, for the methods they have.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kerple.positional.base import Bias, TableJacobian, bounded, draw
from kerple.positional.functional import check_num_heads
from kerple.positional.kernels import KERNELS, MAX_EXPONENT, MIN_SCALAR, Scalar, Term, parse_sum
from kerple.positional.modules import project
from kerple.positional.registry import register
from kerple.positional.rotary import Rotary, Rotation

SHARING = ("shared", "per-layer")

Terms = tuple[tuple[str, Term], ...]


class Kerple(Bias):
    """Sums of kernels as bias and as logarithm of the weight. Each scalar is a parameter
    `[h, 1, 1]`.

    `bias_terms` and `weight_terms` are pairs of a prefix of parameter names and a term of the sum.

    parameters: "shared", one set for all layers as in the paper, or "per-layer". highest_exponent:
    the upper bound of exponents, at most 2, above which kernels are not CPD. Raises ValueError for
    other values.
    """

    # The methods at the end of this file set these.
    bias_terms: Terms = ()
    weight_terms: Terms = ()

    def __init__(
        self, num_heads: int, parameters: str = "shared", highest_exponent: float | None = None
    ):
        super().__init__()
        if parameters not in SHARING:
            raise ValueError(f"parameters {parameters!r} must be one of {', '.join(SHARING)}")
        self.shared = parameters == "shared"
        # This class defines both hooks; attention asks for those that have a term.
        if not self.bias_terms:
            self.hooks -= {"bias"}
        if not self.weight_terms:
            self.hooks -= {"weight"}
        check_num_heads(num_heads)
        self.num_heads = num_heads

        # The scalars of all terms, by the name of their parameter.
        self.scalars: dict[str, Scalar] = {}
        for prefix, term in (*self.bias_terms, *self.weight_terms):
            for name, scalar in KERNELS[term.kernel].scalars.items():
                self.scalars[prefix + name] = scalar
        # The bound of exponents: an option without an effect is an error.
        has_exponent = any(scalar.exponent for scalar in self.scalars.values())
        if highest_exponent is not None and not has_exponent:
            raise ValueError(
                f"highest_exponent {highest_exponent}: no kernel of this method has an exponent; "
                "remove the option"
            )
        if highest_exponent is None:
            highest_exponent = MAX_EXPONENT
        if not MIN_SCALAR <= highest_exponent <= MAX_EXPONENT:
            raise ValueError(
                f"highest_exponent {highest_exponent} is not in {MIN_SCALAR} ... {MAX_EXPONENT:g}; "
                f"kernels with an exponent above {MAX_EXPONENT:g} are not conditionally positive "
                "definite"
            )
        self.highest_exponent = float(highest_exponent)

        # A parameter per scalar, of the shape in the authors' checkpoints.
        for name in self.scalars:
            self.register_parameter(name, nn.Parameter(torch.empty(num_heads, 1, 1)))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        # Uniform from 0, as in the authors' code, but no exponent starts above its bound.
        for name, scalar in self.scalars.items():
            high = scalar.init_max
            if scalar.exponent:
                high = min(high, self.highest_exponent)
            draw(self.get_parameter(name), "uniform", 0.0, high, generator)
        # Draws below the lower bound are raised to it.
        project(self)

    def bounds(self) -> dict[str, tuple[float, float | None]]:
        return {name: (MIN_SCALAR, self._highest(name)) for name in self.scalars}

    def _highest(self, name: str) -> float | None:
        """The upper bound of a scalar, if it has one."""
        if self.scalars[name].exponent:
            return self.highest_exponent
        return None

    # -- the hooks and their derivatives -----------------------------------------------------------

    def bias(self, distance: Tensor) -> Tensor:
        """The sum of the bias terms; zero if there are none."""
        return self._sum(self.bias_terms, distance, self.scalar)

    def weight(self, distance: Tensor) -> Tensor:
        """The exponential of the sum of the weight terms; one if there are none."""
        return torch.exp(self._sum(self.weight_terms, distance, self.scalar))

    def bias_jacobian(self, distance: Tensor) -> TableJacobian | None:
        return self._jacobian(self.bias_terms, distance, lambda total: total)

    def weight_jacobian(self, distance: Tensor) -> TableJacobian | None:
        return self._jacobian(self.weight_terms, distance, torch.exp)

    # -- the scalars -------------------------------------------------------------------------------

    def scalar(self, name: str) -> Tensor:
        """A parameter clamped to its bounds: float32 `[h]`."""
        parameter: Tensor = getattr(self, name)
        return bounded(parameter, MIN_SCALAR, self._highest(name)).flatten()

    def statistics(self) -> dict[str, Tensor]:
        return {name: self.scalar(name).detach() for name in self.scalars}

    # -- sums of kernels ---------------------------------------------------------------------------

    def _sum(self, terms: Terms, distance: Tensor, scalar: Callable[[str], Tensor]) -> Tensor:
        """The sum of the terms, `[h, *distance.shape]`; `scalar` maps a parameter's name to its
        values `[h]`.
        """
        # Each term: its kernel at all distances, times its factor.
        distance = distance.float()
        values = []
        for prefix, (kernel_name, factor) in terms:
            # The scalars are columns [h, 1, ...], so each head has a row of values.
            kernel = KERNELS[kernel_name]
            columns = []
            for name in kernel.scalars:
                columns.append(scalar(prefix + name).reshape(-1, *[1] * distance.dim()))
            value = kernel.value(distance, *columns)  # [h, *distance.shape]
            if factor != 1.0:
                value = factor * value
            values.append(value)

        # The terms in their order, because sums of floating-point numbers depend on it.
        if not values:
            return distance.new_zeros(self.num_heads, *distance.shape)
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total

    def _jacobian(
        self, terms: Terms, distance: Tensor, outer: Callable[[Tensor], Tensor]
    ) -> TableJacobian | None:
        """The derivatives of outer(sum of the terms) with respect to the scalars."""
        # The scalars of all terms are the coefficients.
        names = [prefix + name for prefix, term in terms for name in KERNELS[term.kernel].scalars]
        if not names:
            return None
        coefficients = torch.stack([self.scalar(name) for name in names], dim=1)  # [h, p]

        # The table [h, n] as a function of the coefficients alone.
        def table(values: Tensor) -> Tensor:
            columns = dict(zip(names, values.unbind(1), strict=True))
            return outer(self._sum(terms, distance, columns.__getitem__))

        # A derivative per coefficient, in forward mode.
        values = coefficients.detach()
        tangents = torch.eye(len(names), dtype=values.dtype, device=values.device)
        # A head's row of the table depends only on that head's scalars, so one tangent serves all
        # heads.
        directions = []
        for tangent in tangents:
            derivatives = torch.func.jvp(table, (values,), (tangent.expand_as(values),))
            directions.append(derivatives[1])  # [h, n]
        return TableJacobian(coefficients, torch.stack(directions, dim=1))


# -- the methods of the paper, with one or two terms -----------------------------------------------


@register("kerple_log")
class KerpleLog(Kerple):
    """Bias -p log(1 + a δ)."""

    bias_terms = (("bias_", Term("log")),)


@register("kerple_log3", "kerple_3_para_log")
class KerpleLog3(Kerple):
    """Bias -r1 log(1 + r2 δ^r3)."""

    bias_terms = (("bias_", Term("log3")),)


@register("kerple_power_ap_", "kerple_power")
class KerplePower(Kerple):
    """Bias -a δ^p."""

    bias_terms = (("bias_", Term("power")),)


@register("kerple_gaussian", "kerple_2_para_bias")
class KerpleGaussian(Kerple):
    """Bias r1 exp(-r2 δ^2)."""

    bias_terms = (("bias_", Term("gaussian")),)


@register("kerple_gaussian3", "kerple_3_para_bias")
class KerpleGaussian3(Kerple):
    """Bias r1 exp(-r2 δ^r3)."""

    bias_terms = (("bias_", Term("gaussian3")),)


@register("kerple_square__a", "kerple_1_para_wht")
class KerpleSquareWeight(Kerple):
    """Weight exp(-r1 δ^2)."""

    weight_terms = (("wei_", Term("square")),)


@register("kerple_power__ap", "kerple_2_para_wht")
class KerpleWeight(Kerple):
    """Weight exp(-a δ^p)."""

    weight_terms = (("wei_", Term("power")),)


@register("kerple_power_ap_ap", "kerple_bias_wht")
class KerpleBiasWeight(Kerple):
    """Bias -a δ^p and weight exp(-a' δ^p')."""

    bias_terms = (("bias_", Term("power")),)
    weight_terms = (("wei_", Term("power")),)


# -- any sum of kernels ----------------------------------------------------------------------------


@register("kerple")
class KerpleSum(Kerple):
    """Bias: a sum of kernels; weight: the exponential of another. Both are expressions such as "log
    + 0.5 power".

    Each term has its own parameters: `bias_1_log_p`, `bias_1_log_a`, `bias_2_power_a` ...
    `wei_1_power_a` ... Raises ValueError for an invalid expression, and if both are None.
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
            raise ValueError("kerple needs an expression: set the option bias, or weight, or both")
        self.bias_terms = _numbered("bias", bias)
        self.weight_terms = _numbered("wei", weight)
        # The base class makes parameters of the terms, so these come first.
        super().__init__(num_heads, parameters, highest_exponent)


def _numbered(prefix: str, expression: str | None) -> Terms:
    """The terms of an expression, with a prefix that contains their number."""
    if expression is None:
        return ()
    terms = []
    for number, term in enumerate(parse_sum(expression), start=1):
        terms.append((f"{prefix}_{number}_{term.kernel}_", term))
    return tuple(terms)


# -- with rotary queries and keys ------------------------------------------------------------------


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
        # `Rotary` checks head size and fraction, and is not kept: angles have no parameters.
        self.angles = Rotary(head_size, fraction=fraction, base=base).angles
