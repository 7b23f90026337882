"""The configuration: keys from YAML files and the command line, merged, assigned to sections and validated.

`load_config` reads files, `Config.from_flat` takes a mapping; both end in `_build`:

    merge      one value per key; `-` and `_` are the same, aliases are resolved, a later file overrides an earlier one,
               --set overrides files; nested mappings are merged key by key
    expand     `~` and `$NAME` in paths
    fill in    placeholders such as `"save": "runs/{pos-emb}/{seed}"`
    assign     each value to its field; unsupported and unknown keys are errors, ignored keys give a notice
    validate   the types in each section (pydantic), combinations of its keys, then of keys of several sections

All problems are collected and reported together.
"""

import copy
import dataclasses
import difflib
import itertools
import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from megatron.config import checks
from megatron.config.checks import validate, warnings_for
from megatron.config.schema.base import (
    WILDCARD,
    ConfigSection,
    KeyPath,
    field_aliases,
    field_path,
    has_placeholders,
    integral,
    is_integer,
    is_path,
)
from megatron.config.schema.data import DataConfig, TokenizerConfig
from megatron.config.schema.model import ModelConfig
from megatron.config.schema.optimizer import OptimizerConfig, PrecisionConfig, ScheduleConfig
from megatron.config.schema.output import CheckpointConfig, LoggingConfig
from megatron.config.schema.parallel import BatchConfig, LauncherConfig, ParallelConfig
from megatron.config.schema.training import CurriculumConfig, EvaluationConfig, GenerationConfig, TrainingConfig
from megatron.config.yaml_files import PACKAGED, YamlEntry, find_file, parse_override, read_file
from megatron.optimizers.registry import OPTIMIZERS
from megatron.utils.command_line import MAX_INT, SET_OPTION
from megatron.utils.errors import UserError, shortened
from megatron.utils.files import expanded_path
from megatron.utils.secrets import contains_secret, is_secret_name
from megatron.utils.typed_json import problem_text

_MAX_SUGGESTIONS = 3
# A key that names a type -> the key, in the same mapping, of the parameters of that type.
_PARAMETERS = {"type": "params", "schedule_type": "schedule_config"}

# Canonical top-level key -> its entry, which has the original spelling and place for messages.
MergedKeys = dict[str, YamlEntry]


class Config(BaseModel):
    """A complete, validated configuration. Frozen; created by load_config, from_flat or updated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    parallel: ParallelConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    curriculum: CurriculumConfig
    precision: PrecisionConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    training: TrainingConfig
    logging: LoggingConfig
    evaluation: EvaluationConfig
    generation: GenerationConfig
    launcher: LauncherConfig

    _flat: dict[str, Any] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def from_flat(cls, mapping: Mapping[str, Any], source: str = "configuration") -> "Config":
        """A configuration from GPT-NeoX's keys, nested as in its YAML files.

        `source` names the mapping in errors. Raises UserError.
        """
        return build(entries_of(mapping, source))

    def to_flat(self) -> dict[str, Any]:
        """The keys that were set, in GPT-NeoX's form (`optimizer: {type, params}` ...), with underscores.

        The result can be stored as JSON; from_flat returns the same configuration.
        """
        return copy.deepcopy(self._flat)

    def updated(self, **keys: Any) -> "Config":
        """A validated copy with other values. Nested keys have dots: updated(**{"optimizer.params.lr": 1e-3})."""
        return build(entries_of(self.to_flat(), "configuration"), entries_of(keys, "changes"))

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages for keys that are ignored, that a later file overrides, or whose meaning is easily mistaken."""
        return self._notices


# Sections by name, and the paths of their fields in the YAML. A path that ends in WILDCARD collects all keys of its
# mapping that no other field claims.
SECTIONS: dict[str, type[ConfigSection]] = {}
FIELDS: dict[KeyPath, tuple[str, str]] = {}  # path -> (section, field)
ALIASES: dict[KeyPath, KeyPath] = {}  # other path with the same meaning -> path
for _section, _field in Config.model_fields.items():
    SECTIONS[_section] = _model = typing.cast(type[ConfigSection], _field.annotation)
    for _name, _field in _model.model_fields.items():
        FIELDS[field_path(_name, _field)] = (_section, _name)
        ALIASES.update(dict.fromkeys(field_aliases(_field), field_path(_name, _field)))
