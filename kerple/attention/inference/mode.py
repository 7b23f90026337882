"""Attention modes: how a trained model attends at inference, for texts longer than those of its
training; their names.

A mode has four independent parts, none of which has parameters: the span of keys that a query
attends to, a map of the distances, a scaling of the scores, and for rotary positions a scaling of
the angles with the length of the text. Its name is a span, followed by any of `MODIFIERS`, at most
one of each kind:

    full    window@512    full+clip@256    sinks@4+508    sinks@4+508+reindexed+logn

It applies in every layer, so a token can depend on more tokens than one query attends to: with a
window, on layers * (W - 1) earlier tokens.

Each mode has one canonical name: modifiers in the order of `MODIFIERS`, without optional arguments
that equal their defaults (the training length, if it is known, and the factor 1 of dynamic-ntk),
and without decimal places of whole numbers. With a training length of 128, `full+logn@128+linear`
is `full+linear+logn`.

Legend: s queries.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kerple.attention.inference.scaling import (
    DynamicNtk,
    LogLength,
    ScoreScaling,
    YarnTemperature,
)
from kerple.attention.span import FULL, Span
from kerple.positional import PositionalMethod
from kerple.positional.distance_maps import Clip, DistanceMap, Group, Leaky, Linear, Log


@dataclass(frozen=True)
class AttentionMode:
    """How a model attends at inference. By default as in training.

    Attributes:
        span: the keys that a query attends to.
        reindexed: distances to sinks are those in a cache of sinks + window tokens, in which the
            query has the last position (StreamingLLM); otherwise those in the text (LM-Infinite
            without its limit on distances).
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
        if not self.span.causal:
            raise ValueError(
                "inference modes are causal; for all keys, use Attention with causal=False"
            )
        if self.reindexed and not self.span.sinks:
            raise ValueError("reindexed distances are those to sinks, but the mode has none")

    def at_length(self, length: int) -> "AttentionMode":
        """For texts of up to `length` tokens, on which `linear` and `dynamic-ntk` depend."""
        distance_map = self.distance_map
        dynamic_ntk = self.dynamic_ntk
        if distance_map is None and dynamic_ntk is None:
            return self
        return replace(
            self,
            distance_map=distance_map and distance_map.at_length(length),
            dynamic_ntk=dynamic_ntk and dynamic_ntk.at_length(length),
        )

    @property
    def length_dependent(self) -> bool:
        """Whether attention depends on the length of the text: call `at_length`."""
        return self.at_length(1) != self

    def is_explicit(self, method: PositionalMethod | None) -> bool:
        """Whether `attend_in_mode` computes the attention: positions of keys are not consecutive,
        or there are two rotations. Otherwise backends do, with mapped tables.
        """
        return self.span.sinks > 0 or (
            self.distance_map is not None and method is not None and method.turns
        )

    def for_layer(self, method: PositionalMethod) -> "AttentionMode":
        """The mode in a layer with this method, if other layers have positions: without positions,
        distances and angles have no effect.
        """
        if method.hooks:
            return self
        return replace(self, reindexed=False, distance_map=None, dynamic_ntk=None)

    def rotation(self, method: PositionalMethod) -> PositionalMethod:
        """The method whose `rotate` applies to queries and keys."""
        if self.dynamic_ntk is None or self.dynamic_ntk.growth == 1:
            return method
        if self.dynamic_ntk.growth is None:
            raise ValueError(
                "dynamic-ntk depends on the length of the text: call at_length(length) first"
            )
        stretched = method.stretched(self.dynamic_ntk.growth)
        assert stretched is not None  # see `unsupported_reason`
        return stretched

    def scale_query(self, query: Tensor, positions: Tensor) -> Tensor:
        """Queries `[b, h, s, d]` at int64 positions `[s]` or `[b, 1, s]`, multiplied by the factors
        of their scores.
        """
        if self.scaling is None:
            return query
        factors = self.scaling.factors(positions.to(query.device))
        dtype = torch.promote_types(query.dtype, torch.float32)
        return (query.to(dtype) * factors.to(dtype)[..., None]).to(query.dtype)

    def unsupported_reason(self, method: PositionalMethod) -> str | None:
        """Why a method does not support this mode, and what to do instead, as the rest of a
        sentence about it.
        """
        # Two changes of the same rotation.
        special = self.span.sinks or self.distance_map is not None
        if special and method.length_dependent:
            return (
                "has angles that change with the length of the text; remove its scaling, or use "
                "full+dynamic-ntk"
            )
        if method.interpolated and isinstance(self.distance_map, Linear):
            return (
                "has a scaling, which changes positions as linear does; use a mode without linear"
            )
        if method.score_scale != 1 and isinstance(self.scaling, YarnTemperature):
            return (
                "has scaling yarn, which contains the temperature; use a mode without "
                "yarn-temperature"
            )
        if self.dynamic_ntk is not None and method.stretched(1.0) is None:
            return (
                "has no base that dynamic-ntk could change: it needs a rotation of more than 2 "
                "dimensions, without a scaling or random positions"
            )

        # `attend_in_mode` computes these without a backend, from positions that it chooses.
        if special and "decay" in method.hooks and method.hooks & {"rotate", "scale_qk"}:
            return (
                "has both a decay and a rotation, which cannot be computed for keys that are not "
                "consecutive; use full"
            )
        if self.reindexed and (
            "modify_scores" in method.hooks
            or not (method.turns or method.hooks & {"bias", "weight"})
        ):
            return (
                "has no distances that could be counted within the cache (it modifies scores, or "
                "has absolute positions or none); use sinks without reindexed"
            )
        if self.distance_map is not None:
            return self._unmapped_reason(method, self.distance_map)
        return None

    def unsupported_by(
        self, methods: Sequence[PositionalMethod], windows: Sequence[int | None], name: str
    ) -> str | None:
        """Why a model does not support this mode, and what to do instead, as the rest of a sentence
        about the mode; None if it does. A model with a sliding window supports no blocks, no sinks
        and no wider window, which would change no layer. Layers without positions support all
        distances if other layers have positions.

        methods, windows: of the layers. name: of the positional method.
        """
        # The span: a layer's window is narrower than the mode's, or the mode has no effect.
        span = self.span
        widths = [window for window in windows if window is not None]
        if widths:
            too_wide = len(widths) == len(windows) and (span.window or 0) > max(widths)
            if span.block is not None or span.sinks or too_wide:
                return (
                    "is not supported for models with sliding_window_width: a query attends to no "
                    "keys outside of its layer's window; use full, or window@W with a smaller W"
                )

        # The first layer whose method does not support it.
        has_positions = any(method.hooks for method in methods)
        reasons = []
        for method in methods:
            mode = self
            if has_positions:
                mode = self.for_layer(method)
            reasons.append(mode.unsupported_reason(method))
        for layer, reason in enumerate(reasons):
            if reason is None:
                continue
            place = ""
            if None in reasons:  # not the same in all layers
                place = f" in layer {layer} (counted from 0)"
            return f"is not supported: pos_emb {name}{place} {reason}"
        return None

    @staticmethod
    def _unmapped_reason(method: PositionalMethod, distance_map: DistanceMap) -> str | None:
        """The same, if the mode maps distances."""
        # A rotation has two sets of positions, whose differences are the mapped distances.
        name = type(distance_map).__name__.lower()
        if method.turns:
            if distance_map.piecewise_linear:
                return None
            return (
                f"rotates by positions, so distance map {name}, which is not linear, cannot apply; "
                "use leaky@W,k"
            )

        # A table is read at the mapped distances.
        device = next((parameter.device for parameter in method.parameters()), None)
        has_table = (
            "modify_scores" in method.hooks
            and method.mapped_table(torch.zeros(1, device=device)) is not None
        )
        if has_table or (method.hooks & {"bias", "weight"} and "rotate" not in method.hooks):
            return None
        return (
            "is not a function of the distance (absolute or sampled positions, positions that "
            f"depend on the content, or none), so distance map {name} has no meaning; use a mode "
            "without a map"
        )


