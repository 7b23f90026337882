"""A sweep's file: base configuration, axes, and how every run is evaluated.

config-dir: configs                     # default
output: runs/sweeps/kerple
base: [small_bf16.yml]                  # files that all runs share
axes:                                   # the runs are all combinations, the last axis varying fastest
  dataset: [datasets/github.yml, datasets/arxiv.yml]
  pos_emb: [pos_emb/kerple_log.yml, pos_emb/alibi.yml]
  seed: [{seed: 1235}, {seed: 1236}]    # a choice is a file, several files, or keys
set: {train-iters: 50000}               # over all files; nested keys with dots
evaluation: {lengths: [512, 1024], modes: [full, window@512], tokens: 1000000}   # options of evaluate.py
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import Config, UserError, load_config
from megatron.config.yaml_files import find_file, read_file

KEYS = ("config_dir", "output", "base", "axes", "set", "evaluation", "title")


@dataclass(frozen=True)
class Choice:
    """One value of an axis: the name of a folder, and what it adds to the configuration."""

    label: str
    files: tuple[str, ...]
    keys: Mapping[str, Any]


@dataclass(frozen=True)
class Sweep:
    """A whole sweep as its file says it. `evaluation`: words for evaluate.py's command line."""

    path: Path
    title: str
    output: Path
    config_dir: Path
    base: tuple[str, ...]
    axes: Mapping[str, tuple[Choice, ...]]
    settings: Mapping[str, Any]
    evaluation: tuple[str, ...]

    def combinations(self) -> Iterator[tuple[Choice, ...]]:
        return itertools.product(*self.axes.values())

    def configuration(self, choices: tuple[Choice, ...]) -> Config:
        """The merged configuration of one run, without its folders. Raises UserError naming the run."""
        files = [*self.base, *(file for choice in choices for file in choice.files)]
        keys = {**self.settings}
        for choice in choices:
            keys |= choice.keys
        # JSON is YAML, which is what --set takes.
        overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        try:
            return load_config(files, self.config_dir, overrides)
        except UserError as error:
            raise UserError(f"{self.path}: run {run_name(choices)}: {error}") from error


def run_name(choices: tuple[Choice, ...]) -> str:
    """The labels of the choices, which are the folders of the run."""
    return "/".join(choice.label for choice in choices)


def read_sweep(path: str | Path) -> Sweep:
    """Read and check a sweep's file. Raises UserError naming file, line and key."""
    path = find_file(path)
    entries = {entry.key.replace("-", "_"): entry for entry in read_file(path)}
    for name, entry in entries.items():
        if name not in KEYS:
            raise UserError(f"{entry.place}: key {entry.key!r} is not known; a sweep has {', '.join(KEYS)}")
    for name in ("output", "base", "axes", "evaluation"):
        if name not in entries:
            raise UserError(f"{path}: key {name!r} is missing; a sweep needs output, base, axes and evaluation")
    value = {name: entry.value for name, entry in entries.items()}
    wanted = {"output": str, "config_dir": str, "title": str, "axes": dict, "set": dict, "evaluation": dict}
    for name, kind in wanted.items():
        if name in value and not isinstance(value[name], kind):
            noun = "a mapping" if kind is dict else "text"
            raise UserError(f"{entries[name].place}: {name} must be {noun}, not {value[name]!r}")
    config_dir = Path(value.get("config_dir", "configs"))
    return Sweep(
        path=path,
        title=value.get("title", f"Sweep {path.stem}"),
        output=Path(value["output"]),
        config_dir=config_dir,
        base=_files(value["base"], f"{entries['base'].place}: base"),
        axes=_axes(value["axes"], config_dir, str(entries["axes"].place)),
        settings=value.get("set", {}),
        evaluation=_words(value["evaluation"], str(entries["evaluation"].place)),
    )


def _axes(axes: Mapping[str, Any], config_dir: Path, place: str) -> dict[str, tuple[Choice, ...]]:
    if not axes:
        raise UserError(f"{place}: axes must name at least one axis, such as pos_emb: [pos_emb/kerple_log.yml]")
    found = {}
    for axis, values in axes.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{place}: axis {axis} must be a list of choices, not {values!r}")
        choices = tuple(_choice(value, config_dir, f"{place}: axis {axis}") for value in values)
        labels = [choice.label for choice in choices]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise UserError(f"{place}: axis {axis} has two choices called {twice}; give them names: {{name: ..., ...}}")
        found[axis] = choices
    return found


def _choice(value: Any, config_dir: Path, place: str) -> Choice:
    """A file, a list of files, or keys; among the keys, `name` is the label and `files` are files."""
    if isinstance(value, dict) and value:
        keys = dict(value)
        files = _files(keys.pop("files", []), f"{place}: files")
        label = keys.pop("name", None)
        if label is None:
            label = "-".join([Path(file).stem for file in files] + [_plain(one, place) for one in keys.values()])
        return Choice(_label(str(label), place), files, keys)
    files = _files(value, place)
    if not files:
        raise UserError(f"{place}: a choice must be a file, a list of files or a mapping of keys, not {value!r}")
    for file in files:
        find_file(file, config_dir)
    return Choice(_label("-".join(Path(file).stem for file in files), place), files, {})


def _plain(value: Any, place: str) -> str:
    if isinstance(value, str | int | float):
        return str(value)
    raise UserError(f"{place}: a choice with the value {value!r} has no short name; give it one: {{name: ..., ...}}")


def _label(text: str, place: str) -> str:
    if not re.fullmatch(r"[\w.@+=-]+", text) or text.startswith("."):
        raise UserError(f"{place}: {text!r} cannot be a folder's name; give the choice a name: {{name: ..., ...}}")
    return text


def _files(value: Any, place: str) -> tuple[str, ...]:
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise UserError(f"{place}: must be a file or a list of files, not {value!r}")
    return tuple(files)


def _words(options: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """{lengths: [512, 1024], verbose: true} -> --lengths 512 1024 --verbose"""
    words: list[str] = []
    for name, value in options.items():
        if value is False or value is None:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        if not all(isinstance(one, str | int | float) for one in values):
            raise UserError(f"{place}: evaluation: {name} must be a value or a list of values, not {value!r}")
        words += [f"--{name}", *map(str, values)]
    return tuple(words)