# Keys whose value is a mapping that contains fields, such as `optimizer` and `optimizer.params`.
MAPPINGS: set[KeyPath] = {path[:depth] for path in FIELDS for depth in range(1, len(path))}


def load_config(
    paths: Sequence[str | Path],
    config_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    strict: bool = False,
) -> Config:
    """Merge YAML files and `key=value` overrides into one validated configuration.

    Args:
        paths: files, in `config_dir` if given, or else in the working directory or among this project's own; the
            ending .yml may be omitted. A later file overrides the keys of an earlier one; `notices` lists these keys.
        overrides: `key=value` with the value in YAML; nested keys with dots (optimizer.params.lr=1e-3).
        strict: a key in two files is an error.

    Raises UserError, whose message lists all problems, each with file, line and key.
    """
    files = [find_file(path, config_dir) for path in paths]
    for file in files:
        if files.count(file) > 1:
            raise UserError(f"{file} is given twice; remove one of them")
    changes = [YamlEntry(key, value, SET_OPTION) for key, value in map(parse_override, overrides)]
    config = build((entry for file in files for entry in read_file(file)), changes, strict=strict)
    packaged = [str(file.relative_to(PACKAGED)) for file in files if file.is_relative_to(PACKAGED)]
    if packaged and config_dir is None:
        config._notices = (f"{', '.join(packaged)}: this project's own, from {PACKAGED}", *config._notices)
    return config


def canonical_path(key: str) -> KeyPath:
    """The path of a dotted key: `-` and `_` are the same in its first part, and an alias is resolved."""
    first, *rest = key.split(".")
    path = (first.replace("-", "_"), *rest)
    return ALIASES.get(path, path)


def entries_of(mapping: Mapping[str, Any], source: str) -> list[YamlEntry]:
    """The keys of a mapping, for `build`; `source` names it in errors."""
    return [YamlEntry(key, value, source) for key, value in mapping.items()]


def build(entries: Iterable[YamlEntry], overrides: Iterable[YamlEntry] = (), *, strict: bool = False) -> Config:
    """The configuration of the entries of files, in their order, and of overrides, whose keys may have dots.

    strict: a key in two files is an error. Raises UserError.
    """
    messages = _Messages()
    keys = _merge(entries, overrides, strict, messages)
    _expand_paths(keys, messages)
    _fill_placeholders(keys, messages)
    values = _assign(keys, messages)
    sections: dict[str, Any] = {}
    for name, model in SECTIONS.items():
        try:
            sections[name] = model.model_validate(values[name])
            messages.problems += sections[name].contradictions()
        except ValidationError as error:
            messages.problems += _describe(error, name, keys)
    config = None
    if len(sections) == len(SECTIONS):
        config = Config(**sections)
        config._flat.update({name: copy.deepcopy(entry.value) for name, entry in keys.items()})
        messages.problems += validate(config)
    if config is None or messages.problems:
        count = len(messages.problems)
        heading = [f"{count} problems in the configuration:"] if count > 1 else []
        raise UserError("\n  ".join([*heading, *messages.problems]))
    config._notices = (*messages.notices, *warnings_for(config))
    return config


@dataclasses.dataclass
class _Messages:
    """What the user is told: problems, which make the configuration invalid, and notices."""

    problems: list[str] = dataclasses.field(default_factory=list)
    notices: list[str] = dataclasses.field(default_factory=list)


# -- merging ----------------------------------------------------------------------------------------------------------


