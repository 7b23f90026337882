"""Scalings of an inference mode: factors of the scores by the position of the query, and angles of
rotations that depend on the length of the text.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoreScaling:
    """Base class: factors of the products q.k, by the position of the query. A bias is not
    multiplied.

    The query itself is multiplied, so terms of CoPE and Transformer-XL that contain it are, too.
    """

    def factors(self, positions: Tensor) -> Tensor:
        """Float64, for int64 positions of the same shape."""
        raise NotImplementedError


@dataclass(frozen=True)
class LogLength(ScoreScaling):
    """max(1, ln n / ln length) for the query at position n - 1, whose text so far has n tokens (Su,
    https://kexue.fm/archives/8823; Chiang and Cholak, arXiv 2202.12172). length: that of training.
    Raises ValueError if it is below 2.
    """

    length: int

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"logn: the length must be at least 2, not {self.length}")

    def factors(self, positions: Tensor) -> Tensor:
        return ((positions.double() + 1).log() / math.log(self.length)).clamp(min=1)


@dataclass(frozen=True)
class YarnTemperature(ScoreScaling):
    """1/t = (0.1 ln factor + 1)^2 (YaRN, arXiv 2309.00071, equation 22). factor: the ratio of the
    new length to that of training. Raises ValueError if it is below 1.
    """

    factor: float

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"yarn-temperature: the factor must be at least 1, not {self.factor}")

    def factors(self, positions: Tensor) -> Tensor:
        temperature = (0.1 * math.log(self.factor) + 1) ** 2
        return torch.full_like(positions, temperature, dtype=torch.float64)


@dataclass(frozen=True)
class DynamicNtk:
    """NTK-aware scaling of rotations with a factor that grows with the text of N tokens: the base
    is multiplied by (factor N / length - (factor - 1))^(r / (r - 2)) if N > length (transformers,
    modeling_rope_utils.py).

    `growth` is the expression in parentheses; `at_length` sets it. All tokens of a text use the
    same angles, so keys can be cached. Raises ValueError if `factor` or `length`, that of training,
    is below 1.
    """

    factor: float
    length: int
    growth: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf or self.length < 1:
            raise ValueError(
                f"dynamic-ntk: factor {self.factor} and length {self.length} must be at least 1"
            )

    def at_length(self, length: int) -> "DynamicNtk":
        """For texts of up to `length` tokens."""
        growth = self.factor * max(length, self.length) / self.length - (self.factor - 1)
        return replace(self, growth=growth)
