"""Hostile training configurations, drawn by hypothesis: values, keys, YAML syntax and --set options.

Each must load or end in one UserError; one that loads must train or be rejected by name.
"""

import contextlib
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hypothesis import strategies as st

from megatron.config.loader import FIELDS, SECTIONS
from megatron.config.neox_compat import known_keys
from megatron.config.schema.base import WILDCARD
from tests.soak.cases import Case, Draw, pick
from tests.soak.changes import damage
from tests.support.checkpoints import write_corpus
from tests.support.runs import training_settings

# Values that some key accepts and most reject; without folders in which a configuration would be right to write.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, -1, 7, 16, 33, 1000, 2**16, 10**6, 2**31 - 1, 2**31, 2**32, 10**9, 10**12, 2**62,
    2**63, -(2**63), 2**64, 10**400, 0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 1e-30, 1e-300, 5e-324, 1e30, 1e38, 1e300,
    "", " ", "a", "nowhere", "/dev/zero", "/proc/self/mem", "x" * 300, "x/" * 3000, "a\0b", "\x1b[31mred",
    "\ud800", "é" * 200, "{seed}", "{", "}{", "{save}", "%s", "$HOME", "~", "-1", "1e5", "true", "null", "runs/é\n\t",
    [], [0], [1, 2], [-1], [1e300], ["a"], [[]], [None], {}, {"a": 1}, {"": 1}, {"device": "cpu"}, {"type": "x"},
)  # fmt: skip
# Scalars in YAML's own notation.
SCALARS = (
    ".inf", "-.inf", ".nan", "1e999", "-1e999", "0x" + "f" * 5000, "9" * 5000, "0b101", "0o17", "017", "1_000", "1:30",
    "!!int abc", "!!int '1'", "!!float x", "!!bool maybe", "!!null x", "!!str 5", "!!set {a}", "!!binary YWJj",
    "!!timestamp 2026-01-01", "!!omap [a: 1]", "!!pairs [a: 1]", "!!python/object/apply:os.system [ls]",
    "!!python/name:os.system", "!own 1", "&a [*a]", "*nowhere", "&a 1", "'", '"', '"\\0"', '"\\ud800"', "|", ">", "?",
    "-", "[", "{", "]", "}", "#", "@", "`", "%", "=", "<<", "yes", "~", "2026-01-01", "[" * 1000, "{a: " * 200,
    "'" + "x" * 100_000 + "'", "[" + "1, " * 20_000 + "]",
)  # fmt: skip
_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + previous] * 9)}]\n"
    for previous, name in zip("abcdefgh", "bcdefghi", strict=True)
)
# Whole files.
FILES: tuple[bytes, ...] = (
    b"", b"\0", b"\xff\xfe{}", b"\xef\xbb\xbf", b"---\n---\n", b"null", b"[]", b"1", b"{}", b"{}{}",
    b"%YAML 9.9\n---\n{}", b"a: 1\n\tb: 2", b"\x80", b"{1: 2}", b"{null: 1}", b"{[a]: 1}",
    b"{<<: 1}", b"{<<: [{seed: 1}, {seed: 2}]}",
    b"a: &a {b: *a}", b"? ? ? ? a", b"- " * 1000, b"[" * 100_000, b"{" * 100_000, b"x" * 2_000_000, b"a: 1\n" * 1000,
    b"\n" * 999_999, _BOMB.encode(), _BOMB.replace("[", "{<<: [").replace("]", "]}").encode(),
    _BOMB.replace("a: &a", "pos-emb-options: &a", 1).encode(),
    "\n".join(f"key_{index}: {index}" for index in range(20_000)).encode(),
)  # fmt: skip


KEYS = (
    "", " ", ".", "a.b", "x" * 1000, "x" * 100_000, "\0", "\x1b[31m", "é", "SEED", "Seed", "seed ", "--seed", "*", "..",
    "api_key", "optimizer.params.lr", "fp16.enabled", "__class__", "model", "_flat", "num-layers", "num_layers",
)  # fmt: skip
_PLAIN: dict[Any, tuple[Any, ...]] = {
    bool: (True, False),
    int: (0, 1, 2, 3, 4, 5, 8, 10, 16, 32, 64, 100, 1000, 10**5, 10**9),
    float: (0, 0.001, 0.1, 0.5, 0.9, 1, 1.0, 2.0, 8.0, 100.0, 1e6, 1e20),
    str: ("a", "runs/a", "none", "kerple_log", "rotary", "type:gpt", "uniform", "8,1,1", "1", "cpu"),
}