def _merge(
    entries: Iterable[YamlEntry], overrides: Iterable[YamlEntry], strict: bool, messages: _Messages
) -> MergedKeys:
    """One entry per key, from layers: each file, and then all overrides together. A layer overrides earlier ones, and
    mappings are merged key by key. A key that appears twice in one file is a problem; in two files, only if `strict`.
    """
    keys: MergedKeys = {}
    for source, of_file in itertools.groupby(entries, key=lambda entry: entry.source):
        changes = _add_layer(keys, _file_layer(of_file, messages))
        if strict:
            messages.problems += [change.as_problem() for change in changes if not change.reason]
        elif differing := [str(change) for change in changes if change.old != change.new]:
            messages.notices.append(f"{source} overrides {'; '.join(differing)}")

    # The command line overrides files on purpose, but does not say which parameters of another type this drops.
    changes = _add_layer(keys, _override_layer(overrides, keys))
    if dropped := [str(change) for change in changes if change.reason]:
        messages.notices.append(f"{changes[0].entry.source} overrides {'; '.join(dropped)}")
    return keys


def _file_layer(entries: Iterable[YamlEntry], messages: _Messages) -> MergedKeys:
    """The entries of one file. Aliases inside mappings become the keys that they stand for."""
    layer: MergedKeys = {}

    def add(name: str, entry: YamlEntry) -> None:
        if name in layer:
            messages.problems.append(_duplicate(entry.place, entry.key, layer[name].place, layer[name].key))
        layer[name] = entry

    for entry in entries:
        _check_values(entry)
        # A dot denotes a nested key only on the command line. In a file, it makes the key unknown.
        name = entry.key if "." in entry.key else canonical_path(entry.key)[0]
        add(name, dataclasses.replace(entry, value=copy.deepcopy(entry.value)))
    for name, entry in list(_pop_nested_aliases(layer)):
        add(name, entry)
    return layer


def _override_layer(overrides: Iterable[YamlEntry], keys: MergedKeys) -> MergedKeys:
    """The entries of overrides, whose keys may have dots; a later one wins. `keys` are those of the files."""
    layer: MergedKeys = {}
    for entry in overrides:
        _check_values(entry)
        path = canonical_path(entry.key)
        for existing in (keys, layer):
            _check_parents(existing, path, entry.key)
        value = copy.deepcopy(entry.value)
        for part in reversed(path[1:]):
            value = {part: value}
        name = entry.key if len(path) == 1 else path[0]
        addition = {path[0]: dataclasses.replace(entry, key=name, value=value)}
        addition |= dict(_pop_nested_aliases(addition))
        _add_layer(layer, addition)
    return layer


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
class _Change:
    """A value of earlier layers that the layer of `entry` replaces or, for a `reason`, drops."""

    key: str
    old: Any
    old_key: str
    old_place: str
    new: Any
    entry: YamlEntry
    reason: str = ""

    def as_problem(self) -> str:
        return _duplicate(self.entry.place, self.key, self.old_place, self.old_key)

    def __str__(self) -> str:
        line = "" if self.entry.line is None else f" (line {self.entry.line})"
        new = self.reason or f"now {shortened(repr(self.new))}"
        return f'"{self.key}"{line}: {new}, before {shortened(repr(self.old))} at {self.old_place}'


def _duplicate(place: str, key: str, first_place: str, first_key: str) -> str:
    return f'{place}: "{key}" is already set, as "{first_key}" at {first_place}; remove one of them'


def _add_layer(keys: MergedKeys, layer: MergedKeys) -> list[_Change]:
    """Merge a layer into `keys`. Returns what it changes."""
    changes: list[_Change] = []

    # Options belong to one positional method, as parameters do to one optimizer.
    if "pos_emb" in keys and "pos_emb" in layer and "pos_emb_options" in keys:
        old, new = keys["pos_emb"].value, layer["pos_emb"]
        if old != new.value:
            _drop(keys, ("pos_emb_options",), f"dropped with pos_emb {old}", new, changes)

    for name, entry in layer.items():
        if name not in keys:
            keys[name] = entry
        elif isinstance(keys[name].value, dict) and isinstance(entry.value, dict):
            _merge_mapping(keys, (name,), keys[name].value, entry.value, entry, changes)
        else:
            first = keys[name]
            changes.append(_Change(entry.key, first.value, first.key, first.place, entry.value, entry))
            _drop_aliases(keys, (name,))
            keys[name] = entry
    return changes


