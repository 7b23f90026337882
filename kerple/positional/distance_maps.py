"""Distance maps: functions of the distance between query and key, applied before the bias or the
rotation.

A map changes the distances that a trained model sees at inference, without training. With distance
δ = i - j >= 0 of a query at position i and a key at position j, in a text of N tokens:

    Clip(W)        min(δ, W)                              ReRoPE (https://kexue.fm/archives/9708)
    Leaky(W, k)    δ below W, then W + (δ - W) / k        Leaky ReRoPE (same source)
    Group(G, W)    δ below W, then floor(δ/G) + W - floor(W/G)
                                                          Self-Extend (arXiv 2401.01325, eq. 3, 4)
    Linear(L)      δ L / max(L, N)                        position interpolation
                                                          (arXiv 2306.15595, eq. 4)
    Log(W)         δ up to W, then W (1 + ln(δ/W))        with continuous derivative at W

A method that is a function of the distance is evaluated at the mapped distances. For a rotation, a
map is two computations of the scores: with the true positions for distances below `near`, and with
`far_positions` for the others, whose difference is the mapped distance. Self-Extend divides
positions, floor(i/G) - floor(j/G), which is floor(δ/G) or one more, depending on i. `far_positions`
does the same, so rotary agrees with the paper; for tables over distance, which have one value per
distance, it is floor(δ/G).

Legend: s queries, t keys, n distances.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class DistanceMap:
    """Base class of the maps. Raises ValueError for an argument below 1.

    Attributes:
        piecewise_linear: whether `far_positions` exist.
    """

    piecewise_linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 1 <= value < math.inf:
                raise ValueError(
                    f"{type(self).__name__.lower()}: {field.name} must be at least 1, not {value}"
                )

    @property
    def near(self) -> int:
        """Distances below this one, the `window` of most maps, are unchanged."""
        return int(getattr(self, "window", 0))

    def __call__(self, distance: Tensor) -> Tensor:
        """The mapped distances, of the shape and floating-point dtype of `distance`."""
        raise NotImplementedError

    def far_positions(
        self, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Float64 positions `[s]` and `[t]` whose differences are the mapped distances of pairs
        that are at least `near` apart.
        """
        raise NotImplementedError

    def at_length(self, length: int) -> "DistanceMap":
        """The map for texts of up to `length` tokens."""
        return self


def divided(distance: Tensor, divisor: float) -> Tensor:
    """distance / divisor, rounded once. T5's buckets begin at integers, and 18 / 1.2 is below 15 if
    1.2 is rounded to float32.
    """
    return (distance.double() / divisor).to(distance.dtype)


@dataclass(frozen=True)
class Clip(DistanceMap):
    """min(δ, window)."""

    window: int

    def __call__(self, distance: Tensor) -> Tensor:
        return distance.clamp(max=self.window)

    def far_positions(
        self, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        # All far pairs have the same distance.
        query = query_positions.double()
        key = key_positions.double()
        return torch.full_like(query, self.window), torch.zeros_like(key)


@dataclass(frozen=True)
class Leaky(DistanceMap):
    """δ below `window`, then window + (δ - window) / factor."""

    window: int
    factor: float

    def __call__(self, distance: Tensor) -> Tensor:
        far = self.window + divided(distance - self.window, self.factor)
        return torch.where(distance < self.window, distance, far)

    def far_positions(
        self, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        # (i - j) / factor + offset is the mapped distance.
        offset = self.window - self.window / self.factor
        return query_positions.double() / self.factor + offset, key_positions.double() / self.factor


@dataclass(frozen=True)
class Group(DistanceMap):
    """δ below `window`, then floor(δ / size) + window - floor(window / size)."""

    size: int
    window: int

    def __call__(self, distance: Tensor) -> Tensor:
        far = (distance / self.size).floor() + self.window - self.window // self.size
        return torch.where(distance < self.window, distance, far)

    def far_positions(
        self, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Positions are divided, not distances, as in the paper.
        query = query_positions // self.size
        key = key_positions // self.size
        return (query + self.window - self.window // self.size).double(), key.double()


@dataclass(frozen=True)
class Linear(DistanceMap):
    """δ length / N for a text of N > `length` tokens. `divisor` is N / length, at least 1;
    `at_length` sets it.
    """

    length: int
    divisor: float | None = None

    def __call__(self, distance: Tensor) -> Tensor:
        return divided(distance, self._divisor)

    def far_positions(
        self, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return query_positions.double() / self._divisor, key_positions.double() / self._divisor

    def at_length(self, length: int) -> "Linear":
        return replace(self, divisor=max(1.0, length / self.length))

    @property
    def _divisor(self) -> float:
        if self.divisor is None:
            raise ValueError(
                "a linear distance map depends on the length of the text: call at_length(length) "
                "first"
            )
        return self.divisor


@dataclass(frozen=True)
class Log(DistanceMap):
    """δ up to `window`, then window * (1 + ln(δ / window)), which rotations cannot use."""

    piecewise_linear = False
    window: int

    def __call__(self, distance: Tensor) -> Tensor:
        far = self.window * (1 + (distance.clamp(min=self.window) / self.window).log())
        return torch.where(distance <= self.window, distance, far)
