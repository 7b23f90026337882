"""Reading YAML configuration files, with the line of every top-level key.

The files are GPT-NeoX's: usually JSON-like flow mappings with comments and trailing commas. Unlike PyYAML's SafeLoader,
`1e-4` is a float (YAML 1.1 reads it as a string and requires 1.0e-4), a date is a string, and a key that appears twice
in one mapping is an error.
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
class Entry:
    """A top-level key as the user wrote it. `source` is a file, or an option such as `--set`."""

    key: str
    value: Any
    source: str
    line: int | None = None

    @property
    def place(self) -> str:
        """`FILE:LINE`, or only the source if there is no line."""
        return self.source if self.line is None else f"{self.source}:{self.line}"


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-4 as a float and rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise UserError(f"{self.name}:{line}: key {key!r} is not a string; put it in quotes")
            if key in lines:
                raise UserError(
                    f"{self.name}: key {key!r} appears twice, in lines {lines[key]} and {line}; remove one of them"
                )
            lines[key] = line
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
# Dates remain strings: no key has a date as its value, and JSON has no dates.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def find_file(name: str | Path, config_dir: str | Path | None = None) -> Path:
    """The path of the file `name`, in `config_dir` if given; the ending .yml may be omitted.

    Raises UserError, which suggests files of similar names, if it does not exist.
    """
    path = Path(config_dir or ".") / name
    for candidate in (path, *(path.with_name(path.name + ending) for ending in ENDINGS)):
        if candidate.is_file():
            return candidate
    if not path.parent.is_dir():
        raise UserError(f"{path}: no such file, and no folder {path.parent}")
    names = sorted(file.name for file in path.parent.iterdir() if file.suffix in ENDINGS)
    name_with_ending = path.name if path.suffix in ENDINGS else path.name + ENDINGS[0]
    nearest = difflib.get_close_matches(name_with_ending, names, n=3)
    hint = f"nearest: {', '.join(nearest)}" if nearest else f"{path.parent} contains {len(names)} YAML files"
    raise UserError(f"{path}: no such file; {hint}")


def read_file(path: Path) -> list[Entry]:
    """The top-level keys of a configuration file, in order.

    Raises UserError if the file cannot be read, is not UTF-8 or YAML, or does not contain a mapping.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise UserError(f"{path}:{line}: not UTF-8 text (byte 0x{byte:02x}); save the file as UTF-8") from error
    return parse(text, str(path))


def parse(text: str, source: str) -> list[Entry]:
    """The top-level keys of a YAML text; `source` names it in errors. Raises UserError like `read_file`."""
    loader = None
    try:
        loader = _Loader(text)
        loader.name = source
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            if node is None:
                content = "is empty"
            else:
                content = f"contains a {'scalar' if isinstance(node, yaml.ScalarNode) else 'sequence'}"
            raise UserError(f'{source}: {content}; expected one mapping of keys to values: {{"key": value, ...}}')
        values = loader.construct_document(node)
        lines = {key_node.value: key_node.start_mark.line + 1 for key_node, _ in node.value}
    except yaml.YAMLError as error:
        raise UserError(f"{source}{_describe(error)}") from error
    except RecursionError as error:
        raise UserError(f"{source}: nested too deeply") from error
    finally:
        if loader is not None:
            loader.dispose()
    return [Entry(key, value, source, lines.get(key)) for key, value in values.items()]


def parse_override(text: str) -> tuple[str, Any]:
    """Split `key=value`, with the value in YAML, into key and value. Raises UserError."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"--set {text}: expected key=value, such as --set train-iters=100 optimizer.params.lr=1e-3")
    try:
        loader = _Loader(value)
        loader.name = text
        try:
            return key, loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, UserError) as error:
        raise UserError(
            f"--set {text}: the value is not YAML; put quotes around strings with special characters"
        ) from error


def _describe(error: yaml.YAMLError) -> str:
    """`:LINE: not YAML: PROBLEM`, on one line."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = f":{mark.line + 1}" if mark else ""
    problem = " ".join(str(part) for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part)
    problem = problem or " ".join(str(error).split())
    hint = " (check for a missing comma or bracket before this line, or a tab in the indentation)" if mark else ""
    return f"{line}: not YAML: {problem}{hint}"
