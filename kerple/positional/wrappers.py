"""Methods that use other methods: randomized positions, and another method in each layer.

Randomized positions (arXiv 2305.16843) are for any method that uses positions. In training, the n
tokens of a sequence get n of `random_range` positions, an increasing sample without repetition, so
that the model sees distances of longer texts. With these options, `PositionalMethod.from_shape`
builds a subclass of the method whose hooks get sampled positions:

    random_range    the number of positions to sample from
    random_length   the number of positions in the sample for texts of unknown length; default:
                    max_positions
    random_seed     of the samples outside training; default: 0

Each training step has a new sample of as many positions as its sequences have tokens, which all
layers, sequences, processes and recomputed activations share. Evaluation uses one sample for each
length (`begin_text`). Where the length is not known, as in generation, a text uses the beginning of
one sample of `random_length` positions, so the positions of cached keys never change.

Distances of sampled positions are not constant along diagonals. Methods with a bias or a weight
therefore look it up for each pair, in `modify_scores`. Methods that have this hook themselves get
the sampled positions there, and must not require that they are consecutive; neighbors, as in DAPE
V2's convolutions, remain those in the text. The decay of xPos is that of the sampled positions,
too.

`per_layer` has another method in each layer, in a repeating pattern. Llama 4 rotates queries and
keys in three of four layers and has no positions in the fourth; RNoPE alternates between both:

    per_layer   a list of methods (arXiv 2501.18795)

Legend: b batch, s tokens, h heads, c queries, l keys, d head size, e hidden size, r `random_range`.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kerple.positional.base import (
    WRAPPERS,
    Chunk,
    ModelShape,
    PositionalMethod,
    PositionsExceeded,
    TableJacobian,
)
from kerple.positional.functional import by_pair
from kerple.positional.registry import build, method_class, register

OPTIONS = ("random_range", "random_length", "random_seed")


@dataclass(frozen=True)
class RandomPositions:
    """Maps positions 0, 1, 2 ... to an increasing sample, without repetition, of `range`."""

    range: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.length <= self.range:
            raise ValueError(
                f"random positions: random_length {self.length} different positions are drawn from "
                f"random_range {self.range}; random_length must be 1 to {self.range}"
            )

    def check(self, count: int) -> None:
        """Raise PositionsExceeded if there are fewer positions than `count` tokens."""
        if count > self.range:
            raise PositionsExceeded(
                f"{count} tokens need more positions than random_range {self.range} has"
            )

    def training_positions(self, count: int, step: int, seed: int) -> Tensor:
        """The sample of a training step of a run with this seed: int64 `[count]`."""
        self.check(count)
        # A seed of its own for each step and run; 56 bits, since torch's seeds have a sign.
        digest = hashlib.sha256(f"{self.seed} {seed} {step}".encode()).digest()
        return _sample(self.range, count, int.from_bytes(digest[:7], "big"))

    def evaluation_positions(self, positions: Tensor, length: int | None = None) -> Tensor:
        """The sample for texts of `length` tokens (default: `self.length`) at positions `[s]`.
        Raises PositionsExceeded for a position beyond the sample.
        """
        if length is None:
            length = self.length
        self.check(length)
        last = -1
        if positions.numel():
            last = int(positions.max())
        if last >= length:
            raise PositionsExceeded(
                f"position {last} is beyond random_length {length}, the number of positions drawn "
                "for texts of unknown length; set random_length to the longest length, and "
                "random_range to at least that"
            )
        return _sample(self.range, length, self.seed).to(positions.device)[positions]


@functools.lru_cache(maxsize=4)
def _sample(high: int, count: int, seed: int) -> Tensor:
    """`count` of the positions below `high`, in ascending order, int64 on the CPU."""
    # The cached sample may be used in training later.
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(seed)
        positions = torch.randperm(high, generator=generator, device="cpu")[:count]
        return positions.sort().values


class Randomized(PositionalMethod):
    """The hooks with sampled positions; a base class of the classes that `randomized` returns."""

    plain: type[PositionalMethod]
    random: RandomPositions
    step: tuple[int, int, int] | None = None  # step, seed, length of the sequences
    text_length: int | None = None
    table_hooks: tuple[str, ...] = ()  # those of bias and weight that the plain method has

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For copies and pickle, which cannot import the class: `_without_state` creates it."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _without_state, (self.plain,), *reduced[2:]

    def sampled(self, positions: Tensor) -> Tensor:
        """The sampled positions of the tokens at these positions, int64 `[s]`.

        Raises PositionsExceeded for a position beyond the sample, and ValueError in training before
        `begin_step`.
        """
        if not self.training:
            return self.random.evaluation_positions(positions, self.text_length)
        if self.step is None:
            raise ValueError(
                "random positions are drawn for each training step: call begin_step(step) first, "
                "or eval() to use the positions for evaluation"
            )
        # All processes and layers draw the same sample.
        step, seed, length = self.step
        if len(positions) and int(positions[-1]) >= length:
            raise PositionsExceeded(
                f"position {int(positions[-1])} is beyond the {length} positions of this training "
                "step; pass the length of its sequences to begin_step"
            )
        return self.random.training_positions(length, step, seed)[positions]

    def begin_step(self, step: int, seed: int = 0, length: int | None = None) -> None:
        super().begin_step(step, seed, length)
        if length is None:
            length = self.random.length
        self.step = step, seed, length

    def begin_text(self, length: int | None) -> None:
        super().begin_text(length)
        self.text_length = length

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        # The method's own hook, which comes after this class in the order of inheritance.
        return super().embed(hidden, self.sampled(positions))

    def rotate(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return super().rotate(
            query, key, self.sampled(query_positions), self.sampled(key_positions)
        )

    def stretched(self, factor: float) -> None:
        """None: sampled positions exceed the length of the text, with which the base would grow."""

    def scale_qk(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return super().scale_qk(
            query, key, self.sampled(query_positions), self.sampled(key_positions)
        )

    @property
    def segment(self) -> int:
        """As many queries as have about the range of positions of the method's own segment."""
        # The positions of `length` tokens are spread over the range.
        length = self.text_length or self.random.length
        if self.training and self.step is not None:
            length = self.step[2]
        return max(1, super().segment * length // self.random.range)

    def table(self, distance: Tensor) -> Tensor | None:
        """The method's own table, or its bias and weight `[1 or 2, h, r]`, at all distances below
        r.

        Raises PositionsExceeded for more than r distances.
        """
        # Sampled distances may be any below r, whatever the length of the text.
        self.random.check(distance.shape[-1])
        distances = torch.arange(self.random.range, dtype=torch.float32, device=distance.device)
        if "modify_scores" in self.plain.hooks:
            return super().table(distances)
        # A plain bias and weight become the table of `modify_scores`.
        values = [getattr(self, name)(distances) for name in self.table_hooks]
        if not values:
            return None
        return torch.stack(values)

    def mapped_table(self, distance: Tensor) -> Tensor | None:
        """None: distances of sampled positions are not mapped."""
        return None

    def modify_scores(self, chunk: Chunk) -> Tensor:
        # `lookahead` adds masked keys after the last query, for which there may be no position:
        # they count on.
        last = int(chunk.key_positions[-1])
        if chunk.causal:
            last = int(chunk.query_positions[-1])
        beyond = (chunk.key_positions - last).clamp(min=0)
        keys = self.sampled(chunk.key_positions.clamp(max=last)) + beyond
        queries = self.sampled(chunk.query_positions)
        if "modify_scores" in self.plain.hooks:
            return super().modify_scores(
                replace(chunk, query_positions=queries, key_positions=keys)
            )

        # Bias and weight of each pair, from the table of all distances.
        table = chunk.table
        scores = chunk.scores
        after = None
        assert table is not None
        if not chunk.causal:
            after = table
        tables = by_pair(table, queries, keys, after).to(scores.dtype)  # [1 or 2, h, c, l]
        values = dict(zip(self.table_hooks, tables, strict=True))
        if "weight" in values:
            scores = scores * values["weight"]
        if "bias" in values:
            scores = scores + values["bias"]
        return scores


# One class for each plain one.
_CLASSES: dict[type[PositionalMethod], type[Randomized]] = {}


def randomized(plain: type[PositionalMethod]) -> type[Randomized]:
    """The subclass of a method's class with random positions. Its parameters have the same names:
    the method is no part of another module.
    """
    if plain in _CLASSES:
        return _CLASSES[plain]

    class RandomizedMethod(Randomized, plain):  # type: ignore[misc, valid-type]
        per_pair = plain.per_pair or "modify_scores" not in plain.hooks
        shift_invariant = False

    # Named after the method, as in error messages. Its hooks are set last: a class gets those that
    # it defines, and `Randomized` defines more.
    method: type[Randomized] = RandomizedMethod
    method.plain = plain
    method.hooks = plain.hooks
    method.__name__ = method.__qualname__ = f"Randomized{plain.__name__}"
    method.__module__ = plain.__module__
    _CLASSES[plain] = method
    return method


def _without_state(plain: type[PositionalMethod]) -> Randomized:
    method = randomized(plain)
    return method.__new__(method)


def build_randomized(
    plain: type[PositionalMethod],
    arguments: dict[str, Any],
    shape: ModelShape,
    options: dict[str, Any],
) -> Randomized:
    """The method with the constructor's arguments and these `OPTIONS`. Raises ValueError if the
    method has no positions to randomize, or if they depend on the length of the text.
    """
    for name, value in options.items():
        valid = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if value is not None and not valid:
            raise ValueError(f"{name} {value!r} must be an integer >= 0")
    if options.get("random_range") is None:
        raise ValueError(
            f"{', '.join(options)}: random positions need random_range, the number to sample from"
        )

    # The method itself, with its own options.
    method = randomized(plain)(**arguments)
    if method.length_dependent:
        raise ValueError(
            f"random_range: {plain.__name__} needs consecutive positions for its angles, which "
            "depend on the length of the text; remove the option"
        )
    method.table_hooks = tuple(name for name in ("bias", "weight") if name in method.hooks)

    # Its hooks that use positions. Not `modify_scores` of DAPE without a static bias, and of CoPE
    # and stick-breaking, which count or order the keys of the text.
    positions = method.hooks & {"embed", "rotate", "bias", "weight", "modify_scores"}
    has_table = plain.table is not PositionalMethod.table
    counts_keys = "modify_scores" in positions and not plain.per_pair and not has_table
    if getattr(method, "static", method) is None or counts_keys:
        positions &= {"rotate"}
    if not positions:
        raise ValueError(
            f"random_range: {plain.__name__} has no positions that could be random; remove the "
            "option"
        )

    # A table over distance is looked up for each pair, in both directions or one.
    if method.table_hooks:
        method.hooks = method.hooks - {"bias", "weight"} | {"modify_scores"}
    method.causal_only = method.causal_only or method.signed or "scale_qk" in method.hooks
    method.turns = False  # by positions that may be fractional
    length = options.get("random_length")
    if length is None:
        length = shape.max_positions
    seed = options.get("random_seed") or 0
    method.random = RandomPositions(options["random_range"], length, seed)
    return method


WRAPPERS.update(dict.fromkeys(OPTIONS, build_randomized))


@register("per_layer")
class PerLayer(PositionalMethod):
    """Layer i has the method i modulo n of the n `methods`, each a name or {name: options}:
    ["rotary", "none"].

    Every layer has its own parameters, also those of methods that layers otherwise share. Raises
    ValueError for an empty or nested list, an unknown method or option, and methods that add to the
    embeddings, which come before the layers.
    """

    shared = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        hidden_size: int,
        num_layers: int,
        max_positions: int,
        layer: int,
        methods: Sequence[str | Mapping[str, Mapping[str, Any] | None]] = ("rotary", "none"),
    ):
        super().__init__()
        # All layers check the whole list, so that an error does not depend on the layer.
        entries = self.entries(methods)
        for name, _ in entries:
            cls = method_class(name)
            if issubclass(cls, PerLayer) or "embed" in cls.hooks:
                raise ValueError(
                    f"methods contains {name}, which cannot be the method of a layer; use methods "
                    "that act in attention"
                )

        # The method of this layer.
        name, options = entries[layer % len(entries)]
        shape = ModelShape(num_heads, head_size, hidden_size, num_layers, max_positions, layer)
        method = self.method = build(name, shape, **options)

        # What the method is, for attention and inference modes.
        self.hooks = method.hooks
        self.causal_only = method.causal_only
        self.signed = method.signed
        self.per_pair = method.per_pair
        self.shift_invariant = method.shift_invariant
        self.lookahead = method.lookahead
        self.counts_from_start = method.counts_from_start
        self.length_dependent = method.length_dependent
        self.turns = method.turns
        self.interpolated = method.interpolated
        self.score_scale = method.score_scale

    # Its hooks, and what else it computes.

    def rotate(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.method.rotate(query, key, query_positions, key_positions)

    def scale_qk(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.method.scale_qk(query, key, query_positions, key_positions)

    @property
    def segment(self) -> int:
        return self.method.segment

    def bias(self, distance: Tensor) -> Tensor:
        return self.method.bias(distance)

    def weight(self, distance: Tensor) -> Tensor:
        return self.method.weight(distance)

    def bias_jacobian(self, distance: Tensor) -> TableJacobian | None:
        return self.method.bias_jacobian(distance)

    def weight_jacobian(self, distance: Tensor) -> TableJacobian | None:
        return self.method.weight_jacobian(distance)

    def decay(self, hidden: Tensor) -> Tensor:
        return self.method.decay(hidden)

    def table(self, distance: Tensor) -> Tensor | None:
        return self.method.table(distance)

    def mapped_table(self, distance: Tensor) -> Tensor | None:
        return self.method.mapped_table(distance)

    def modify_scores(self, chunk: Chunk) -> Tensor:
        return self.method.modify_scores(chunk)

    def stretched(self, factor: float) -> PositionalMethod | None:
        return self.method.stretched(factor)

    def begin_step(self, step: int, seed: int = 0, length: int | None = None) -> None:
        self.method.begin_step(step, seed, length)

    def begin_text(self, length: int | None) -> None:
        self.method.begin_text(length)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.method.reset_parameters(generator)

    def statistics(self) -> dict[str, Tensor]:
        return self.method.statistics()

    # How it is built.

    @classmethod
    def from_shape(cls, shape: ModelShape, **options: Any) -> PositionalMethod:
        for name in WRAPPERS:
            if options.get(name) is not None:
                raise ValueError(f"{name}: set it in the list, for each method that uses positions")
        return super().from_shape(shape, **options)

    @classmethod
    def parts(
        cls, *, methods: Any = ("rotary", "none"), **options: Any
    ) -> list[type[PositionalMethod]]:
        return [method_class(name) for name, _ in cls.entries(methods)]

    @classmethod
    def trained_options(
        cls, *, methods: Any = ("rotary", "none"), **options: Any
    ) -> dict[str, Any]:
        """The list with the trained options of each method. Raises ValueError if it is invalid."""
        trained = []
        for name, values in cls.entries(methods):
            trained.append({name: method_class(name).trained_options(**values)})
        return {"methods": trained}

    @staticmethod
    def entries(methods: Any) -> list[tuple[str, Mapping[str, Any]]]:
        """(name, options) for each entry of the option `methods`. Raises ValueError if it is not a
        list of names and {name: options}.
        """
        # A name without options, or a mapping of one name to its options.
        if not isinstance(methods, list | tuple) or not methods:
            raise ValueError(
                f"methods {methods!r} must be a list of methods, such as [rotary, none]"
            )
        entries: list[tuple[str, Mapping[str, Any]]] = []
        for entry in methods:
            name, options = entry, None
            if isinstance(entry, Mapping) and len(entry) == 1:
                ((name, options),) = entry.items()
            if not isinstance(name, str) or not isinstance(options, Mapping | None):
                raise ValueError(
                    f"methods: {entry!r} is neither the name of a method nor {{name: options}}"
                )
            entries.append((name, options or {}))
        return entries
