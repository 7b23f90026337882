"""Reading YAML configuration files, with the line of every top-level key.

The files are GPT-NeoX's: usually JSON-like flow mappings with comments and trailing commas. Unlike
PyYAML's SafeLoader, numbers have no notations of YAML 1.1 that surprise (`1e-4` is a float, 0123 is
decimal, 1:30 is a string), a date is a string, and a key that appears twice in one mapping is an
error.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.utils import files
from megatron.utils.environment import check_parameters
from megatron.utils.errors import UserError, first_line, shortened
from megatron.utils.files import expanded_path

ENDINGS = (".yml", ".yaml")
# The configurations of this project. In a checkout, this is a link to configs/.
PACKAGED = (Path(__file__).parents[1] / "configs").resolve()
MAX_BYTES = 1_000_000
# Values and characters of a file whose aliases are expanded. Without aliases, no file of MAX_BYTES
# has as many.
MAX_SIZE = 2 * MAX_BYTES
MAX_DEPTH = 100
_STANDARD_TAG = "tag:yaml.org,2002:"
_STRING_TAG, _MERGE_TAG = f"{_STANDARD_TAG}str", f"{_STANDARD_TAG}merge"
# The types of JSON. A set, binary data or a list of pairs is the value of no key.
_TYPES = ("map", "seq", "str", "int", "float", "bool", "null")


@dataclass(frozen=True)
class YamlEntry:
    """A top-level key as the user wrote it. `source` is a file, or an option such as `--set`;
    `places` are those of the paths inside the value that come from another file or option.
    """

    key: str
    value: Any
    source: str
    line: int | None = None
    places: Mapping[tuple[str, ...], str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """`FILE:LINE`, or only the source if there is no line."""
        if self.line is None:
            return self.source
        return f"{self.source}:{self.line}"

    def place_of(self, path: tuple[str, ...]) -> str:
        """The place of the value at a path, which begins with the canonical name of this key."""
        for depth in range(len(path), 0, -1):
            if path[:depth] in self.places:
                return self.places[path[:depth]]
        return self.place


class _YamlProblem(Exception):
    """A YAML text that cannot be read: the line, if known, and what is wrong."""

    def __init__(self, line: int | None, problem: str):
        super().__init__(problem)
        self.line = line


class _Loader(yaml.SafeLoader):
    """SafeLoader with the numbers of YAML 1.2. Raises _YamlProblem for keys that are not strings or
    appear twice.
    """

    merged_pairs = 0

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check the keys of a mapping, and replace a merge key by the pairs that it adds: the
        mapping's own keys win, then the earlier mapping of the list
        (https://yaml.org/type/merge.html). PyYAML does this while it constructs values, but its
        releases differ in which value wins.
        """
        # The mapping's own pairs, and those of its merge keys.
        node = super().compose_mapping_node(anchor)
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag not in (_STRING_TAG, _MERGE_TAG):
                text = "(a list or mapping)"
                if isinstance(key, yaml.ScalarNode):
                    text = shortened(key.value)
                raise _YamlProblem(line, f"key {text} is not a string; put it in quotes")
            if key.value in own:
                first, _ = own[key.value]
                raise _YamlProblem(
                    line,
                    f"key {shortened(repr(key.value))} appears twice, in lines "
                    f"{first.start_mark.line + 1} and {line}; remove one of them",
                )
            own[key.value] = (key, value)
            if key.tag == _MERGE_TAG:
                mappings = [value]
                if isinstance(value, yaml.SequenceNode):
                    mappings = value.value
                if not all(isinstance(mapping, yaml.MappingNode) for mapping in mappings):
                    raise _YamlProblem(
                        line, f"{key.value} needs a mapping or a list of mappings, such as *anchor"
                    )
                for mapping in reversed(mappings):
                    self.merged_pairs += len(mapping.value)
                    if self.merged_pairs > MAX_SIZE:
                        raise _YamlProblem(
                            line, f"merge keys (<<) add more than {MAX_SIZE:,} keys; write them out"
                        )
                    merged.update((pair[0].value, pair) for pair in mapping.value)
        node.value = [pair for pair in (merged | own).values() if pair[0].tag != _MERGE_TAG]
        return node

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        """Decimal, with leading zeros too, unless it starts with 0x or 0b."""
        text = str(self.construct_scalar(node)).replace("_", "").lower()
        if text.lstrip("+-").startswith(("0x", "0b")):
            return int(text, 0)
        return int(text, 10)


# Numbers without octal and sexagesimal ones. Dates remain strings: no key has a date as its value,
# and JSON has none.
_REPLACED = {f"{_STANDARD_TAG}{name}" for name in ("int", "float", "timestamp")}
_Loader.yaml_implicit_resolvers = {}
for _character, _resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
    _kept = [(tag, pattern) for tag, pattern in _resolvers if tag not in _REPLACED]
    _Loader.yaml_implicit_resolvers[_character] = _kept
for _name, _pattern in {
    "int": r"[-+]?(\d[\d_]*|0x[\da-fA-F_]+|0b[01_]+)$",
    "float": r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)([eE][-+]?\d+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$",
}.items():
    _Loader.add_implicit_resolver(
        _STANDARD_TAG + _name, re.compile(_pattern), list("-+.0123456789")
    )
_Loader.add_constructor(f"{_STANDARD_TAG}int", _Loader.construct_decimal)