def _merge_mapping(
    keys: MergedKeys,
    path: KeyPath,
    values: dict[str, Any],
    added: dict[str, Any],
    entry: YamlEntry,
    changes: list[_Change],
) -> None:
    """Merge the mapping `added` of `entry` into `values`, which is at `path` of `keys`."""
    for kind, parameters in _PARAMETERS.items():
        old = values.get(kind)
        if old is None and entry.source != keys[path[0]].source:  # the rest of --set may contain the type
            old = _default((*path, kind))
        if kind in added and parameters in values and not (old is None or _same_type(old, added[kind])):
            _drop(keys, (*path, parameters), f"dropped with {kind} {old}", entry, changes)

    for name, value in added.items():
        inside = (*path, name)
        if name in values and isinstance(values[name], dict) and isinstance(value, dict):
            _merge_mapping(keys, inside, values[name], value, entry, changes)
            continue
        first = keys[path[0]]
        if name in values:
            key = ".".join((entry.key, *inside[1:]))
            old_key = ".".join((first.key, *inside[1:]))
            changes.append(_Change(key, values[name], old_key, first.place_of(inside), value, entry))
            _drop_aliases(keys, inside)
        values[name] = value
        keys[path[0]] = dataclasses.replace(first, places={**first.places, inside: entry.place_of(inside)})


def _drop(keys: MergedKeys, path: KeyPath, reason: str, entry: YamlEntry, changes: list[_Change]) -> None:
    """Remove a mapping from `keys`, because `entry` does not belong to it."""
    first = keys[path[0]]
    parent: Any = {name: each.value for name, each in keys.items()}
    for part in path[:-1]:
        parent = parent[part]
    key = ".".join((first.key, *path[1:]))
    changes.append(_Change(key, parent[path[-1]], key, first.place_of(path), None, entry, reason))
    if len(path) == 1:
        del keys[path[0]]
    else:
        del parent[path[-1]]
        places = {inside: place for inside, place in first.places.items() if inside[: len(path)] != path}
        keys[path[0]] = dataclasses.replace(first, places=places)
    _drop_aliases(keys, path)


def _drop_aliases(keys: MergedKeys, path: KeyPath) -> None:
    """Remove the keys that `_pop_nested_aliases` has moved out of the mapping at `path`."""
    for alias, (name, *_) in ALIASES.items():
        if len(alias) > len(path) and alias[: len(path)] == path and name in keys and keys[name].key == ".".join(alias):
            del keys[name]


def _default(path: KeyPath) -> Any:
    """The default of the field at a path; None if there is no field."""
    if path not in FIELDS:
        return None
    section, name = FIELDS[path]
    return SECTIONS[section].model_fields[name].default


def _same_type(one: Any, other: Any) -> bool:
    """Whether two values of `type` mean the same: Adam and AdamW are one optimizer."""
    specs: Mapping[Any, Any] = OPTIMIZERS
    names = [str(value).lower() for value in (one, other)]
    first, second = (specs.get(name, name) for name in names)
    return bool(first == second)


def _check_values(entry: YamlEntry) -> None:
    """Raises UserError if a value looks like a secret, or is a number or text that no key accepts."""
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
        if (value and is_secret_name(path[-1])) or (isinstance(value, str) and contains_secret(value)):
            problem = (
                "looks like a secret, and the configuration is copied into checkpoints, logs and command lines; remove "
                "it (for Weights & Biases, set the environment variable WANDB_API_KEY)"
            )
        if problem is not None:
            raise UserError(f'{entry.place}: "{".".join(path)}" {problem}')


