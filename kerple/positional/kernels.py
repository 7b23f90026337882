"""Conditionally positive definite (CPD) kernels of the distance, as in KERPLE (arXiv 2205.09921).

With distance δ >= 0 and learned scalars, all positive:

    log        -p log(1 + a δ)
    log3       -r1 log(1 + r2 δ^r3)      r3 <= 2
    power      -a δ^p                    p <= 2
    square     -r1 δ^2
    gaussian    r1 exp(-r2 δ^2)
    gaussian3   r1 exp(-r2 δ^r3)         r3 <= 2

The first four are CPD (Corollary 1 and Fact 2 of the paper). The last two are positive definite,
hence CPD (Schoenberg). A sum of these with positive factors, such as "log + 0.5 power", is CPD, and
its exponential is positive definite. Kernels with an exponent above 2 are not CPD; `is_cpd` shows
this numerically:

    method = KerpleLog(num_heads=12)
    is_cpd(method.bias, range(100))  # bool [12]

Legend: h heads (or any leading dimensions), n points.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

MIN_SCALAR = 0.01
MAX_EXPONENT = 2.0


class Scalar(NamedTuple):
    """A learned number per head, initially drawn from U(0, `init_max`).

    Its value is bounded to [0.01, 2] if it is an exponent, and to at least 0.01 otherwise.
    """

    init_max: float
    exponent: bool = False


# The initial ranges in the authors' code, and analogous ones for kernels that it does not have.
SCALE = Scalar(1.0)
FACTOR = Scalar(2.0)
EXPONENT = Scalar(2.0, exponent=True)


class Kernel(NamedTuple):
    """`value(distance, *scalars)` is elementwise, in the precision of its arguments."""

    scalars: dict[str, Scalar]
    value: Callable[..., Tensor]


KERNELS = {
    "log": Kernel({"p": FACTOR, "a": SCALE}, lambda distance, p, a: -p * torch.log1p(a * distance)),
    "log3": Kernel(
        {"r1": FACTOR, "r2": SCALE, "r3": EXPONENT},
        lambda distance, r1, r2, r3: -r1 * torch.log1p(r2 * distance.pow(r3)),
    ),
    "power": Kernel({"a": SCALE, "p": EXPONENT}, lambda distance, a, p: -a * distance.pow(p)),
    "square": Kernel({"r1": SCALE}, lambda distance, r1: -r1 * distance.square()),
    "gaussian": Kernel(
        {"r1": FACTOR, "r2": SCALE},
        lambda distance, r1, r2: r1 * torch.exp(-r2 * distance.square()),
    ),
    "gaussian3": Kernel(
        {"r1": FACTOR, "r2": SCALE, "r3": EXPONENT},
        lambda distance, r1, r2, r3: r1 * torch.exp(-r2 * distance.pow(r3)),
    ),
}


class Term(NamedTuple):
    """A term of a sum of kernels."""

    kernel: str
    factor: float = 1.0


_TERM = re.compile(r"(?:(?P<factor>[-+]?(?:\d+\.?\d*|\.\d+))\s*\*?\s*)?(?P<kernel>[A-Za-z_]\w*)")


def parse_sum(text: str) -> tuple[Term, ...]:
    """The terms of an expression such as "log + 0.5 power".

    Raises ValueError, quoting the invalid part, unless it is a sum of known kernels with positive
    factors.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"kernel expression {text!r}: must be a sum of kernels such as 'log + power'"
        )
    terms = []
    for part in text.split("+"):
        # An optional factor, and the name of a kernel.
        match = _TERM.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"kernel expression {text!r}: {part.strip()!r} is not one of {', '.join(KERNELS)}, "
                "optionally after a positive factor. Exponents and other scalars are learned. "
                "Differences and products of kernels are not conditionally positive definite; to "
                "multiply the scores by a kernel, use the option weight"
            )
        name = match["kernel"]
        factor = float(match["factor"] or 1.0)
        if name not in KERNELS:
            similar = difflib.get_close_matches(name, KERNELS, n=3) or KERNELS
            raise ValueError(
                f"kernel expression {text!r}: kernel {name!r} is unknown; did you mean "
                f"{', '.join(similar)}?"
            )
        if factor <= 0:
            raise ValueError(
                f"kernel expression {text!r}: {factor:g} {name} is not conditionally positive "
                "definite; factors must be positive"
            )
        terms.append(Term(name, factor))
    return tuple(terms)


# A kernel k is CPD on points x_1 ... x_n if sum_ij v_i v_j k(|x_i - x_j|) >= 0 for all v with sum
# 0. Adding a large enough constant then makes it positive definite (Lemma 1 of the paper), and the
# softmax cancels that constant.

DistanceKernel = Callable[[Tensor], Tensor]


@torch.no_grad()
def is_cpd(kernel: DistanceKernel, points: Iterable[float]) -> Tensor:
    """For each head, whether the kernel is CPD on the points, up to the rounding of the kernel's
    values: bool `[h]`.

    kernel: float64 distances `[n, n]` -> `[h, n, n]` or `[n, n]`, such as a method's `bias`. Raises
    ValueError for fewer than two points, duplicate points, and values that are not finite.
    """
    # The Gram matrix of the points, and its rounding.
    x = torch.as_tensor([float(point) for point in points], dtype=torch.float64)
    if len(x) < 2 or len(x.unique()) < len(x):
        raise ValueError(f"at least two points are needed, all different; got {len(x)}")
    values = kernel((x[:, None] - x).abs())
    if not torch.isfinite(values).all():
        raise ValueError("the kernel is not finite at the distances of these points")
    gram = values.double().cpu()
    rounding = len(x) * torch.finfo(values.dtype).eps * gram.abs().amax(dim=(-2, -1))

    # In an orthonormal basis whose first vector is constant, the other vectors span the v with sum
    # 0.
    vectors = torch.eye(len(x), dtype=torch.float64)
    vectors[:, 0] = 1.0
    basis: Tensor = torch.linalg.qr(vectors).Q[:, 1:]
    eigenvalues: Tensor = torch.linalg.eigvalsh(basis.T @ gram @ basis)
    return eigenvalues[..., 0] >= -rounding
