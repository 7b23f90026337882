"""Merging keys from several files and the command line into one flat mapping."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import yaml

from megatron.config.declared import ALIASES, KeyPath, canonical_path
from megatron.config.yaml_files import Entry, Place, parse_value
from megatron.utils.errors import UserError

COMMAND_LINE = Place("--set")


@dataclass
class Merged:
    """Canonical top-level keys with their values, and for each how and where it was written."""

    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)

    def add(self, name: str, value: Any, written: str, place: Place) -> None:
        if name in self.values:
            before = f'"{self.written[name]}" at {self.places[name]}'
            raise UserError(f'{place}: "{written}" was given before, as {before}; keep one of them')
        self.replace(name, value, written, place)

    def replace(self, name: str, value: Any, written: str, place: Place) -> None:
        self.values[name], self.written[name], self.places[name] = value, written, place


def merge(entries: Iterable[Entry], overrides: Iterable[str] = ()) -> Merged:
    """Canonical keys of all entries, then the `key=value` overrides over them.

    Raises UserError if a key is given twice: in one file, in two, or as two names of the same thing.
    """
    merged = Merged()
    for entry in entries:
        # A dot leads into a mapping on the command line only; in a file it is part of a name that nobody knows.
        name = entry.key if "." in entry.key else canonical_path(entry.key)[0]
        merged.add(name, copy.deepcopy(entry.value), entry.key, entry.place)
    for name, alias, value in _take_nested_aliases(merged):
        merged.add(name, value, ".".join(alias), merged.places[alias[0]])
    for text in overrides:
        written, value = _read_override(text)
        path = canonical_path(written)
        set_at(merged.values, path, value, written)
        merged.written[path[0]], merged.places[path[0]] = written.split(".")[0], COMMAND_LINE
    for name, alias, value in _take_nested_aliases(merged):
        merged.replace(name, value, ".".join(alias), COMMAND_LINE)
    return merged


def set_at(values: dict[str, Any], path: KeyPath, value: Any, written: str) -> None:
    """Set a value at a path of nested mappings; missing ones are made. Raises UserError if one is not a mapping."""
    *outer, last = path
    for depth, name in enumerate(outer, start=1):
        inner = values.setdefault(name, {})
        if inner is None:
            inner = values[name] = {}
        if not isinstance(inner, dict):
            raise UserError(f'"{written}" cannot be set: {".".join(path[:depth])} is {inner!r}, not a mapping')
        values = inner
    values[last] = value


def _take_nested_aliases(merged: Merged) -> list[tuple[str, KeyPath, Any]]:
    """Take optimizer.params.weight_decay and its like out; gives (the key it stands for, the alias, the value)."""
    taken = []
    for alias, (name, *deeper) in ALIASES.items():
        if len(alias) == 1 or deeper:
            continue
        holder: Any = merged.values
        for part in alias[:-1]:
            holder = holder.get(part) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and alias[-1] in holder:
            taken.append((name, alias, holder.pop(alias[-1])))
    return taken


def _read_override(text: str) -> tuple[str, Any]:
    """`key=value` with the value in YAML -> (key, value)."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"--set {text}: has the form key=value, such as --set train-iters=100 optimizer.params.lr=1e-3")
    try:
        return key, parse_value(value)
    except (yaml.YAMLError, UserError) as error:
        raise UserError(
            f"--set {text}: the value is not YAML; put quotes around text with special characters"
        ) from error
