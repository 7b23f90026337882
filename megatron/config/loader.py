"""The configuration: keys from YAML files and the command line, merged, assigned to sections and
validated.

`load_config` reads files, `Config.from_flat` takes a mapping; both end in `build`:

    merge      one value per key; `-` and `_` are the same, aliases are resolved, a later file
               overrides an earlier one, --set overrides files; nested mappings are merged by key
    expand     `~` and `$NAME` in paths
    fill in    placeholders such as `"save": "runs/{pos-emb}/{seed}"`
    assign     each value to its field; unsupported and unknown keys are errors, ignored keys give
               a notice
    validate   the types in each section (pydantic), combinations of its keys, then of keys of
               several sections

All problems are collected and reported together.
"""

import copy
import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from megatron.config import checks
from megatron.config.checks import validate, warnings_for
from megatron.config.merging import MergedKeys, Messages, merge
from megatron.config.schema import ALIASES, FIELDS, MAPPINGS, SECTIONS, Sections
from megatron.config.schema.base import (
    WILDCARD,
    KeyPath,
    has_placeholders,
    integral,
    is_integer,
    is_path,
)
from megatron.config.yaml_files import PACKAGED, YamlEntry, find_file, parse_override, read_file
from megatron.utils.command_line import SET_OPTION
from megatron.utils.errors import UserError, shortened
from megatron.utils.files import expanded_path
from megatron.utils.typed_json import problem_text

_MAX_SUGGESTIONS = 3


