"""Rotary positions beyond those of training, by other frequencies or other positions.

    linear   position interpolation (arXiv 2306.15595): every frequency divided by `factor`
    ntk      NTK-aware: base * factor^(r / (r - 2)): the highest frequency stays, the lowest is divided by `factor`
    yarn     (arXiv 2309.00071): frequencies that turn often within the trained length stay, those that turn less than
             once are divided by `factor`, those in between are mixed; scores grow with log(factor)
    random   randomised positions (arXiv 2305.16843): an increasing draw from a larger range

Each is fixed by its options: no frequency depends on the length of the text at hand. One that did ("dynamic" scaling)
would leave the keys of a cache behind, turned by the angles of a shorter text.

Legend: r rotated dimensions.
"""

import functools
import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kerple.positional.angles import frequencies
from kerple.positional.base import PositionsExceeded

# Scaling -> the options that it has.
SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "ntk": ("factor",),
    "yarn": ("factor", "trained_length", "beta_fast", "beta_slow", "attention_factor"),
    "random": ("trained_length", "random_range", "random_length", "random_seed"),
}
WHOLE = ("trained_length", "random_range", "random_length", "random_seed")


def check_options(scaling: str | None, given: dict[str, object]) -> None:
    """`given`: option -> value, None where it was not given. Raises ValueError, by name, for what does not fit."""
    if scaling is not None and scaling not in SCALINGS:
        dynamic = (
            "; its frequencies would depend on the current length, and keys in a cache would carry those of another: "
            "take ntk with a factor"
        )
        raise ValueError(
            f"scaling {scaling!r} is not known; it is one of {', '.join(SCALINGS)}"
            f"{dynamic if scaling == 'dynamic' else ''}"
        )
    takes = SCALINGS.get(scaling, ())
    for name, value in given.items():
        if value is not None and name not in takes:
            users = ", ".join(one for one, names in SCALINGS.items() if name in names)
            raise ValueError(f"{name} {value} has no effect with scaling {scaling!r}; it is an option of {users}")
        kind, called = (int, "a whole number") if name in WHOLE else ((int, float), "a number")
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool) or value < 0):
            raise ValueError(f"{name} {value!r} must be {called}, not below 0")
    factor = given["factor"]
    if "factor" in takes and (factor is None or not 1 <= factor < math.inf):
        raise ValueError(f"scaling {scaling} needs factor, how much longer texts become, at least 1; got {factor}")


def linear(size: int, base: float, factor: float) -> tuple[float, ...]:
    return tuple(frequency / factor for frequency in frequencies(size, base))


def ntk(size: int, base: float, factor: float) -> tuple[float, ...]:
    if size <= 2:
        raise ValueError(f"scaling ntk needs more than 2 rotated dimensions; got {size}")
    return frequencies(size, base * factor ** (size / (size - 2)))


def yarn(
    size: int, base: float, factor: float, trained_length: int, beta_fast: float, beta_slow: float
) -> tuple[float, ...]:
    """As the authors' code mixes: linearly in the index of the frequency, between the ones that turn `beta_fast` and
    `beta_slow` times in the trained length, rounded outwards to whole indices.
    """
    if not 0 < beta_slow < beta_fast:
        raise ValueError(f"scaling yarn needs 0 < beta_slow < beta_fast; got {beta_slow} and {beta_fast}")

    def index(turns: float) -> float:
        return size * math.log(trained_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(index(beta_fast)), 0), min(math.ceil(index(beta_slow)), size - 1)
    width = last - first if last != first else 0.001
    mixed = []
    for i, frequency in enumerate(frequencies(size, base)):
        interpolated = min(max((i - first) / width, 0.0), 1.0)
        mixed.append(frequency * (1 - interpolated) + frequency / factor * interpolated)
    return tuple(mixed)


def yarn_attention_factor(factor: float) -> float:
    """What cosines and sines are multiplied by, of queries and keys both: 0.1 ln(factor) + 1."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class RandomPositions:
    """Positions 0, 1, 2 ... taken to an increasing draw, without repetition, from `range` positions.

    In training, each step draws as many as its texts have tokens, once for all layers and samples (and so for every
    process, and for activations that are computed again). In evaluation the draw is one, of `length` positions by
    `seed`, and a text gets the first ones of it: so a key in a cache stays where it is.
    """

    range: int
    length: int
    seed: int

    def __post_init__(self):
        if not 0 < self.length <= self.range:
            raise ValueError(
                f"scaling random draws random_length {self.length} different positions out of random_range "
                f"{self.range}: it must be 1 to {self.range}"
            )

    def drawn(self, count: int, step: int, seed: int) -> Tensor:
        """For a step of the training run with this seed: int64 `[count]`."""
        if count > self.range:
            raise PositionsExceeded(f"{count} tokens have no different positions in random_range {self.range}")
        digest = hashlib.sha256(f"{self.seed} {seed} {step}".encode()).digest()
        return _draw(self.range, count, int.from_bytes(digest[:7], "big"))

    def fixed(self, positions: Tensor) -> Tensor:
        """For evaluation: the positions `[s]` of the one draw. Raises PositionsExceeded beyond `length`."""
        last = int(positions.max()) if positions.numel() else -1
        if last >= self.length:
            raise PositionsExceeded(
                f"position {last} was asked for, and random positions are drawn for texts of random_length "
                f"{self.length}; give the longest length as random_length, and at least that as random_range"
            )
        return _draw(self.range, self.length, self.seed).to(positions.device)[positions]


@functools.lru_cache(maxsize=4)
def _draw(highest: int, count: int, seed: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.randperm(highest, generator=torch.Generator().manual_seed(seed))[:count].sort().values
