"""The sweep file (docs/experiments.md): base configuration, axes, evaluation of every run."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.config import Config, UserError, load_config
from megatron.config.schema import canonical_path
from megatron.config.yaml_files import YamlEntry, find_file, read_file
from megatron.utils.files import expanded_path

# Key -> type of its value; None: checked when it is used.
KEYS: dict[str, type | None] = {
    "config_dir": str,
    "output": str,
    "base": None,
    "axes": dict,
    "set": dict,
    "evaluation": None,
    "title": str,
}
REQUIRED_KEYS = ("output", "base", "axes", "evaluation")


@dataclass(frozen=True)
class Choice:
    """A choice on an axis: its label, which names a folder, and the files and keys it adds."""

    label: str
    files: tuple[str, ...]
    keys: Mapping[str, Any]


@dataclass(frozen=True)
class Sweep:
    """The contents of a sweep file. `evaluation`: the arguments of each call of evaluate.py."""

    path: Path
    title: str
    output: Path
    config_dir: Path | None
    base: tuple[str, ...]
    axes: Mapping[str, tuple[Choice, ...]]
    overrides: Mapping[str, Any]
    evaluation: tuple[tuple[str, ...], ...]

    def combinations(self) -> Iterator[tuple[Choice, ...]]:
        """The choices of every run, one choice per axis."""
        return itertools.product(*self.axes.values())

    def configuration(self, choices: tuple[Choice, ...]) -> Config:
        """The merged configuration of a run, without its folders. Raises UserError."""
        self._check_axes(choices)
        files = [*self.base, *(file for choice in choices for file in choice.files)]
        overrides = []
        for keys in (self.overrides, *(choice.keys for choice in choices)):
            overrides += [f"{key}={_as_yaml(value)}" for key, value in keys.items()]
        return load_config(files, self.config_dir, overrides, strict=True)

    def _check_axes(self, choices: tuple[Choice, ...]) -> None:
        """Raises UserError if the choices of two axes set the same key, or one a key inside a
        mapping of the other.
        """
        pairs = itertools.combinations(zip(self.axes, choices, strict=True), 2)
        for (first_axis, first), (second_axis, second) in pairs:
            for first_key, second_key in itertools.product(first.keys, second.keys):
                paths = canonical_path(first_key), canonical_path(second_key)
                if all(one == other for one, other in zip(*paths, strict=False)):
                    raise UserError(
                        f"axis {first_axis} sets {first_key}, and axis {second_axis} sets "
                        f"{second_key}, so one would override the other; set it in one of the axes "
                        "only, or combine them into one axis"
                    )


def run_name(choices: tuple[Choice, ...]) -> str:
    """The labels of the choices, joined to a relative path."""
    return "/".join(choice.label for choice in choices)


def read_sweep(path: str | Path) -> Sweep:
    """Read and check a sweep file. Raises UserError that names the file, line and key."""
    # Keys and the types of their values.
    path = find_file(path)
    entries: dict[str, YamlEntry] = {}
    for entry in read_file(path):
        name = entry.key.replace("-", "_")
        if name in entries:
            raise UserError(
                f"{entry.place}: key {entry.key!r} is {entries[name].key!r} again; remove one of "
                "them"
            )
        if name not in KEYS:
            raise UserError(
                f"{entry.place}: unknown key {entry.key!r}; the keys of a sweep are "
                f"{', '.join(KEYS)}"
            )
        value_type = KEYS[name]
        if value_type is not None and not isinstance(entry.value, value_type):
            expected = "a mapping" if value_type is dict else "a string"
            raise UserError(f"{entry.place}: {name} must be {expected}, not {entry.value!r}")
        entries[name] = entry
    for name in REQUIRED_KEYS:
        if name not in entries:
            raise UserError(
                f"{path}: key {name!r} is missing; a sweep requires {', '.join(REQUIRED_KEYS)}"
            )

    # Axes: a run takes one choice of each, so their labels must differ.
    values = {name: entry.value for name, entry in entries.items()}
    config_dir = None
    if "config_dir" in values:
        config_dir = Path(expanded_path(values["config_dir"]))
    if not values["axes"]:
        raise UserError(
            f"{entries['axes'].place}: axes must contain at least one axis, for example "
            "pos_emb: [pos_emb/kerple_log.yml]"
        )
    axes = {}
    for axis, choices in values["axes"].items():
        place = f"{entries['axes'].place}: axis {axis}"
        if not isinstance(choices, list) or not choices:
            raise UserError(f"{place} must be a list of choices, not {choices!r}")
        axes[axis] = tuple(_parse_choice(choice, config_dir, place) for choice in choices)
        labels = [choice.label for choice in axes[axis]]
        duplicate = next((label for label in labels if labels.count(label) > 1), None)
        if duplicate is not None:
            raise UserError(
                f"{place} has two choices named {duplicate}; give them names: {{name: ..., ...}}"
            )

    # Evaluations, one or several.
    place = entries["evaluation"].place
    evaluations = values["evaluation"]
    if not isinstance(evaluations, list):
        evaluations = [evaluations]
    if not evaluations or not all(isinstance(options, dict) for options in evaluations):
        raise UserError(
            f"{place}: evaluation must be a mapping or a list of mappings, not "
            f"{values['evaluation']!r}"
        )

    # Paths and command lines.
    _check_spellings(values.get("set", ()), f"{path}: set")
    return Sweep(
        path=path,
        title=values.get("title", f"Sweep {path.stem}"),
        output=Path(expanded_path(values["output"])),
        config_dir=config_dir,
        base=_file_list(values["base"], f"{entries['base'].place}: base"),
        axes=axes,
        overrides=values.get("set", {}),
        evaluation=tuple(_command_line(options, place) for options in evaluations),
    )


def _as_yaml(value: Any) -> str:
    """In one line, with the type of each scalar: PyYAML reads 1e-3 as a string, and so does not
    quote this string.
    """
    return yaml.safe_dump(
        value,
        default_style='"',
        default_flow_style=True,
        allow_unicode=True,
        width=math.inf,
        sort_keys=False,
    )


def _check_spellings(keys: Iterable[str], place: str) -> None:
    """Raises UserError if two of the keys are spellings of the same configuration key."""
    spellings: dict[tuple[str, ...], str] = {}
    for key in keys:
        first = spellings.setdefault(canonical_path(key), key)
        if first != key:
            raise UserError(f"{place}: key {key!r} is {first!r} again; remove one of them")


def _command_line(options: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """{lengths: [512, 1024], verbose: true} as --lengths 512 1024 --verbose."""
    arguments: list[str] = []
    for name, value in options.items():
        if value is False or value is None:
            continue
        items = value if isinstance(value, list) else [value]
        if value is True:
            items = []
        if not all(isinstance(item, str | int | float) for item in items):
            raise UserError(
                f"{place}: evaluation: {name} must be a value or a list of values, not {value!r}"
            )
        arguments += [f"--{name}", *map(str, items)]
    return tuple(arguments)


def _parse_choice(value: Any, config_dir: Path | None, place: str) -> Choice:
    """A file, a list of files, or a mapping of keys, in which `name` is the label and `files` lists
    files.
    """
    # Keys need a name if their values do not give one.
    keys: dict[str, Any] = {}
    label = None
    if isinstance(value, dict) and value:
        keys = dict(value)
        files = _file_list(keys.pop("files", []), f"{place}: files")
        label = keys.pop("name", None)
        _check_spellings(keys, place)
        for key_value in keys.values():
            if label is None and not isinstance(key_value, str | int | float):
                raise UserError(
                    f"{place}: cannot derive a name from {key_value!r}; name it: {{name: ..., ...}}"
                )
    else:
        files = _file_list(value, place)
        if not files:
            raise UserError(
                f"{place}: a choice must be a file, a list of files or a mapping of keys, not "
                f"{value!r}"
            )
        for file in files:
            find_file(file, config_dir)

    # The label is the name of a folder.
    if label is None:
        label = "-".join([*(Path(file).stem for file in files), *map(str, keys.values())])
    label = str(label)
    if not re.fullmatch(r"[\w.@+=-]+", label) or label.startswith("."):
        raise UserError(
            f"{place}: {label!r} is not a valid folder name; name the choice: {{name: ..., ...}}"
        )
    return Choice(label, files, keys)


def _file_list(value: Any, place: str) -> tuple[str, ...]:
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise UserError(f"{place}: must be a file or a list of files, not {value!r}")
    return tuple(files)
