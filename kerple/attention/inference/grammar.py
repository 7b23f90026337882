"""Names of inference modes: how a trained model attends to a text that is longer than its training length.

A mode is a span of keys, followed by any of the modifiers in `SPANS` and `MODIFIERS`, at most one of each kind:

    full    window@512    full+clip@256    sinks@4+508    sinks@4+508+reindexed+logn

It applies in every layer, so a token can depend on more tokens than one query attends to: with a window, on
layers * (W - 1) earlier tokens. No parameters change.

Each mode has one canonical name: modifiers in the order of `MODIFIERS`, without optional arguments that equal their
defaults (the training length, if it is known, and the factor 1 of dynamic-ntk), and without decimal places of whole
numbers. With a training length of 128, `full+logn@128+linear` is `full+linear+logn`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kerple.attention.call import Span
from kerple.attention.inference.mode import DEFAULT_MODE, AttentionMode, DynamicNtk, LogLength, YarnTemperature
from kerple.positional.distance_maps import Clip, Group, Leaky, Linear, Log

# Span -> its meaning.
SPANS = {
    "full": "all earlier tokens, as in training",
    "window@W": "the last W tokens including the query itself (KERPLE, figures 5 and 7)",
    "blockwise[@L]": "blockwise causal attention (LEX) for a training length of L: positions are divided into blocks "
    "of L / 2, and a query attends to its own block and the one before, L / 2 + 1 to L tokens",
    "sinks@S+W": "the first S tokens and the last W (StreamingLLM, LM-Infinite), at their distances in the text",
}


@dataclass(frozen=True)
class Modifier:
    """A modifier: its field of `AttentionMode`, what it is built from, and what it does.

    Attributes:
        arguments: their letters and types.
        build: from the arguments to the field's value. `dynamic-ntk` also gets the training length.
        optional: whether the arguments may be left out. L is then the training length, and F is 1.
    """

    field: str
    arguments: tuple[tuple[str, type], ...]
    build: Callable[..., Any]
    meaning: str
    optional: bool = False

    def grammar(self, name: str) -> str:
        if not self.arguments:
            return name
        letters = "@" + ",".join(letter for letter, _ in self.arguments)
        return name + (f"[{letters}]" if self.optional else letters)


_SIZE = ("W", int)
# In the order of canonical names.
MODIFIERS = {
    "reindexed": Modifier(
        "reindexed", (), lambda: True, "sinks: distances as in a cache of S + W tokens (StreamingLLM)"
    ),
    "clip": Modifier("distance_map", (_SIZE,), Clip, "distances above W become W (ReRoPE)"),
    "group": Modifier(
        "distance_map",
        (("G", int), _SIZE),
        Group,
        "distances δ from W on become floor(δ/G) + W - floor(W/G) (Self-Extend)",
    ),
    "linear": Modifier(
        "distance_map",
        (("L", int),),
        Linear,
        "in texts of N > L tokens, δ becomes δ L / N (position interpolation)",
        True,
    ),
    "leaky": Modifier(
        "distance_map", (_SIZE, ("k", float)), Leaky, "from W on, δ becomes W + (δ - W) / k (Leaky ReRoPE)"
    ),
    "log": Modifier("distance_map", (_SIZE,), Log, "above W, δ becomes W (1 + ln(δ/W)); not for rotations"),
    "logn": Modifier(
        "scaling", (("L", int),), LogLength, "scores of the query at position n > L times ln n / ln L", True
    ),
    "yarn-temperature": Modifier("scaling", (("F", float),), YarnTemperature, "scores times (0.1 ln F + 1)² (YaRN)"),
    "dynamic-ntk": Modifier(
        "dynamic_ntk",
        (("F", float),),
        DynamicNtk,
        "rotations: in texts of N > L tokens, base times (F N / L - (F - 1))^(r/(r-2)); F is 1 by default, L the "
        "training length",
        True,
    ),
}
_KINDS = {"distance_map": "distance maps", "scaling": "scalings of the scores"}
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

    def mean_keys(self, length: int) -> float:
        """The mean number of keys per query in a segment of `length` tokens: the cost of attention per token."""
        window, block = self.span.window, self.span.block
        if block is not None:
            full_blocks, rest = divmod(length, block)
            keys_in_own_block = full_blocks * block * (block + 1) // 2 + rest * (rest + 1) // 2
            return (keys_in_own_block + block * max(0, length - block)) / length
        if window is None or window + self.span.sinks >= length:
            return (length + 1) / 2
        window += self.span.sinks
        return window * (1 - (window - 1) / (2 * length))


FULL_MODE = Mode("full")


def grammar() -> list[tuple[str, str]]:
    """(syntax, meaning) of all spans, and then of all modifiers, which begin with a plus."""
    modifiers = [(f"+{modifier.grammar(name)}", modifier.meaning) for name, modifier in MODIFIERS.items()]
    return [*SPANS.items(), *modifiers]


def parse_mode(name: str, train_length: int | None = None) -> Mode:
    """The mode with this name, under its canonical name. train_length: in tokens; the default of arguments L.

    Raises ValueError for an unknown name, missing or invalid arguments, and parts that cannot be combined.
    """
    match = _SPAN.fullmatch(name)
    if match is None:
        raise ValueError(
            f"inference mode {name!r} is unknown; choose full, window@W, blockwise, blockwise@L or sinks@S+W, where "
            "the letters are numbers of tokens, e.g. window@512 or sinks@4+508, followed by modifiers, e.g. +clip@256 "
            "(see evaluate.py --list-modes)"
        )
    span_name, span = _span(match, name, train_length)
    mode = AttentionMode(span)
    parts: dict[str, str] = {}
    for part in [] if match["rest"] is None else match["rest"].split("+"):
        key, canonical, value = _modifier(part, name, train_length)
        if key in parts:
            raise ValueError(f"inference mode {name}: {key} is given twice; use it once")
        parts[key] = canonical
        field = MODIFIERS[key].field
        if getattr(mode, field):
            other = next(other for other in parts if MODIFIERS[other].field == field)
            raise ValueError(f"inference mode {name}: {other} and {key} are both {_KINDS[field]}; use one of them")
        if field == "reindexed" and not mode.span.sinks:
            raise ValueError(f"inference mode {name}: reindexed only changes distances to sinks; use it with sinks@S+W")
        mode = replace(mode, **{field: value})
    return Mode("+".join([span_name, *(parts[key] for key in MODIFIERS if key in parts)]), mode)


def _span(match: re.Match[str], name: str, train_length: int | None) -> tuple[str, Span]:
    """(canonical name, span)."""
    if match["W"] is not None:
        return match[1], Span(window=int(match["W"]))
    if match["S"] is not None:
        return match[1], Span(window=int(match["SW"]), sinks=int(match["S"]))
    if not match[1].startswith("blockwise"):
        return match[1], Span()
    length = train_length if match["L"] is None else int(match["L"])
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
    return "blockwise" if length == train_length else match[1], Span(block=length // 2)


def _modifier(part: str, name: str, train_length: int | None) -> tuple[str, str, Any]:
    """(name, canonical name with arguments, value) of a modifier."""
    key, has_values, rest = part.partition("@")
    if key not in MODIFIERS:
        raise ValueError(
            f"inference mode {name}: modifier {part!r} is unknown; choose one of "
            f"{', '.join(modifier.grammar(key) for key, modifier in MODIFIERS.items())} (see evaluate.py --list-modes)"
        )
    modifier = MODIFIERS[key]
    texts = rest.split(",") if has_values else []
    types = [kind for _, kind in modifier.arguments]
    wrong = len(texts) != len(types) and not (modifier.optional and not texts)
    if wrong or not all(_NUMBERS[kind].fullmatch(text) for kind, text in zip(types, texts, strict=False)):
        raise ValueError(
            f"inference mode {name}: {part!r} must be {modifier.grammar(key)}, with numbers for the letters: from 1, "
            "and without leading zeros"
        )
    values = [kind(text) for kind, text in zip(types, texts, strict=False)]
    defaults = [1.0 if letter == "F" else train_length for letter, _ in modifier.arguments if modifier.optional]
    lengths = [train_length] if key == "dynamic-ntk" else []
    arguments = [*(values or defaults), *lengths]
    if None in arguments:
        advice = "pass train_length" if lengths else f"use {key}@LENGTH, or pass train_length"
        raise ValueError(f"inference mode {name}: {key} depends on the training length, which is not known; {advice}")
    canonical = key
    if values and values != defaults:
        canonical += "@" + ",".join(str(value).removesuffix(".0") for value in values)
    try:
        return key, canonical, modifier.build(*arguments)
    except ValueError as error:
        raise ValueError(f"inference mode {name}: {error}") from error