def _check_nodes(root: yaml.Node) -> None:
    """Raises _YamlProblem if the values are not those of JSON, or if aliases make them infinite,
    too many or too deep.

    Every node is visited once, however many aliases refer to it.
    """
    # By id: size and depth; None while the node is visited.
    visited: dict[int, tuple[int, int] | None] = {}

    def visit(node: yaml.Node) -> tuple[int, int]:
        line = node.start_mark.line + 1
        if id(node) in visited:
            known = visited[id(node)]
            if known is None:
                raise _YamlProblem(
                    line, "an alias refers to a value that contains it; write the value out"
                )
            return known
        kind = node.tag.removeprefix(_STANDARD_TAG)
        if kind != node.tag and kind not in _TYPES:
            raise _YamlProblem(
                line, f"!!{kind} is a type that no key has; write a list, mapping, string or number"
            )
        visited[id(node)] = None

        # An alias is the node that it refers to.
        children: list[yaml.Node] = []
        size, depth = 1, 0
        if isinstance(node, yaml.ScalarNode):
            size += len(node.value)
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        else:
            children = [each for pair in node.value for each in pair]
        for child in children:
            child_size, child_depth = visit(child)
            size += child_size
            depth = max(depth, child_depth + 1)
            if size > MAX_SIZE:
                raise _YamlProblem(
                    line, f"aliases (*name) expand to more than {MAX_SIZE:,} characters"
                )
            if depth > MAX_DEPTH:
                raise _YamlProblem(
                    line, f"lists and mappings are nested more than {MAX_DEPTH} levels deep"
                )
        visited[id(node)] = size, depth
        return size, depth

    visit(root)


def find_file(name: str | Path, config_dir: str | Path | None = None) -> Path:
    """The path of the file `name`, in `config_dir` if given, or else in the working directory or in
    `PACKAGED`. The ending .yml may be omitted. `~` and `$NAME` are expanded.

    Raises UserError, which suggests files of similar names, if it does not exist.
    """
    name = expanded_path(str(name))
    path = Path(name)
    paths = [path, PACKAGED / name]
    if config_dir and (folder := expanded_path(str(config_dir))):
        path = Path(folder) / name
        paths = [path]

    # The name itself comes before the name with an ending.
    try:
        for place in paths:
            for ending in ("", *ENDINGS):
                candidate = place.with_name(place.name + ending)
                if candidate.is_file():
                    return candidate
        if path.exists():
            raise UserError(f"{path} is not a regular file")
        folders = list(dict.fromkeys(place.parent for place in paths if place.parent.is_dir()))
        if not folders:
            raise UserError(f"{path}: no such file, and no folder {path.parent}")
        names: set[str] = set()
        for place in folders:
            names.update(file.name for file in place.iterdir() if file.suffix in ENDINGS)
    except (OSError, ValueError) as error:  # a name that is too long or empty
        problem = getattr(error, "strerror", None) or error
        raise UserError(f"{shortened(str(path))}: {problem}") from error

    # Files of similar names.
    wanted = path.name
    if path.suffix not in ENDINGS:
        wanted += ENDINGS[0]
    if nearest := difflib.get_close_matches(wanted, sorted(names), n=3):
        hint = f"nearest: {', '.join(nearest)}"
    else:
        searched = " and ".join(str(place.resolve()) for place in folders)
        hint = f"searched {searched}, which have {len(names)} YAML files"
    raise UserError(f"{path}: no such file; {hint}")


def read_file(path: Path) -> list[YamlEntry]:
    """The top-level keys of a configuration file, in order.

    Raises UserError if the file cannot be read, is too large, is not UTF-8 or YAML, or does not
    contain a mapping.
    """
    content = files.read_file(path, MAX_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise UserError(
            f"{path}:{line}: not UTF-8 text (byte 0x{byte:02x}); save the file as UTF-8"
        ) from error
    return parse(text, str(path))


def parse(text: str, source: str) -> list[YamlEntry]:
    """The top-level keys of a YAML text, which errors call `source`. Raises UserError."""
    try:
        node, values = _load(text)
    except _YamlProblem as error:
        place = source
        if error.line is not None:
            place = f"{source}:{error.line}"
        raise UserError(f"{place}: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        content = "is empty"
        if node is not None:
            content = f"contains a {type(node).__name__.removesuffix('Node').lower()}"
        raise UserError(
            f'{source}: {content}; expected one mapping of keys to values: {{"key": value, ...}}'
        )
    lines = {key_node.value: key_node.start_mark.line + 1 for key_node, _ in node.value}
    return [YamlEntry(key, value, source, lines.get(key)) for key, value in values.items()]


def parse_override(text: str) -> tuple[str, Any]:
    """Split `key=value`, with the value in YAML, into key and value. Raises UserError."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        example = "expected key=value, such as --set train-iters=100 optimizer.params.lr=1e-3"
        raise UserError(f"--set {shortened(text)}: {example}")
    try:
        return key, _load(value)[1]
    except _YamlProblem as error:
        hint = "put quotes around strings with special characters"
        raise UserError(f"--set {shortened(text)}: {error}; {hint}") from error


def _load(text: str) -> tuple[yaml.Node | None, Any]:
    """The root node of a YAML text and its value; None for an empty text. Raises _YamlProblem."""
    try:
        check_parameters("PyYAML", yaml.SafeLoader, "compose_mapping_node", "self", "anchor")
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _check_nodes(node)
        return node, loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        parts = (getattr(error, "context", None), getattr(error, "problem", None))
        problem = " ".join(str(part) for part in parts if part) or " ".join(str(error).split())
        line, text = None, f"not YAML: {shortened(problem, 500)}"
        if mark:
            line = mark.line + 1
            text += (
                " (check for a missing comma or bracket before this line, or a tab in the "
                "indentation)"
            )
        raise _YamlProblem(line, text) from error
    except (ValueError, LookupError, RecursionError) as error:  # an explicit tag, such as !!int abc
        raise _YamlProblem(None, f"not YAML: {first_line(error)}") from error
