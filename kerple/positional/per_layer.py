"""Another positional method in each layer, in a repeating pattern.

Llama 4 rotates queries and keys in three of four layers and has no positions in the fourth; RNoPE (arXiv 2501.18795)
alternates between both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from kerple.positional.base import HOOKS, WRAPPERS, ModelShape, PositionalMethod
from kerple.positional.registry import build, method_class, register


@register("per_layer")
class PerLayer(PositionalMethod):
    """Layer i has the method i modulo n of the n `methods`, each a name or {name: options}: ["rotary", "none"].

    Every layer has its own parameters, also those of methods that layers otherwise share. Raises ValueError for an
    empty or nested list, an unknown method or option, and methods that add to the embeddings, which come before the
    layers.
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
        names = self.names(methods)
        for name in names:
            cls = method_class(name)
            if issubclass(cls, PerLayer) or "embed" in cls.hooks:
                raise ValueError(
                    f"methods contains {name}, which cannot be the method of a layer; use methods that act in attention"
                )
        options = self._entry_options(methods[layer % len(names)])
        sizes = (num_heads, head_size, hidden_size, num_layers, max_positions, layer)
        shape = ModelShape(**dict(zip((field.name for field in fields(ModelShape)), sizes, strict=True)))
        self.method = build(names[layer % len(names)], shape, **options)

    @classmethod
    def from_shape(cls, shape: ModelShape, **options: Any) -> PositionalMethod:
        for name in WRAPPERS:
            if options.get(name) is not None:
                raise ValueError(f"{name}: set it in the list, for each method that uses positions")
        return super().from_shape(shape, **options)

    @classmethod
    def parts(cls, *, methods: Any = ("rotary", "none"), **options: Any) -> list[type[PositionalMethod]]:
        return [method_class(name) for name in cls.names(methods)]

    @classmethod
    def trained_options(cls, *, methods: Any = ("rotary", "none"), **options: Any) -> dict[str, Any]:
        """The list as {name: trained options of this method}. Raises ValueError for an invalid list."""
        entries = []
        for name, entry in zip(cls.names(methods), methods, strict=True):
            entries.append({name: method_class(name).trained_options(**cls._entry_options(entry))})
        return {"methods": entries}

    @staticmethod
    def _entry_options(entry: str | Mapping[str, Mapping[str, Any] | None]) -> Mapping[str, Any]:
        values: list[Mapping[str, Any] | None] = [] if isinstance(entry, str) else list(entry.values())
        return (values[0] if values else None) or {}

    @staticmethod
    def names(methods: Any) -> list[str]:
        """The names in the option `methods`. Raises ValueError if it is not a list of names and {name: options}."""
        entries = methods if isinstance(methods, list | tuple) else []
        for entry in entries:
            pairs = list(entry.items()) if isinstance(entry, Mapping) else [(entry, None)]
            valid = len(pairs) == 1 and isinstance(pairs[0][0], str)
            if not valid or not isinstance(pairs[0][1], Mapping | None):
                raise ValueError(f"methods: {entry!r} is neither the name of a method nor {{name: options}}")
        if not entries:
            raise ValueError(f"methods {methods!r} must be a list of methods, such as [rotary, none]")
        return [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]


def _of_the_layer(name: str) -> Any:
    return property(lambda self: getattr(self.method, name))


for _name in (
    *(*HOOKS, "hooks", "segment", "stretched", "table", "mapped_table", "bias_jacobian", "weight_jacobian"),
    *("per_pair", "shift_invariant", "lookahead", "signed", "causal_only", "turns", "length_dependent"),
    *("begin_step", "begin_text", "reset_parameters", "statistics"),
):
    setattr(PerLayer, _name, _of_the_layer(_name))
