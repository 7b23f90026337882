"""Attention modes: how a trained model attends at inference, for texts longer than those of its training.

A mode has four independent parts, none of which has parameters: the span of keys that a query attends to, a map of the
distances, a scaling of the scores, and for rotary positions a scaling of the angles with the length of the text.

Legend: s queries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kerple.attention.call import FULL, Span
from kerple.positional import PositionalMethod
from kerple.positional.distance_maps import DistanceMap


@dataclass(frozen=True)
class ScoreScaling:
    """Base class: factors of the products q.k, by the position of the query. A bias is not multiplied.

    The query itself is multiplied, so terms of CoPE and Transformer-XL that contain it are, too.
    """

    def factors(self, positions: Tensor) -> Tensor:
        """Float64, for int64 positions of the same shape."""
        raise NotImplementedError


@dataclass(frozen=True)
class LogLength(ScoreScaling):
    """max(1, ln n / ln length) for the query at position n - 1, whose text so far has n tokens (Su,
    https://kexue.fm/archives/8823; Chiang and Cholak, arXiv 2202.12172). length: that of training. Raises ValueError if
    it is below 2.
    """

    length: int

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"logn: the length must be at least 2, not {self.length}")

    def factors(self, positions: Tensor) -> Tensor:
        return ((positions.double() + 1).log() / math.log(self.length)).clamp(min=1)


@dataclass(frozen=True)
class YarnTemperature(ScoreScaling):
    """1/t = (0.1 ln factor + 1)^2 (YaRN, arXiv 2309.00071, equation 22). factor: the ratio of the new length to that of
    training. Raises ValueError if it is below 1.
    """

    factor: float

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"yarn-temperature: the factor must be at least 1, not {self.factor}")

    def factors(self, positions: Tensor) -> Tensor:
        return torch.full_like(positions, (0.1 * math.log(self.factor) + 1) ** 2, dtype=torch.float64)


@dataclass(frozen=True)
class DynamicNtk:
    """NTK-aware scaling of rotations with a factor that grows with the text of N tokens: the base is multiplied
    by (factor N / length - (factor - 1))^(r / (r - 2)) if N > length (transformers, modeling_rope_utils.py).

    `growth` is the expression in parentheses; `at_length` sets it. All tokens of a text use the same angles, so keys
    can be cached. Raises ValueError if `factor` or `length`, that of training, is below 1.
    """

    factor: float
    length: int
    growth: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf or self.length < 1:
            raise ValueError(f"dynamic-ntk: factor {self.factor} and length {self.length} must be at least 1")

    def at_length(self, length: int) -> "DynamicNtk":
        """For texts of up to `length` tokens."""
        return replace(self, growth=self.factor * max(length, self.length) / self.length - (self.factor - 1))


@dataclass(frozen=True)
class AttentionMode:
    """How a model attends at inference. By default as in training.

    Attributes:
        span: the keys that a query attends to.
        reindexed: distances to sinks are those in a cache of sinks + window tokens, in which the query has the last
            position (StreamingLLM); otherwise those in the text (LM-Infinite without its limit on distances).
        distance_map: applied to the distances before the bias or the rotation.
        scaling: multiplies the products of queries and keys.
        dynamic_ntk: the base of rotations.
    """

    span: Span = FULL
    reindexed: bool = False
    distance_map: DistanceMap | None = None
    scaling: ScoreScaling | None = None
    dynamic_ntk: DynamicNtk | None = None

    def __post_init__(self) -> None:
        if self.reindexed and not self.span.sinks:
            raise ValueError("reindexed distances are those to sinks, but the mode has none")

    def at_length(self, length: int) -> "AttentionMode":
        """The mode for texts of up to `length` tokens, on which `linear` and `dynamic-ntk` depend."""
        distance_map, dynamic_ntk = self.distance_map, self.dynamic_ntk
        if distance_map is None and dynamic_ntk is None:
            return self
        return replace(
            self,
            distance_map=distance_map and distance_map.at_length(length),
            dynamic_ntk=dynamic_ntk and dynamic_ntk.at_length(length),
        )

    @property
    def length_dependent(self) -> bool:
        """Whether attention depends on the length of the whole text, so that `at_length` must be called."""
        return self.at_length(1) != self

    def is_explicit(self, method: PositionalMethod | None) -> bool:
        """Whether `attend_in_mode` computes the attention: positions of keys are not consecutive, or there are two
        rotations. Otherwise backends do, with mapped tables.
        """
        return self.span.sinks > 0 or (self.distance_map is not None and method is not None and method.turns)

    def for_layer(self, method: PositionalMethod) -> "AttentionMode":
        """The mode in a layer with this method, if other layers have positions: without positions, distances and angles
        have no effect.
        """
        if method.hooks:
            return self
        return replace(self, reindexed=False, distance_map=None, dynamic_ntk=None)

    def rotation(self, method: PositionalMethod) -> PositionalMethod:
        """The method whose `rotate` applies to queries and keys."""
        if self.dynamic_ntk is None or self.dynamic_ntk.growth == 1:
            return method
        if self.dynamic_ntk.growth is None:
            raise ValueError("dynamic-ntk depends on the length of the text: call at_length(length) first")
        stretched = method.stretched(self.dynamic_ntk.growth)
        assert stretched is not None  # see `unsupported_reason`
        return stretched

    def scale_query(self, query: Tensor, positions: Tensor) -> Tensor:
        """Queries `[b, h, s, d]` at int64 positions `[s]` or `[b, 1, s]`, multiplied by the factors of their scores."""
        if self.scaling is None:
            return query
        factors = self.scaling.factors(positions.to(query.device))
        dtype = torch.promote_types(query.dtype, torch.float32)
        return (query.to(dtype) * factors.to(dtype)[..., None]).to(query.dtype)

    def unsupported_reason(self, method: PositionalMethod) -> str | None:
        """Why a method does not support this mode, and what to do instead, as the rest of a sentence about it."""
        special = self.span.sinks or self.distance_map is not None
        if special and method.length_dependent:
            return "has angles that change with the length of the text; remove its scaling, or use full+dynamic-ntk"
        if self.dynamic_ntk is not None and method.stretched(1.0) is None:
            return (
                "has no base that dynamic-ntk could change: it needs a rotation of more than 2 dimensions, without a "
                "scaling or random positions"
            )
        if special and "decay" in method.hooks and method.hooks & {"rotate", "scale_qk"}:
            return (
                "has both a decay and a rotation, which cannot be computed for keys that are not consecutive; use full"
            )
        if self.reindexed and (
            "modify_scores" in method.hooks or not (method.turns or method.hooks & {"bias", "weight"})
        ):
            return (
                "has no distances that could be counted within the cache (it modifies scores, or has absolute "
                "positions or none); use sinks without reindexed"
            )
        if self.distance_map is not None:
            return self._unmapped_reason(method, self.distance_map)
        return None

    def unsupported_by(
        self, methods: Sequence[PositionalMethod], windows: Sequence[int | None], name: str
    ) -> str | None:
        """Why a model does not support this mode, and what to do instead, as the rest of a sentence about the mode;
        None if it does. A model with a sliding window supports no blocks, no sinks and no wider window, which would
        change no layer. Layers without positions support all distances if other layers have positions.

        methods, windows: of the layers. name: of the positional method.
        """
        span = self.span
        widest = None if None in windows else max((window or 0 for window in windows), default=None)
        if any(windows) and (span.block is not None or span.sinks or (widest and (span.window or 0) > widest)):
            return (
                "is not supported for models with sliding_window_width: a query attends to no keys outside of its "
                "layer's window; use full, or window@W with a smaller W"
            )
        has_positions = any(method.hooks for method in methods)
        modes = [self.for_layer(method) for method in methods] if has_positions else [self] * len(methods)
        reasons = [mode.unsupported_reason(method) for mode, method in zip(modes, methods, strict=True)]
        for layer, reason in enumerate(reasons):
            if reason is not None:
                place = f" in layer {layer} (counted from 0)" if None in reasons else ""
                return f"is not supported: pos_emb {name}{place} {reason}"
        return None

    @staticmethod
    def _unmapped_reason(method: PositionalMethod, distance_map: DistanceMap) -> str | None:
        name = type(distance_map).__name__.lower()
        if method.turns:
            if distance_map.piecewise_linear:
                return None
            return f"rotates by positions, so distance map {name}, which is not linear, cannot apply; use leaky@W,k"
        device = next((parameter.device for parameter in method.parameters()), None)
        has_table = "modify_scores" in method.hooks and method.mapped_table(torch.zeros(1, device=device)) is not None
        if has_table or (method.hooks & {"bias", "weight"} and "rotate" not in method.hooks):
            return None
        return (
            f"is not a function of the distance (absolute or sampled positions, positions that depend on the content, "
            f"or none), so distance map {name} has no meaning; use a mode without a map"
        )


DEFAULT_MODE = AttentionMode()
