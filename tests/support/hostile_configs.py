"""Seeded mutations of a training configuration: hostile values for every key of the schema, and damaged YAML.

Every mutation must load or end in one UserError; one that loads must train or be rejected by name.
"""

import json
import random
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.config.loader import FIELDS, GROUPS
from megatron.config.neox_compat import known_keys
from megatron.config.schema.base import REST

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
    b"%YAML 9.9\n---\n{}",     b"a: 1\n\tb: 2", b"\x80", b"{1: 2}", b"{null: 1}", b"{[a]: 1}",
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


def mutations(base: Mapping[str, Any], seed: int, count: int) -> Iterator[Mutation]:
    """`count` mutations of the keys `base`, which must be a valid configuration.

    The same arguments give the same mutations. A third of them combines values that the schema accepts.
    """
    generator = random.Random(seed)
    kinds: list[Callable[[random.Random, Mapping[str, Any]], Mutation]] = [
        *(_plausible, _plausible, _plausible, _hostile_value, _hostile_value),
        *(_hostile_override, _hostile_scalar, _damaged_text, _odd_key, _whole_file),
    ]
    for _ in range(count):
        yield generator.choice(kinds)(generator, base)


def every_value(base: Mapping[str, Any]) -> Iterator[Mutation]:
    """Every key of the schema with every value of VALUES."""
    for path in FIELDS:
        for value in VALUES:
            yield _with_values(base, {path: value})


def _with_values(base: Mapping[str, Any], values: Mapping[tuple[str, ...], Any]) -> Mutation:
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


def _random_path(generator: random.Random) -> tuple[str, ...]:
    return generator.choice(list(FIELDS))


def _plausible(generator: random.Random, base: Mapping[str, Any]) -> Mutation:
    """One to four keys with values of their own types."""
    values = {}
    for path in generator.sample(list(FIELDS), generator.choice((1, 2, 2, 3, 4))):
        group, name = FIELDS[path]
        values[path] = _value_of_type(generator, GROUPS[group].model_fields[name].annotation)
    return _with_values(base, values)


def _value_of_type(generator: random.Random, annotation: Any) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return generator.choice(arguments)
    if origin is typing.Annotated:
        return _value_of_type(generator, arguments[0])
    if origin is tuple:
        return [_value_of_type(generator, arguments[0]) for _ in range(generator.randrange(4))]
    if origin is dict:
        return {_value_of_type(generator, arguments[0]): _value_of_type(generator, arguments[1])}
    if arguments:  # X | None
        return _value_of_type(generator, generator.choice(arguments))
    choices: dict[Any, tuple[Any, ...]] = {
        bool: (True, False),
        int: (0, 1, 2, 3, 4, 5, 8, 10, 16, 32, 64, 100, 1000, 10**5, 10**9),
        float: (0, 0.001, 0.1, 0.5, 0.9, 1, 1.0, 2.0, 8.0, 100.0, 1e6, 1e20),
        str: ("a", "runs/a", "none", "kerple_log", "rotary", "type:gpt", "uniform", "8,1,1", "1", "cpu"),
    }
    return generator.choice(choices.get(annotation, (None, True, 0, 1, "a", "cpu", 1e9, 0.5, {}, {"device": "cpu"})))


def _hostile_value(generator: random.Random, base: Mapping[str, Any]) -> Mutation:
    """One or two keys with values from VALUES."""
    paths = [_random_path(generator) for _ in range(generator.choice((1, 1, 2)))]
    return _with_values(base, {path: generator.choice(VALUES) for path in paths})


def _hostile_override(generator: random.Random, base: Mapping[str, Any]) -> Mutation:
    """The same on the command line."""
    path = ".".join(_random_path(generator))
    if generator.random() < 0.2:
        path = generator.choice(
            ("", ".", "..", "a." * 3000 + "b", path + ".x", path.upper(), "x" * 5000, "é", f" {path} ")
        )
    value = generator.choice((*SCALARS, *(json.dumps(value) for value in VALUES)))
    override = f"{path}={value}" if generator.random() < 0.95 else path
    return Mutation(f"--set {_short(override)}", json.dumps(dict(base)).encode(), [override])


def _hostile_scalar(generator: random.Random, base: Mapping[str, Any]) -> Mutation:
    """One top-level key with a value in YAML's notation."""
    name, scalar = _random_path(generator)[0], generator.choice(SCALARS)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in base.items() if key != name]
    lines.insert(generator.randrange(len(lines) + 1), f"{name}: {scalar}")
    return Mutation(f"{name}: {_short(scalar)}", "\n".join(lines).encode())


def _damaged_text(generator: random.Random, base: Mapping[str, Any]) -> Mutation:
    """The file with one to five bytes replaced, inserted or removed, or cut off."""
    content = bytearray(json.dumps(dict(base), indent=generator.choice((None, 1))).encode())
    steps = []
    for _ in range(generator.randrange(1, 6)):
        position = generator.randrange(len(content))
        step = generator.choice(("replace", "insert", "remove", "cut", "swap"))
        steps.append(f"{step} {position}")
        if step == "cut" and position > 0:
            del content[position:]
        elif step == "remove" and len(content) > 1:
            del content[position]
        elif step == "insert":
            content.insert(position, generator.choice(b"{}[],:'\"&*!#\t\n\0\x80\xff-?|>%@`0. "))
        elif step == "swap":
            other = generator.randrange(len(content))
            content[position], content[other] = content[other], content[position]
        else:
            content[position] = generator.randrange(256)
    return Mutation(f"damaged text: {', '.join(steps)}", bytes(content))


def _odd_key(generator: random.Random, base: Mapping[str, Any]) -> Mutation:
    """A key that is unknown, unsupported, misspelled, repeated or has a strange name."""
    name = generator.choice(
        (
            *(
                "",
                " ",
                ".",
                "a.b",
                "x" * 1000,
                "x" * 100_000,
                "\0",
                "\x1b[31m",
                "é",
                "SEED",
                "Seed",
                "seed ",
                "--seed",
                "*",
            ),
            *(
                "api_key",
                "optimizer.params.lr",
                "fp16.enabled",
                "__class__",
                "model",
                "_flat",
                "num-layers",
                "num_layers",
            ),
            generator.choice(sorted(known_keys())),
            generator.choice(sorted(known_keys())),
            _random_path(generator)[0][1:],
            _random_path(generator)[0].replace("_", "-"),
        )
    )
    value = generator.choice(VALUES)
    text = json.dumps(dict(base))[:-1] + f", {json.dumps(name)}: {json.dumps(value)}" + "}"
    return Mutation(f"key {_short(name)}: {_short(value)}", text.encode())


def _whole_file(generator: random.Random, base: Mapping[str, Any]) -> Mutation:
    content = generator.choice(FILES)
    if generator.random() < 0.5:
        content = (
            b"\n".join(f"{json.dumps(key)}: {json.dumps(value)}".encode() for key, value in base.items())
            + b"\n"
            + content
        )
    return Mutation(f"file {_short(content[-40:])} of {len(content):,} bytes", content)
