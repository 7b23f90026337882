"""Hostile training configurations, drawn by hypothesis: values, keys, YAML syntax and --set options.

Each must load or end in one UserError; one that loads must train or be rejected by name.
"""

import contextlib
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hypothesis import strategies as st

from megatron.config.loader import FIELDS, GROUPS
from megatron.config.neox_compat import known_keys
from megatron.config.schema.base import REST
from tests.soak.cases import Case, Draw
from tests.support.checkpoints import write_corpus
from tests.support.runs import training_settings

# Values that some key accepts and most reject. Text is written to the file as it is, and everything else as JSON.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, -1, 7, 16, 33, 1000, 2**16, 10**6, 2**31 - 1, 2**31, 2**32, 10**9, 10**12, 2**62,
    2**63, -(2**63), 2**64, 10**400, 0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 1e-30, 1e-300, 5e-324, 1e30, 1e38, 1e300,
    "", " ", "a", "nowhere", "../..", "/", "/dev/zero", "/proc/self/mem", "x" * 300, "x/" * 3000, "a\0b", "\x1b[31mred",
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
    ("pos-emb-options: &a [x, x, x, x, x, x, x, x, x]\n" + _BOMB.partition("\n")[2]).encode(),
    "\n".join(f"key_{index}: {index}" for index in range(20_000)).encode(),
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One hostile configuration: the content of its only file, and `key=value` words for --set."""

    description: str
    content: bytes
    overrides: list[str] = field(default_factory=list)


def with_values(base: Mapping[str, Any], values: Mapping[tuple[str, ...], Any]) -> Mutation:
    """The keys `base` with other values; paths are those of `FIELDS`."""
    settings = json.loads(json.dumps(base))
    for path, value in values.items():
        *parents, last = ("apex" if part == REST else part for part in path)
        parent = settings
        for name in parents:
            parent = parent.setdefault(name, {})
            if not isinstance(parent, dict):  # a hostile value of another key
                break
        else:
            parent[last] = value
    text = ", ".join(f"{'.'.join(path)}={_short(value)}" for path, value in values.items())
    return Mutation(text, json.dumps(settings).encode())


def _short(value: object) -> str:
    text = ascii(value) if not isinstance(value, int) or value.bit_length() < 1000 else "a huge integer"
    return text if len(text) < 100 else f"{text[:100]}..."


paths = st.sampled_from(list(FIELDS))
values = st.one_of(
    *[st.sampled_from(VALUES)] * 3,
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_characters="/"), max_size=20),
)
_PLAIN: dict[Any, tuple[Any, ...]] = {
    bool: (True, False),
    int: (0, 1, 2, 3, 4, 5, 8, 10, 16, 32, 64, 100, 1000, 10**5, 10**9),
    float: (0, 0.001, 0.1, 0.5, 0.9, 1, 1.0, 2.0, 8.0, 100.0, 1e6, 1e20),
    str: ("a", "runs/a", "none", "kerple_log", "rotary", "type:gpt", "uniform", "8,1,1", "1", "cpu"),
}


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


def _plausible(draw: Draw, base: Mapping[str, Any]) -> Mutation:
    chosen = draw(st.lists(paths, min_size=1, max_size=4, unique=True))
    groups = {path: FIELDS[path] for path in chosen}
    return with_values(
        base,
        {path: draw(of_type(GROUPS[group].model_fields[name].annotation)) for path, (group, name) in groups.items()},
    )


def _hostile_value(draw: Draw, base: Mapping[str, Any]) -> Mutation:
    return with_values(base, draw(st.dictionaries(paths, values, min_size=1, max_size=2)))


def _override(draw: Draw, base: Mapping[str, Any]) -> Mutation:
    path = ".".join(draw(paths))
    odd = ("", ".", "..", "a." * 3000 + "b", f"{path}.x", path.upper(), "x" * 5000, "é", f" {path} ")
    name = draw(st.sampled_from([path] * 40 + list(odd)))
    value = draw(st.sampled_from(SCALARS) | values.map(json.dumps))
    override = f"{name}={value}" if draw(st.integers(0, 19)) else name
    return Mutation(f"--set {_short(override)}", json.dumps(dict(base)).encode(), [override])


def _yaml_scalar(draw: Draw, base: Mapping[str, Any]) -> Mutation:
    name, scalar = draw(paths)[0], draw(st.sampled_from(SCALARS))
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in base.items() if key != name]
    lines.insert(draw(st.integers(0, len(lines))), f"{name}: {scalar}")
    return Mutation(f"{name}: {_short(scalar)}", "\n".join(lines).encode())


def _damaged_text(draw: Draw, base: Mapping[str, Any]) -> Mutation:
    """One to five times, 0 to 3 bytes are replaced by 0 to 3 others, or the rest is cut off."""
    content = json.dumps(dict(base), indent=draw(st.sampled_from((None, 1)))).encode()
    others = st.binary(max_size=3) | st.lists(st.sampled_from(b"{}[],:'\"&*!#\t\n-?|>%@`0. "), max_size=3).map(bytes)
    steps = draw(st.lists(st.tuples(st.integers(0, len(content)), st.integers(0, 3), others), min_size=1, max_size=5))
    for start, size, other in steps:
        content = content[:start] + other + content[start + size :]
    if draw(st.integers(0, 4)) == 0:
        content = content[: steps[0][0]]
    return Mutation(f"damaged text: {steps}", content)


def _odd_key(draw: Draw, base: Mapping[str, Any]) -> Mutation:
    """A key that is unknown, unsupported, misspelled, repeated or has a strange name."""
    path = draw(paths)[0]
    odd = (
        "", " ", ".", "a.b", "x" * 1000, "x" * 100_000, "\0", "\x1b[31m", "é", "SEED", "Seed", "seed ", "--seed", "*",
        "api_key", "optimizer.params.lr", "fp16.enabled", "__class__", "model", "_flat", "num-layers", "num_layers",
        path[1:], path.replace("_", "-"),
    )  # fmt: skip
    name, value = draw(st.sampled_from(odd) | st.sampled_from(sorted(known_keys()))), draw(values)
    text = json.dumps(dict(base))[:-1] + f", {json.dumps(name)}: {json.dumps(value)}" + "}"
    return Mutation(f"key {_short(name)}: {_short(value)}", text.encode())


def _whole_file(draw: Draw, base: Mapping[str, Any]) -> Mutation:
    content = draw(st.sampled_from(FILES))
    if draw(st.booleans()):
        lines = [f"{json.dumps(key)}: {json.dumps(value)}\n".encode() for key, value in base.items()]
        content = b"".join([*lines, content])
    return Mutation(f"file {_short(content[-40:])} of {len(content):,} bytes", content)


_KINDS: list[Callable[[Draw, Mapping[str, Any]], Mutation]] = [
    *(_plausible, _plausible, _plausible, _hostile_value, _hostile_value),
    *(_override, _yaml_scalar, _damaged_text, _odd_key, _whole_file),
]


@st.composite
def mutations(draw: Draw, base: Mapping[str, Any]) -> Mutation:
    """Mutations of the keys `base`, a valid configuration. A third combines values that the schema accepts."""
    return draw(st.sampled_from(_KINDS))(draw, base)


# With these values of `save` and the like, a configuration would be right to write outside the folder of its case.
_OUTSIDE = re.compile(r'(^|=|")(/|\.\./\.\.)("|$)')


def hostile_config(draw: Draw, folder: Path, resources: contextlib.ExitStack) -> Case:
    """A configuration of a run of two iterations, for train.py."""
    settings = training_settings(folder, write_corpus(folder, documents=80), train_iters=2, save_interval=1)
    mutation = draw(mutations(settings))
    texts = [mutation.content.decode(errors="replace"), *mutation.overrides]
    if any(_OUTSIDE.search(text) for text in texts):
        mutation = Mutation("unchanged", json.dumps(settings).encode())
    config = folder / "config.yml"
    config.write_bytes(mutation.content)
    overrides = ["--set", *mutation.overrides] if mutation.overrides else []
    command = ["train.py", str(config), *overrides]
    return Case(mutation.description, command, stop_at=b"iteration 1/", accepted_at=b" on cpu: data parallel ")