def _pop_nested_aliases(keys: MergedKeys) -> Iterator[tuple[str, YamlEntry]]:
    """Remove aliases inside mappings, such as optimizer.params.weight_decay; yields the key they stand for."""
    for alias, path in ALIASES.items():
        if len(alias) == 1 or len(path) > 1 or alias[0] not in keys:
            continue
        entry = keys[alias[0]]
        parent: Any = entry.value
        for part in alias[1:-1]:
            parent = parent.get(part) if isinstance(parent, dict) else None
        if isinstance(parent, dict) and alias[-1] in parent:
            yield path[0], dataclasses.replace(entry, key=".".join(alias), value=parent.pop(alias[-1]))


# -- paths and placeholders -------------------------------------------------------------------------------------------


def _expand_paths(keys: MergedKeys, messages: _Messages) -> None:
    """Expand every path, here and not where it is used: other hosts and later runs may have another environment."""

    def expand(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [expand(item) for item in value]
        return expanded_path(value) if isinstance(value, str) else value

    for path, (section, name) in FIELDS.items():
        entry = keys.get(path[0])
        if entry is not None and is_path(SECTIONS[section].model_fields[name]):
            try:
                keys[path[0]] = dataclasses.replace(entry, value=expand(entry.value))
            except UserError as error:
                messages.problems.append(f"{_where(path, keys)}: {error}")


def _fill_placeholders(keys: MergedKeys, messages: _Messages) -> None:
    """Replace each `{key}` by the value of that key, or its default.

    It is a problem if the key does not exist, has no value, or its value is not a string or number.
    """

    def lookup(match: re.Match[str], where: str) -> str:
        path = (match[1].replace("-", "_"),)
        if path not in FIELDS:
            raise UserError(f"{where}: {match[0]} is not a key with a single value, such as {{pos-emb}} or {{seed}}")
        section, name = FIELDS[path]
        field = SECTIONS[section].model_fields[name]
        value: Any = keys[path[0]].value if path[0] in keys else None
        if value is None:
            value = field.default
        if is_integer(field):
            value = integral(value)
        if value is None or value is PydanticUndefined:
            raise UserError(f"{where}: {match[0]} has no value; set {match[1]}")
        if isinstance(value, bool) or not isinstance(value, str | int | float) or "{" in str(value):
            text = shortened(repr(value))
            raise UserError(f"{where}: {match[0]} is {text}; it must be a number, or a string without braces")
        return str(value)

    for path, (section, name) in FIELDS.items():
        entry = keys.get(path[0])
        if entry is None or not isinstance(entry.value, str):
            continue
        if has_placeholders(SECTIONS[section].model_fields[name]):
            try:
                text = re.sub(r"\{([^{}]*)\}", partial(lookup, where=_where(path, keys)), entry.value)
                keys[path[0]] = dataclasses.replace(entry, value=text)
            except UserError as error:
                messages.problems.append(str(error))


# -- assigning to fields ----------------------------------------------------------------------------------------------


def _assign(keys: MergedKeys, messages: _Messages) -> dict[str, dict[str, Any]]:
    """The values by section and field. Adds a notice for each key that is ignored.

    An unsupported key of GPT-NeoX is a problem, and so is an unknown key; the message suggests similar ones.
    """
    # What a key is: a field, a mapping of fields, a key of GPT-NeoX, or unknown.
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    flat = {name: entry.value for name, entry in keys.items()}

    def place(path: KeyPath, value: Any) -> None:
        dotted = ".".join(path)
        rest = (*path[:-1], WILDCARD)
        if path in FIELDS:
            section, name = FIELDS[path]
            sections[section][name] = value
        elif path in MAPPINGS:
            if isinstance(value, dict):
                for key, child in value.items():
                    place((*path, str(key)), child)
            elif value is not None:
                text = f"must be a mapping of {', '.join(_children(path))}, not {shortened(repr(value))}"
                messages.problems.append(f"{_where(path, keys)} {text}")
        elif dotted in checks.KNOWN_KEYS:
            reason = checks.unsupported_reason(dotted, value, flat)
            if reason is not None:
                messages.problems.append(f"{_where(path, keys)} is a GPT-NeoX key that is not supported: {reason}")
            elif dotted in checks.IGNORED and value:  # false and null request nothing
                messages.notices.append(f"{_where(path, keys)} is ignored: {checks.IGNORED[dotted]}")
        elif rest in FIELDS and path[-1] in (_allowed_rest(rest) or {path[-1]}):
            section, name = FIELDS[rest]
            sections[section].setdefault(name, {})[path[-1]] = value
        else:
            messages.problems.append(_describe_unknown_key(path, keys))

    # All keys. A mapping places its children.
    for name, entry in keys.items():
        place((name,), entry.value)
    return sections


def _where(path: KeyPath, keys: MergedKeys) -> str:
    """`FILE:LINE: "key"`, with the key as it was written."""
    entry = keys[path[0]]
    return f'{entry.place_of(path)}: "{shortened(".".join((entry.key, *path[1:])))}"'


def _children(path: KeyPath) -> list[str]:
    """Names of the supported keys inside the mapping at this path."""
    depth = len(path)
    names = {known[depth] for known in (*FIELDS, *MAPPINGS, *ALIASES) if known[:depth] == path and len(known) > depth}
    return sorted((names - {WILDCARD}) | _allowed_rest((*path, WILDCARD)))


def _allowed_rest(path: KeyPath) -> set[str]:
    """Key names that the field at a WILDCARD path is limited to; empty if it accepts any."""
    if path not in FIELDS:
        return set()
    section, name = FIELDS[path]
    annotation = SECTIONS[section].model_fields[name].annotation
    key_type, _ = typing.get_args(annotation)
    return set(typing.get_args(key_type))


def _describe_unknown_key(path: KeyPath, keys: MergedKeys) -> str:
    reason = checks.ELSEWHERE.get(path[0]) if len(path) == 1 else None
    if reason is not None:
        return f"{_where(path, keys)} is not supported: {reason}"
    # Suggest supported keys of the same mapping or nested in it (optimizer.params.betas for betas). If none is
    # similar, suggest other keys of GPT-NeoX.
    supported = {name: (*path[:-1], name) for name in _children(path[:-1])}
    for known in FIELDS:
        if known[: len(path) - 1] == path[:-1] and known[-1] != WILDCARD:
            supported.setdefault(known[-1], known)
    unsupported = {known[-1]: known for known in (tuple(key.split(".")) for key in checks.KNOWN_KEYS)}
    for candidates in (supported, unsupported):
        names = difflib.get_close_matches(path[-1].replace("-", "_"), candidates, n=_MAX_SUGGESTIONS, cutoff=0.6)
        if names:
            break
    else:
        candidates, names = supported, difflib.get_close_matches(path[-1], supported, n=1, cutoff=0.0)
    nearest = ", ".join(".".join(candidates[name]) for name in names)
    return f"{_where(path, keys)} is not a known key; nearest: {nearest} (all keys: configs/neox_arguments.md)"


def _describe(error: ValidationError, section: str, keys: MergedKeys) -> Iterator[str]:
    """The problems that pydantic reports, each as `FILE:LINE: "key": PROBLEM`.

    A default that was computed from a wrong value may be wrong too; only the value itself is reported.
    """
    for problem in error.errors():
        if problem["type"] == "missing" or _path_of(problem, section)[0] in keys:
            yield _describe_problem(problem, section, keys)


def _path_of(problem: ErrorDetails, section: str) -> KeyPath:
    path = next(path for path, place in FIELDS.items() if place == (section, problem["loc"][0]))
    return tuple(part for part in path if part != WILDCARD)


def _describe_problem(problem: ErrorDetails, section: str, keys: MergedKeys) -> str:
    field, *inside = problem["loc"]
    path = _path_of(problem, section)
    if problem["type"] == "missing" and not inside:
        sources = ", ".join(dict.fromkeys(entry.source for entry in keys.values())) or "configuration"
        description = SECTIONS[section].model_fields[str(field)].description
        return f'{sources}: key "{".".join(path)}" is missing: {description}'
    path = (*path, *(str(part) for part in inside if part != "[key]"))
    return f"{_where(path, keys)}: {problem_text(problem)}, not {shortened(repr(problem['input']))}"