DEFAULT_MODE = AttentionMode()


@dataclass(frozen=True)
class Modifier:
    """A modifier: its field of `AttentionMode`, and what it is built from. docs/evaluation.md says
    what each one does.

    Attributes:
        arguments: their letters and types.
        build: from the arguments to the field's value. `dynamic-ntk` also gets the training length.
        optional: whether the arguments may be left out. L is then the training length, and F is 1.
    """

    field: str
    arguments: tuple[tuple[str, type], ...]
    build: Callable[..., Any]
    optional: bool = False

    def grammar(self, name: str) -> str:
        if not self.arguments:
            return name
        letters = "@" + ",".join(letter for letter, _ in self.arguments)
        if self.optional:
            letters = f"[{letters}]"
        return name + letters


_SIZE = ("W", int)
# In the order of canonical names.
MODIFIERS = {
    "reindexed": Modifier("reindexed", (), lambda: True),
    "clip": Modifier("distance_map", (_SIZE,), Clip),
    "group": Modifier("distance_map", (("G", int), _SIZE), Group),
    "linear": Modifier("distance_map", (("L", int),), Linear, optional=True),
    "leaky": Modifier("distance_map", (_SIZE, ("k", float)), Leaky),
    "log": Modifier("distance_map", (_SIZE,), Log),
    "logn": Modifier("scaling", (("L", int),), LogLength, optional=True),
    "yarn-temperature": Modifier("scaling", (("F", float),), YarnTemperature),
    "dynamic-ntk": Modifier("dynamic_ntk", (("F", float),), DynamicNtk, optional=True),
}
_SIZE_PATTERN = "[1-9][0-9]{0,11}"
_SPAN = re.compile(
    rf"(full|window@(?P<W>{_SIZE_PATTERN})|blockwise(?:@(?P<L>{_SIZE_PATTERN}))?"
    rf"|sinks@(?P<S>{_SIZE_PATTERN})\+(?P<SW>{_SIZE_PATTERN}))(?:\+(?P<rest>.*))?"
)
_NUMBERS = {int: re.compile(_SIZE_PATTERN), float: re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")}


@dataclass(frozen=True)
class Mode:
    """An inference mode: its name, and how models attend in it."""

    name: str
    attention: AttentionMode = DEFAULT_MODE

    @property
    def span(self) -> Span:
        return self.attention.span


FULL_MODE = Mode("full")


def parse_mode(name: str, train_length: int | None = None) -> Mode:
    """The mode with this name, under its canonical name. train_length: in tokens; the default of
    arguments L.

    Raises ValueError for an unknown name, missing or invalid arguments, and parts that cannot be
    combined.
    """
    # The span, which comes first.
    match = _SPAN.fullmatch(name)
    if match is None:
        hint = _hint(_suggested_mode(name))
        raise ValueError(
            f"inference mode {name!r} is unknown; {hint}choose full, window@W, blockwise, "
            "blockwise@L or sinks@S+W, where the letters are numbers of tokens, e.g. window@512 or "
            "sinks@4+508, followed by modifiers, e.g. +clip@256 (see docs/evaluation.md)"
        )

    # One modifier at a time, at most one of each kind.
    span_name, span = _span(match, name, train_length)
    mode = AttentionMode(span)
    parts: dict[str, str] = {}
    modifiers: list[str] = []
    if match["rest"] is not None:
        modifiers = match["rest"].split("+")
    for part in modifiers:
        key, canonical, value = _modifier(part, name, train_length)
        field = MODIFIERS[key].field
        if getattr(mode, field):
            other = next(other for other in parts if MODIFIERS[other].field == field)
            raise ValueError(
                f"inference mode {name}: {other} and {key} cannot be combined; use one of them"
            )
        parts[key] = canonical
        if field == "reindexed" and not mode.span.sinks:
            raise ValueError(
                f"inference mode {name}: reindexed only changes distances to sinks; use it with "
                "sinks@S+W"
            )
        mode = replace(mode, **{field: value})
    return Mode("+".join([span_name, *(parts[key] for key in MODIFIERS if key in parts)]), mode)


def _suggested_mode(name: str) -> str | None:
    """The mode that the user may have meant, with letters for missing numbers; None if there is no
    such mode.
    """
    # A comma in the place of the sinks' plus.
    first, plus, rest = name.partition("+")
    key, _, arguments = first.partition("@")
    if key == "sinks":
        sinks, _, window = arguments.partition(",")
        return f"sinks@{sinks or 'S'}+{window or 'W'}"

    # A misspelled span, or a modifier without one.
    spans = difflib.get_close_matches(key, ("full", "window", "blockwise", "sinks"), n=1)
    if spans == ["window"]:
        size = arguments.partition(",")[0]
        return f"window@{size or 'W'}{plus}{rest}"
    if spans and spans != [key]:
        return first.replace(key, spans[0], 1).removesuffix("@") + plus + rest
    modifier = _suggested_modifier(first)
    if modifier is None:
        return None
    return f"full+{modifier}{plus}{rest}"


def _hint(suggestion: str | None) -> str:
    """The beginning of an advice."""
    if suggestion is None:
        return ""
    return f"did you mean {suggestion}? Otherwise, "


def _suggested_modifier(part: str) -> str | None:
    """Like `_suggested_mode`, for a modifier."""
    # The user's own arguments stay.
    key, at, arguments = part.partition("@")
    similar = [known for known in MODIFIERS if len(key) > 2 and key in known]
    similar = similar or difflib.get_close_matches(key, MODIFIERS, n=1)
    if not similar:
        return None
    known = similar[0]
    if key in MODIFIERS:
        known = key
    modifier = MODIFIERS[known]
    if not arguments:
        return known if modifier.optional else modifier.grammar(known)
    # As many as the modifier has, with letters for those that are missing.
    letters = [letter for letter, _ in modifier.arguments]
    given = arguments.split(",")[: len(letters)]
    return f"{known}{at}{','.join([*given, *letters[len(given) :]])}"


def _span(match: re.Match[str], name: str, train_length: int | None) -> tuple[str, Span]:
    """(canonical name, span)."""
    if match["W"] is not None:
        return match[1], Span(window=int(match["W"]))
    if match["S"] is not None:
        return match[1], Span(window=int(match["SW"]), sinks=int(match["S"]))
    if not match[1].startswith("blockwise"):
        return match[1], Span()

    # Blocks, by default of half the training length.
    length = train_length
    if match["L"] is not None:
        length = int(match["L"])
    if length is None:
        raise ValueError(
            "inference mode blockwise depends on the training length, which is not known here; "
            "use blockwise@LENGTH, e.g. blockwise@512, or pass train_length"
        )
    if length % 2:
        raise ValueError(
            f"inference mode {name}: blocks are half the training length, but {length} is odd; "
            f"choose an even length, e.g. blockwise@{length - 1 or 2}"
        )
    canonical = match[1]
    if length == train_length:
        canonical = "blockwise"
    return canonical, Span(block=length // 2)


def _modifier(part: str, name: str, train_length: int | None) -> tuple[str, str, Any]:
    """(name, canonical name with arguments, value) of a modifier."""
    # Its name.
    key, has_values, rest = part.partition("@")
    if key not in MODIFIERS:
        hint = _hint(_suggested_modifier(part))
        known = ", ".join(modifier.grammar(key) for key, modifier in MODIFIERS.items())
        raise ValueError(
            f"inference mode {name}: modifier {part!r} is unknown; {hint}choose one of {known} "
            "(see docs/evaluation.md)"
        )

    # Its arguments.
    modifier = MODIFIERS[key]
    texts = []
    if has_values:
        texts = rest.split(",")
    fits = len(texts) == len(modifier.arguments) or (modifier.optional and not texts)
    values: list[float | None] = []
    for (_, kind), text in zip(modifier.arguments, texts, strict=False):
        if fits and _NUMBERS[kind].fullmatch(text):
            values.append(kind(text))
    if not fits or len(values) < len(texts):
        raise ValueError(
            f"inference mode {name}: {part!r} must be {modifier.grammar(key)}, with numbers for "
            "the letters: from 1, and without leading zeros"
        )

    # Their defaults. `dynamic-ntk` also gets the training length.
    defaults: list[float | None] = []
    if modifier.optional:
        defaults = [{"F": 1.0}.get(letter, train_length) for letter, _ in modifier.arguments]
    arguments = values or defaults
    advice = f"use {key}@LENGTH, or pass train_length"
    if key == "dynamic-ntk":
        arguments = [*arguments, train_length]
        advice = "pass train_length"
    if None in arguments:
        raise ValueError(
            f"inference mode {name}: {key} depends on the training length, which is not known; "
            f"{advice}"
        )
    canonical = key
    if values and values != defaults:
        canonical += "@" + ",".join(str(value).removesuffix(".0") for value in values)
    try:
        return key, canonical, modifier.build(*arguments)
    except ValueError as error:
        raise ValueError(f"inference mode {name}: {error}") from error
