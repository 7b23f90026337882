"""Conditionally positive definite (CPD) kernels of the distance, and sums of them as text (arXiv 2205.09921).

With distance δ >= 0 and learned scalars, all positive:

    log        -p log(1 + a δ)
    log3       -r1 log(1 + r2 δ^r3)      r3 <= 2
    power      -a δ^p                    p <= 2
    square     -r1 δ^2
    gaussian    r1 exp(-r2 δ^2)
    gaussian3   r1 exp(-r2 δ^r3)         r3 <= 2

The first four are CPD (Corollary 1 and Fact 2 of the paper), the last two positive definite and so CPD as well
(Schoenberg). So is any sum of them with positive factors, "log + 0.5 power", and so is the exponential of such a sum,
which is positive definite. An exponent above 2 is not: `cpd.py` shows it.
"""

import difflib
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LOWEST = 0.01
HIGHEST_EXPONENT = 2.0


class Scalar(NamedTuple):
    """A learned number per head: drawn from U(0, `drawn_below`), used within [0.01, 2] for an exponent, from 0.01 on
    otherwise.
    """

    drawn_below: float
    exponent: bool = False


# The ranges of the authors' code for its kernels, and in the same manner for those that it has not.
SCALE = Scalar(1.0)
FACTOR = Scalar(2.0)
EXPONENT = Scalar(2.0, exponent=True)


class Kernel(NamedTuple):
    """`value(distance, *scalars)`: elementwise and broadcast, in the tensors' own precision."""

    formula: str
    scalars: dict[str, Scalar]
    value: Callable[..., Tensor]


KERNELS = {
    "log": Kernel(
        "-p log(1 + a δ)",
        {"p": FACTOR, "a": SCALE},
        lambda distance, p, a: -p * torch.log1p(a * distance),
    ),
    "log3": Kernel(
        "-r1 log(1 + r2 δ^r3)",
        {"r1": FACTOR, "r2": SCALE, "r3": EXPONENT},
        lambda distance, r1, r2, r3: -r1 * torch.log1p(r2 * distance.pow(r3)),
    ),
    "power": Kernel(
        "-a δ^p",
        {"a": SCALE, "p": EXPONENT},
        lambda distance, a, p: -a * distance.pow(p),
    ),
    "square": Kernel(
        "-r1 δ^2",
        {"r1": SCALE},
        lambda distance, r1: -r1 * distance.square(),
    ),
    "gaussian": Kernel(
        "r1 exp(-r2 δ^2)",
        {"r1": FACTOR, "r2": SCALE},
        lambda distance, r1, r2: r1 * torch.exp(-r2 * distance.square()),
    ),
    "gaussian3": Kernel(
        "r1 exp(-r2 δ^r3)",
        {"r1": FACTOR, "r2": SCALE, "r3": EXPONENT},
        lambda distance, r1, r2, r3: r1 * torch.exp(-r2 * distance.pow(r3)),
    ),
}


class Term(NamedTuple):
    """A kernel of a sum and its positive factor."""

    kernel: str
    factor: float = 1.0


_TERM = re.compile(r"(?:(?P<factor>[-+]?(?:\d+\.?\d*|\.\d+))\s*\*?\s*)?(?P<kernel>[A-Za-z_]\w*)")


def parse_sum(text: str) -> tuple[Term, ...]:
    """The terms of an expression such as "log + 0.5 power".

    Raises ValueError, naming the part that is at fault, for what is not a sum of known kernels with positive factors.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"kernel expression {text!r}: must be a sum of kernels such as 'log + power'")
    terms = []
    for part in text.split("+"):
        match = _TERM.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"kernel expression {text!r}: {_fault(part.strip())}")
        name, factor = match["kernel"], float(match["factor"] or 1.0)
        if name not in KERNELS:
            near = difflib.get_close_matches(name, KERNELS, n=3) or KERNELS
            raise ValueError(f"kernel expression {text!r}: kernel {name!r} is not known; did you mean {_any(near)}?")
        if factor <= 0:
            raise ValueError(
                f"kernel expression {text!r}: {factor:g} {name} is not conditionally positive definite; factors are "
                "positive"
            )
        terms.append(Term(name, factor))
    return tuple(terms)


def _fault(part: str) -> str:
    if not part:
        return "a term is missing beside a '+'"
    if "^" in part or "(" in part:
        return f"{part!r}: exponents and other scalars are learned, not written; only factors are"
    if "-" in part:
        return f"{part!r}: a difference of kernels is not conditionally positive definite; add them"
    if "*" in part:
        return (
            f"{part!r}: a product of kernels is not conditionally positive definite in general; what multiplies the "
            "scores is the option weight"
        )
    return f"{part!r} is not a kernel; a term is one of {_any(KERNELS)}, with a positive factor before it or without"


def _any(names) -> str:
    return ", ".join(names)
