"""Merging the layers of a configuration: one value per key, and what the user is told about those
that are replaced.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kerple.positional.registry import canonical_name
from megatron.config.schema import ALIASES, FIELDS, SECTIONS, canonical_path
from megatron.config.schema.base import KeyPath
from megatron.config.yaml_files import YamlEntry
from megatron.optimizers.registry import OPTIMIZERS
from megatron.utils.command_line import MAX_INT
from megatron.utils.errors import UserError, shortened
from megatron.utils.secrets import contains_secret, is_secret_name

# A key that names a type -> the key, in the same mapping, of the parameters of that type.
_PARAMETERS = {"type": "params", "schedule_type": "schedule_config"}
# Canonical top-level key -> its entry, which has the original spelling and place for messages.
MergedKeys = dict[str, YamlEntry]


@dataclasses.dataclass
class Messages:
    """What the user is told: problems, which make the configuration invalid, and notices."""

    problems: list[str] = dataclasses.field(default_factory=list)
    notices: list[str] = dataclasses.field(default_factory=list)


def merge(
    entries: Iterable[YamlEntry], overrides: Iterable[YamlEntry], strict: bool, messages: Messages
) -> MergedKeys:
    """One entry per key, from layers: each file, and then all overrides together. A layer overrides
    earlier ones, and mappings are merged key by key. A key that appears twice in one file is a
    problem; in two files, only if `strict`.
    """
    keys: MergedKeys = {}
    for source, of_file in itertools.groupby(entries, key=lambda entry: entry.source):
        changes = _add_layer(keys, _file_layer(of_file, messages))
        if strict:
            messages.problems += [change.as_problem() for change in changes if not change.reason]
        elif differing := [str(change) for change in changes if change.old != change.new]:
            messages.notices.append(f"{source} overrides {'; '.join(differing)}")

    # The command line overrides files on purpose, but does not say which parameters of another type
    # this drops. It need not override itself.
    layer, changes = _override_layer(overrides, keys)
    changes += _dropped(_add_layer(keys, layer))
    if changes:
        noted = "; ".join(map(str, changes))
        messages.notices.append(f"{changes[0].entry.source} overrides {noted}")
    return keys


def contradictions(entries: Iterable[YamlEntry]) -> list["Change"]:
    """The keys to which files give different values, with aliases and mappings as in `merge`.
    Raises UserError if a value cannot be that of a key.
    """
    keys: MergedKeys = {}
    differing = []
    for _, of_file in itertools.groupby(entries, key=lambda entry: entry.source):
        for change in _add_layer(keys, _file_layer(of_file, Messages())):
            if not change.reason and change.old != change.new:
                differing.append(change)
    return differing


def _file_layer(entries: Iterable[YamlEntry], messages: Messages) -> MergedKeys:
    """The entries of one file. Aliases inside mappings become the keys that they stand for."""
    layer: MergedKeys = {}

    def add(name: str, entry: YamlEntry) -> None:
        if name in layer:
            messages.problems.append(
                _duplicate(entry.place, entry.key, layer[name].place, layer[name].key)
            )
        layer[name] = entry

    for entry in entries:
        _check_values(entry)
        # A dot denotes a nested key only on the command line. In a file, it makes the key unknown.
        name = entry.key
        if "." not in name:
            name = canonical_path(name)[0]
        add(name, dataclasses.replace(entry, value=copy.deepcopy(entry.value)))
    for name, entry in list(_pop_nested_aliases(layer)):
        add(name, entry)
    return layer


def _override_layer(
    overrides: Iterable[YamlEntry], keys: MergedKeys
) -> tuple[MergedKeys, list["Change"]]:
    """The entries of overrides, whose keys may have dots; a later one wins. null also resets the
    value in `keys`, those of the files. Returns also what this drops from the files, and which
    overrides replace others.
    """
    layer: MergedKeys = {}
    changes: list[Change] = []
    for entry in overrides:
        _check_values(entry)
        path = canonical_path(entry.key)
        for existing in (keys, layer):
            _check_parents(existing, path, entry.key)

        # A nested key is a mapping with one key.
        value = copy.deepcopy(entry.value)
        for part in reversed(path[1:]):
            value = {part: value}
        name = path[0]
        if len(path) == 1:
            name = entry.key
        addition = {path[0]: dataclasses.replace(entry, key=name, value=value)}
        addition |= dict(_pop_nested_aliases(addition))

        # After a reset, later overrides of parts of the mapping must not be merged with the files.
        if entry.value is None and path[0] in keys:
            changes += _dropped(_add_layer(keys, copy.deepcopy(addition)))
        changes += [change for change in _add_layer(layer, addition) if change.old != change.new]
    return layer, changes


def _dropped(changes: Iterable["Change"]) -> list["Change"]:
    return [change for change in changes if change.reason]


def _check_parents(keys: MergedKeys, path: KeyPath, key: str) -> None:
    """Raises UserError if the parent of a nested key is set, but not to a mapping."""
    values: Any = {name: entry.value for name, entry in keys.items()}
    for depth, part in enumerate(path[:-1], start=1):
        values = values.get(part)
        if values is None:
            return
        if not isinstance(values, dict):
            problem = f"{'.'.join(path[:depth])} is {shortened(repr(values))}, not a mapping"
            raise UserError(f'"{key}" cannot be set: {problem}')


@dataclasses.dataclass(frozen=True)
class Change:
    """A value of earlier layers that the layer of `entry` replaces or, for a `reason`, drops. `key`
    and `old_key` are as they were written, with dots.
    """

    key: str
    old: Any
    old_key: str
    old_place: str
    new: Any
    entry: YamlEntry
    reason: str = ""

    def as_problem(self) -> str:
        return _duplicate(self.entry.place, self.key, self.old_place, self.old_key)

    def as_contradiction(self) -> str:
        """The key with both values, and the names of their files."""
        old, new = shortened(repr(self.old)), shortened(repr(self.new))
        old_file, new_file = Path(self.old_place).name, Path(self.entry.place).name
        return f'"{self.key}" is {old} in {old_file}, {new} in {new_file}'

    def __str__(self) -> str:
        key, new = f'"{self.key}"', self.reason or f"now {shortened(repr(self.new))}"
        if self.entry.line is not None:
            key += f" (line {self.entry.line})"
        return f"{key}: {new}, before {shortened(repr(self.old))} at {self.old_place}"


def _duplicate(place: str, key: str, first_place: str, first_key: str) -> str:
    return f'{place}: "{key}" is already set, as "{first_key}" at {first_place}; remove one of them'


def _add_layer(keys: MergedKeys, layer: MergedKeys) -> list[Change]:
    """Merge a layer into `keys`. Returns what it changes."""
    changes: list[Change] = []

    # Options belong to one positional method, as parameters do to one optimizer.
    if "pos_emb" in keys and "pos_emb" in layer and "pos_emb_options" in keys:
        old, new = keys["pos_emb"].value, layer["pos_emb"]
        if not _same_type(old, new.value):
            _drop(keys, ("pos_emb_options",), f"dropped with pos_emb {old}", new, changes)

    # Mappings are merged, other values replaced.
    for name, entry in layer.items():
        if name not in keys:
            keys[name] = entry
        elif isinstance(keys[name].value, dict) and isinstance(entry.value, dict):
            _merge_mapping(keys, (name,), keys[name].value, entry.value, entry, changes)
        else:
            first = keys[name]
            changes.append(
                Change(entry.key, first.value, first.key, first.place, entry.value, entry)
            )
            _drop_aliases(keys, (name,), "", entry, changes)
            keys[name] = entry
    return changes


def _merge_mapping(
    keys: MergedKeys,
    path: KeyPath,
    values: dict[str, Any],
    added: dict[str, Any],
    entry: YamlEntry,
    changes: list[Change],
) -> None:
    """Merge the mapping `added` of `entry` into `values`, which is at `path` of `keys`."""
    # Parameters of another optimizer or schedule. The rest of --set may contain its type.
    for kind, parameters in _PARAMETERS.items():
        if kind not in added or parameters not in values:
            continue
        old = values.get(kind)
        if old is None and entry.source != keys[path[0]].source:
            old = _default((*path, kind))
        if old is not None and not _same_type(old, added[kind]):
            _drop(keys, (*path, parameters), f"dropped with {kind} {old}", entry, changes)

    # Each value, with the place that it comes from.
    for name, value in added.items():
        inside = (*path, name)
        if name in values and isinstance(values[name], dict) and isinstance(value, dict):
            _merge_mapping(keys, inside, values[name], value, entry, changes)
            continue
        first = keys[path[0]]
        if name in values:
            key = ".".join((entry.key, *inside[1:]))
            old_key = ".".join((first.key, *inside[1:]))
            changes.append(Change(key, values[name], old_key, first.place_of(inside), value, entry))
            _drop_aliases(keys, inside, "", entry, changes)
        values[name] = value
        places = {**first.places, inside: entry.place_of(inside)}
        keys[path[0]] = dataclasses.replace(first, places=places)


def _drop(
    keys: MergedKeys, path: KeyPath, reason: str, entry: YamlEntry, changes: list[Change]
) -> None:
    """Remove a mapping from `keys`, because `entry` does not belong to it. Each of its parameters
    is a change.
    """
    # The mapping that contains it.
    first = keys[path[0]]
    parent: Any = {name: each.value for name, each in keys.items()}
    for part in path[:-1]:
        parent = parent[part]

    # Its parameters, with the keys as they were written.
    dropped = parent[path[-1]]
    if isinstance(dropped, dict):
        for name, value in dropped.items():
            inside = (*path, name)
            key = ".".join((first.key, *inside[1:]))
            changes.append(Change(key, value, key, first.place_of(inside), None, entry, reason))

    # Without it, there are no places of its parameters either.
    if len(path) == 1:
        del keys[path[0]]
    else:
        del parent[path[-1]]
        places = dict(first.places)
        for inside in first.places:
            if inside[: len(path)] == path:
                del places[inside]
        keys[path[0]] = dataclasses.replace(first, places=places)
    _drop_aliases(keys, path, reason, entry, changes)


def _drop_aliases(
    keys: MergedKeys, path: KeyPath, reason: str, entry: YamlEntry, changes: list[Change]
) -> None:
    """Remove the keys that `_pop_nested_aliases` has moved out of the mapping at `path`."""
    for alias, (name, *_) in ALIASES.items():
        is_inside = len(alias) > len(path) and alias[: len(path)] == path
        if is_inside and name in keys and keys[name].key == ".".join(alias):
            first = keys.pop(name)
            changes.append(
                Change(first.key, first.value, first.key, first.place, None, entry, reason)
            )


def _default(path: KeyPath) -> Any:
    """The default of the field at a path; None if there is no field."""
    if path not in FIELDS:
        return None
    section, name = FIELDS[path]
    return SECTIONS[section].model_fields[name].default


def _same_type(one: Any, other: Any) -> bool:
    """Whether two names are of the same optimizer, such as Adam and AdamW, schedule or positional
    method.
    """
    optimizers: Mapping[Any, Any] = OPTIMIZERS
    names = [str(value).lower() for value in (one, other)]
    first, second = (optimizers.get(name, canonical_name(name)) for name in names)
    return bool(first == second)


def _check_values(entry: YamlEntry) -> None:
    """Raises UserError if a value looks like a secret, or is one that no key accepts."""
    # All values inside lists and mappings, without recursion: they may be nested deeply.
    stack: list[tuple[tuple[str, ...], Any]] = [((entry.key,), entry.value)]
    while stack:
        path, value = stack.pop()
        problem = None
        if isinstance(value, dict):
            stack += [((*path, str(key)), child) for key, child in value.items()]
        elif isinstance(value, list | tuple):
            stack += [((*path, str(index)), child) for index, child in enumerate(value)]
        elif isinstance(value, int) and abs(value) > MAX_INT:
            problem = f"is an integer of {value.bit_length():,} bits; the limit is 2^53"
        elif isinstance(value, float) and not math.isfinite(value):
            problem = f"is {value}; numbers must be finite"
        elif isinstance(value, str) and "\0" in value and path[-1] != "prompt_end":
            problem = "contains a null byte; remove it"
        has_secret = isinstance(value, str) and contains_secret(value)
        if has_secret or (value and is_secret_name(path[-1])):
            problem = (
                "looks like a secret, and the configuration is copied into checkpoints, logs and "
                "command lines; remove it (for Weights & Biases, set the environment variable "
                "WANDB_API_KEY)"
            )
        if problem is not None:
            raise UserError(f'{entry.place}: "{".".join(path)}" {problem}')


def _pop_nested_aliases(keys: MergedKeys) -> Iterator[tuple[str, YamlEntry]]:
    """Remove aliases inside mappings, such as optimizer.params.weight_decay; yields the key they
    stand for.
    """
    for alias, path in ALIASES.items():
        if len(alias) == 1 or len(path) > 1 or alias[0] not in keys:
            continue
        entry = keys[alias[0]]
        parent: Any = entry.value
        for part in alias[1:-1]:
            if isinstance(parent, dict):
                parent = parent.get(part)
        if isinstance(parent, dict) and alias[-1] in parent:
            value = parent.pop(alias[-1])
            yield path[0], dataclasses.replace(entry, key=".".join(alias), value=value)
