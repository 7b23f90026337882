"""Changes of valid files, drawn by hypothesis: `spoil` makes one of any kind."""

import copy
import json
import os
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.soak.cases import Draw, pick
from tests.support.hostile import NAMES, WRONG_VALUES

VALUES = [*WRONG_VALUES, *NAMES, -0.0, 5e-324, 10**400, "\u202egnp", "a\nb\r\tc", {"a": {"b": []}}, "x" * 10**6]
# Texts that JSON parsers have had trouble with.
RAW = ("1e999", "-1e999", "1" * 5000, "[" * 100_000, '{"a":' * 100_000, "01", "1.", '"\\ud800"', '"\\u0000"', "nul", "")


def flip(draw: Draw, sides: int = 2) -> bool:
    """True once in `sides`."""
    return draw(st.integers(1, sides)) == sides


def damage(draw: Draw, content: bytes) -> bytes:
    """The content with bits flipped, or with a part cut off, removed, repeated, zeroed or replaced."""
    if not content:
        return draw(st.binary(max_size=100))
    start = draw(st.integers(0, len(content) - 1))
    end = min(len(content), start + pick(draw, (1, 2, 8, 512, 5000)))
    flipped = bytes([content[start] ^ 1 << draw(st.integers(0, 7))]) + content[start + 1 : end]
    other = draw(st.binary(max_size=100))
    size = end - start
    middles = (flipped, flipped, b"", content[start:end] * 3, bytes(size), b"\xff" * size, other, content[start // 2 :])
    return pick(draw, (content[:start], b"", *(content[:start] + middle + content[end:] for middle in middles)))


def value_in(draw: Draw, document: Any) -> Any:
    """A copy of a document with one value in it replaced, removed, renamed or repeated."""
    document = copy.deepcopy(document)
    parent, key = [document], 0
    while isinstance(parent[key], dict | list) and parent[key] and (parent[key] is document or not flip(draw, 3)):
        parent = parent[key]
        key = pick(draw, parent) if isinstance(parent, dict) else draw(st.integers(0, len(parent) - 1))
    how = pick(draw, ("value", "value", "value", "remove", "again"))
    if parent == [document] and not isinstance(document, dict | list):
        return pick(draw, VALUES)
    if how == "value":
        parent[key] = pick(draw, VALUES)
    elif how == "remove":
        del parent[key]
    elif isinstance(parent, list):
        parent += [parent[key]] * pick(draw, (1, 100, 10_000))
    else:
        parent[pick(draw, NAMES)] = parent.pop(key)
    return document


def change_json(draw: Draw, content: bytes) -> bytes:
    """JSON, or JSON lines, with another value, or with text that is not JSON or long in place of a value."""
    try:
        json.loads(content)
        lines = [content.decode()]
    except ValueError:
        lines = content.decode().splitlines()
    index = draw(st.integers(0, len(lines) - 1))
    if flip(draw, 3):
        digits = [at for at, character in enumerate(lines[index]) if character.isdigit()] or [0]
        at = pick(draw, digits)
        lines[index] = lines[index][:at] + pick(draw, RAW) + lines[index][at + 1 :]
    else:
        lines[index] = json.dumps(value_in(draw, json.loads(lines[index])))
    return "\n".join(lines * (1000 if len(content) < 10_000 and flip(draw, 20) else 1)).encode() + b"\n"


def spoil(draw: Draw, path: Path) -> None:
    """Change a file, or replace it by something that is not a regular file."""
    content = path.read_bytes()
    how = pick(draw, ("json",) * 6 + ("bytes",) * 3 + ("special",))
    if how == "json" and path.suffix in (".json", ".jsonl") and content[:1] in (b"{", b"["):
        path.write_bytes(change_json(draw, content))
        return
    if how != "special":
        path.write_bytes(damage(draw, content))
        return
    path.unlink()
    kind = pick(draw, ("missing", "fifo", "folder", "empty", "/dev/zero", "/etc/passwd", "nowhere", path.name))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    elif kind != "missing":
        path.symlink_to(kind)
