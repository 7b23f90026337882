"""Reading YAML configuration files: where they are, what they hold, and on which line.

The files are GPT-NeoX's: usually JSON-like flow mappings with comments and trailing commas. Differences to PyYAML's
reading: a number such as 1e-4 is a float (YAML 1.1 wants 1.0e-4 and takes it for text), a date is text, and a key that
stands twice in one mapping is an error.
"""

import difflib
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.utils.errors import UserError

ENDINGS = (".yml", ".yaml")


@dataclass(frozen=True)
class Place:
    """Where a key was written: a file and line, or a description such as `--set`."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Entry:
    """One top-level key as it was written."""

    key: str
    value: Any
    place: Place


class _Loader(yaml.SafeLoader):
    """SafeLoader with floats such as 1e-4, and without silent duplicates."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise UserError(f"{self.name}:{line}: key {key!r} is not text; put it in quotes")
            if key in first:
                raise UserError(
                    f"{self.name}: key {key!r} stands twice, in lines {first[key]} and {line}; keep one of them"
                )
            first[key] = line
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
# A date is of no use in a configuration, and not JSON: such text stays text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def find_file(name: str | Path, config_dir: str | Path | None = None) -> Path:
    """The file called `name`, in config_dir if given; the ending .yml may be left out.

    Raises UserError, with files of similar names, if there is none.
    """
    path = Path(config_dir or ".") / name
    for candidate in (path, *(path.with_name(path.name + ending) for ending in ENDINGS)):
        if candidate.is_file():
            return candidate
    if not path.parent.is_dir():
        raise UserError(f"{path}: no such file, and no folder {path.parent}")
    there = sorted(file.name for file in path.parent.iterdir() if file.suffix in ENDINGS)
    wanted = path.name if path.suffix in ENDINGS else path.name + ENDINGS[0]
    near = difflib.get_close_matches(wanted, there, n=3)
    hint = f"; nearest: {', '.join(near)}" if near else f"; {path.parent} holds {len(there)} YAML files"
    raise UserError(f"{path}: no such file{hint}")


def read_file(path: Path) -> list[Entry]:
    """The top-level keys of a configuration file, in order, each with its line.

    Raises UserError if the file cannot be read, is not UTF-8, not YAML, or holds anything but one mapping.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: not UTF-8 text (byte 0x{raw[error.start]:02x}); save the file as UTF-8"
        ) from error
    return parse(text, str(path))


def parse(text: str, source: str) -> list[Entry]:
    """The top-level keys of a YAML text; `source` names it in errors. Raises UserError."""
    loader = None
    try:
        loader = _Loader(text)
        loader.name = source
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            held = "nothing" if node is None else f"a {node.id}"
            raise UserError(
                f'{source}: holds {held}; a configuration file holds one mapping of keys to values: {{"key": value}}'
            )
        values = loader.construct_document(node)
        lines = {key_node.value: key_node.start_mark.line + 1 for key_node, _ in node.value}
    except yaml.YAMLError as error:
        raise UserError(f"{source}{_describe(error)}") from error
    except RecursionError as error:
        raise UserError(f"{source}: nested too deeply") from error
    finally:
        if loader is not None:
            loader.dispose()
    return [Entry(key, value, Place(source, lines.get(key))) for key, value in values.items()]


def parse_value(text: str) -> Any:
    """A single YAML value, such as what follows `=` on the command line. Raises yaml.YAMLError or UserError."""
    loader = _Loader(text)
    loader.name = text
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _describe(error: yaml.YAMLError) -> str:
    """`:LINE: not YAML: what is wrong`, on one line."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f":{mark.line + 1}" if mark else ""
    problem = " ".join(str(part) for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part)
    if not problem:
        problem = " ".join(str(error).split())
    hint = " (is a comma or a bracket missing before this line, or a tab in its indentation?)" if mark else ""
    return f"{where}: not YAML: {problem}{hint}"