paths = st.sampled_from(list(FIELDS))
texts = st.text(st.characters(exclude_characters="/"), max_size=20).filter(lambda text: ".." not in text)
values = st.one_of(
    *[st.sampled_from(VALUES)] * 3,
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
)


class Config(NamedTuple):
    """The content of a hostile configuration file, and `key=value` words for --set."""

    content: bytes
    overrides: tuple[str, ...] = ()


def with_values(base: Mapping[str, Any], changes: Mapping[tuple[str, ...], Any]) -> Config:
    """The keys `base` with other values; paths are those of `FIELDS`."""
    settings = json.loads(json.dumps(base))
    for path, value in changes.items():
        *parents, last = ("apex" if part == WILDCARD else part for part in path)
        parent = settings
        for name in parents:
            parent = parent.setdefault(name, {})
            if not isinstance(parent, dict):  # a hostile value of another key
                break
        else:
            parent[last] = value
    return Config(json.dumps(settings).encode())


def of_type(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that a field with this annotation often accepts."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is typing.Annotated:
        return of_type(arguments[0])
    if origin is tuple:
        return st.lists(of_type(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=2)
    if arguments:  # X | None
        return st.one_of(*map(of_type, arguments))
    return st.sampled_from(_PLAIN.get(annotation, (None, True, 0, 1, "a", "cpu", 1e9, 0.5, {}, {"device": "cpu"})))


@st.composite
def configs(draw: Draw, base: Mapping[str, Any]) -> Config:
    """A hostile variant of the keys `base`, a valid configuration. A third combines values that the schema accepts."""
    kinds = ("plausible",) * 3 + ("values",) * 2 + ("override", "scalar", "damage", "key", "file")
    how, content = pick(draw, kinds), json.dumps(dict(base))
    if how == "plausible":
        changes = {}
        for path in draw(st.lists(paths, min_size=1, max_size=4)):
            section, name = FIELDS[path]
            changes[path] = draw(of_type(SECTIONS[section].model_fields[name].annotation))
        return with_values(base, changes)
    if how == "values":
        return with_values(base, draw(st.dictionaries(paths, values, min_size=1, max_size=2)))
    if how == "damage":
        return Config(damage(draw, content.encode()))
    if how == "override":
        path = ".".join(draw(paths))
        odd = ("", ".", "..", "a." * 3000 + "b", f"{path}.x", path.upper(), "x" * 5000, "é", f" {path} ")
        value = draw(st.sampled_from(SCALARS) | values.map(json.dumps))
        name = pick(draw, [path] * 40 + list(odd))
        return Config(content.encode(), (pick(draw, [f"{name}={value}"] * 19 + [name]),))
    if how == "key":  # unknown, unsupported, misspelled, repeated or strange
        misspelled = paths.map(lambda path: path[0][1:]) | paths.map(lambda path: path[0].replace("_", "-"))
        key = draw(st.sampled_from(KEYS) | st.sampled_from(sorted(known_keys())) | misspelled | texts)
        return Config(f"{content[:-1]}, {json.dumps(key)}: {json.dumps(draw(values))}}}".encode())

    # YAML's own syntax.
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in base.items()]
    if how == "file":
        return Config("\n".join(pick(draw, ([], lines))).encode() + b"\n" + pick(draw, FILES))
    lines[draw(st.integers(0, len(lines) - 1))] = f"{draw(paths)[0]}: {pick(draw, SCALARS)}"
    return Config("\n".join(lines).encode())


def hostile_config(draw: Draw, folder: Path, resources: contextlib.ExitStack) -> Case:
    """A configuration of a run of two iterations, for train.py."""
    settings = training_settings(folder, write_corpus(folder, documents=80), train_iters=2, save_interval=1)
    config = draw(configs(settings))
    (folder / "config.yml").write_bytes(config.content)
    overrides = ["--set", *config.overrides] if config.overrides else []
    return Case(["train.py", "config.yml", *overrides], stop_at=b"iteration 1/", accepted_at=b" on cpu: data parallel ")