class Config(Sections):
    """A complete, validated configuration. Frozen; created by load_config, from_flat or updated."""

    _flat: dict[str, Any] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def from_flat(cls, mapping: Mapping[str, Any], source: str = "configuration") -> "Config":
        """A configuration from GPT-NeoX's keys, nested as in its YAML files.

        `source` names the mapping in errors. Raises UserError.
        """
        return build(entries_of(mapping, source))

    def to_flat(self) -> dict[str, Any]:
        """The keys that were set, in GPT-NeoX's form (`optimizer: {type, params}` ...), with
        underscores.

        The result can be stored as JSON; from_flat returns the same configuration.
        """
        return copy.deepcopy(self._flat)

    def updated(self, **keys: Any) -> "Config":
        """A validated copy with other values. Nested keys have dots:
        updated(**{"optimizer.params.lr": 1e-3}).
        """
        return build(entries_of(self.to_flat(), "configuration"), entries_of(keys, "changes"))

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages for keys that are ignored, that a later file overrides, or whose meaning is
        easily mistaken.
        """
        return self._notices


def load_config(
    paths: Sequence[str | Path],
    config_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    strict: bool = False,
) -> Config:
    """Merge YAML files and `key=value` overrides into one validated configuration.

    Args:
        paths: files, in `config_dir` if given, or else in the working directory or among this
            project's own; the ending .yml may be omitted. A later file overrides the keys of an
            earlier one; `notices` lists these keys.
        overrides: `key=value` with the value in YAML; nested keys with dots
            (optimizer.params.lr=1e-3).
        strict: a key in two files is an error.

    Raises UserError, whose message lists all problems, each with file, line and key.
    """
    # A file that is given twice would override itself.
    files = [find_file(path, config_dir) for path in paths]
    for file in files:
        if files.count(file) > 1:
            raise UserError(f"{file} is given twice; remove one of them")

    # Overrides come after the files.
    changes = [YamlEntry(key, value, SET_OPTION) for key, value in map(parse_override, overrides)]
    config = build((entry for file in files for entry in read_file(file)), changes, strict=strict)
    packaged = [str(file.relative_to(PACKAGED)) for file in files if file.is_relative_to(PACKAGED)]
    if packaged and config_dir is None:
        config._notices = (
            f"{', '.join(packaged)}: this project's own, from {PACKAGED}",
            *config._notices,
        )
    return config


def entries_of(mapping: Mapping[str, Any], source: str) -> list[YamlEntry]:
    """The keys of a mapping, for `build`; `source` names it in errors."""
    return [YamlEntry(key, value, source) for key, value in mapping.items()]


def build(
    entries: Iterable[YamlEntry], overrides: Iterable[YamlEntry] = (), *, strict: bool = False
) -> Config:
    """The configuration of the entries of files, in their order, and of overrides, whose keys may
    have dots.

    strict: a key in two files is an error. Raises UserError.
    """
    # One value per key and field.
    messages = Messages()
    keys = merge(entries, overrides, strict, messages)
    _expand_paths(keys, messages)
    _fill_placeholders(keys, messages)
    values = _assign(keys, messages)

    # The sections, and combinations of their keys.
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
        lines = messages.problems
        if len(lines) > 1:
            lines = [f"{len(lines)} problems in the configuration:", *lines]
        raise UserError("\n  ".join(lines))
    config._notices = (*messages.notices, *warnings_for(config))
    return config


def _expand_paths(keys: MergedKeys, messages: Messages) -> None:
    """Expand every path, here and not where it is used: other hosts and later runs may have another
    environment.
    """

    def expand(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [expand(item) for item in value]
        if isinstance(value, str):
            return expanded_path(value)
        return value

    # Only strings in fields of paths; a placeholder in them is filled in later.
    for path, (section, name) in FIELDS.items():
        entry = keys.get(path[0])
        if entry is not None and is_path(SECTIONS[section].model_fields[name]):
            try:
                keys[path[0]] = dataclasses.replace(entry, value=expand(entry.value))
            except UserError as error:
                messages.problems.append(f"{_where(path, keys)}: {error}")


def _fill_placeholders(keys: MergedKeys, messages: Messages) -> None:
    """Replace each `{key}` by the value of that key, or its default.

    It is a problem if the key does not exist, has no value, or its value is not a string or number.
    """

    def lookup(match: re.Match[str], where: str) -> str:
        path = (match[1].replace("-", "_"),)
        if path not in FIELDS:
            raise UserError(
                f"{where}: {match[0]} is not a key with a single value, such as {{pos-emb}} or "
                f"{{seed}}"
            )

        # The value that is set, or else the default.
        section, name = FIELDS[path]
        field, value = SECTIONS[section].model_fields[name], None
        if path[0] in keys:
            value = keys[path[0]].value
        if value is None:
            value = field.default
        if is_integer(field):
            value = integral(value)

        # It must be part of a file name.
        if value is None or value is PydanticUndefined:
            raise UserError(f"{where}: {match[0]} has no value; set {match[1]}")
        if isinstance(value, bool) or not isinstance(value, str | int | float) or "{" in str(value):
            text = shortened(repr(value))
            raise UserError(
                f"{where}: {match[0]} is {text}; it must be a number, or a string without braces"
            )
        return str(value)

    # Only some fields have placeholders; braces in others are text.
    for path, (section, name) in FIELDS.items():
        entry = keys.get(path[0])
        if entry is None or not isinstance(entry.value, str):
            continue
        if has_placeholders(SECTIONS[section].model_fields[name]):
            replace = partial(lookup, where=_where(path, keys))
            try:
                text = re.sub(r"\{([^{}]*)\}", replace, entry.value)
                keys[path[0]] = dataclasses.replace(entry, value=text)
            except UserError as error:
                messages.problems.append(str(error))


def _assign(keys: MergedKeys, messages: Messages) -> dict[str, dict[str, Any]]:
    """The values by section and field. Adds a notice for each key that is ignored.

    An unsupported key of GPT-NeoX is a problem, and so is an unknown key; the message suggests
    similar ones.
    """
    # What a key is: a field, a mapping of fields, a key of GPT-NeoX, or unknown.
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    flat = {name: entry.value for name, entry in keys.items()}

    def place(path: KeyPath, value: Any) -> None:
        # A key of a section, a mapping of such keys, or a key of GPT-NeoX that no section has.
        dotted = ".".join(path)
        rest = (*path[:-1], WILDCARD)
        if path in FIELDS:
            section, name = FIELDS[path]
            if value is not None:  # null: the default
                sections[section][name] = value
        elif path in MAPPINGS:
            if isinstance(value, dict):
                for key, child in value.items():
                    place((*path, str(key)), child)
            elif value is not None:
                names = ", ".join(_children(path))
                content = f" of {names}" if names else ""
                messages.problems.append(
                    f"{_where(path, keys)} must be a mapping{content}, not {shortened(repr(value))}"
                )
        elif dotted in checks.KNOWN_KEYS:
            reason = checks.unsupported_reason(dotted, value, flat)
            if reason is not None:
                messages.problems.append(
                    f"{_where(path, keys)} is a GPT-NeoX key that is not supported: {reason}"
                )
            elif dotted in checks.IGNORED and value:  # false and null request nothing
                messages.notices.append(
                    f"{_where(path, keys)} is ignored: {checks.IGNORED[dotted]}"
                )
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
    depth, names = len(path), _allowed_rest((*path, WILDCARD))
    for known in (*FIELDS, *MAPPINGS, *ALIASES):
        if known[:depth] == path and len(known) > depth:
            names.add(known[depth])
    return sorted(names - {WILDCARD})


def _allowed_rest(path: KeyPath) -> set[str]:
    """Key names that the field at a WILDCARD path is limited to; empty if it accepts any."""
    if path not in FIELDS:
        return set()
    section, name = FIELDS[path]
    annotation = SECTIONS[section].model_fields[name].annotation
    key_type, _ = typing.get_args(annotation)
    return set(typing.get_args(key_type))


def _describe_unknown_key(path: KeyPath, keys: MergedKeys) -> str:
    if len(path) == 1 and path[0] in checks.ELSEWHERE:
        return f"{_where(path, keys)} is not supported: {checks.ELSEWHERE[path[0]]}"

    # Suggest supported keys of the same mapping or nested in it (optimizer.params.betas for betas).
    # If none is similar, suggest other keys of GPT-NeoX.
    supported = {name: (*path[:-1], name) for name in _children(path[:-1])}
    for known in FIELDS:
        if known[: len(path) - 1] == path[:-1] and known[-1] != WILDCARD:
            supported.setdefault(known[-1], known)
    unsupported: dict[str, KeyPath] = {}
    for key in checks.KNOWN_KEYS:
        known = tuple(key.split("."))
        unsupported[known[-1]] = known

    # The first of the two with similar names; without any, the most similar supported one.
    wanted = path[-1].replace("-", "_")
    for candidates in (supported, unsupported):
        names = difflib.get_close_matches(wanted, candidates, n=_MAX_SUGGESTIONS, cutoff=0.6)
        if names:
            break
    else:
        candidates = supported
        names = difflib.get_close_matches(path[-1], supported, n=1, cutoff=0.0)
    nearest = ", ".join(".".join(candidates[name]) for name in names)
    return (
        f"{_where(path, keys)} is not a known key; nearest: {nearest} (all keys: "
        "configs/neox_arguments.md)"
    )


def _describe(error: ValidationError, section: str, keys: MergedKeys) -> Iterator[str]:
    """The problems that pydantic reports, each as `FILE:LINE: "key": PROBLEM`.

    A default that was computed from a wrong value may be wrong too; only the value itself is
    reported.
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
        sources = ", ".join(dict.fromkeys(entry.source for entry in keys.values()))
        description = SECTIONS[section].model_fields[str(field)].description
        place = sources or "configuration"
        return f'{place}: key "{".".join(path)}" is missing: {description}'
    path += tuple(str(part) for part in inside if part != "[key]")
    return f"{_where(path, keys)}: {problem_text(problem)}, not {shortened(repr(problem['input']))}"
