"""Changes of valid files, drawn by hypothesis: `spoil` damages a file of any kind."""

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.soak.cases import Draw, pick
from tests.support.hostile import WRONG_VALUES


def damage(draw: Draw, content: bytes) -> bytes:
    """The content with a flipped bit, or with a part cut off, removed, repeated, zeroed or
    replaced.
    """
    if not content:
        return draw(st.binary(max_size=100))
    start = draw(st.integers(0, len(content) - 1))
    end = min(len(content), start + pick(draw, (1, 2, 8, 512, 5000)))
    flipped = bytes([content[start] ^ 1 << draw(st.integers(0, 7))]) + content[start + 1 : end]
    middles = (
        flipped,
        flipped,
        b"",
        content[start:end] * 3,
        bytes(end - start),
        draw(st.binary(max_size=100)),
    )
    return pick(
        draw,
        (content[:start], b"", *(content[:start] + middle + content[end:] for middle in middles)),
    )


def value_in(draw: Draw, document: Any) -> Any:
    """A copy of a document with one value in it replaced or removed."""
    if not isinstance(document, dict | list) or not document:
        return pick(draw, WRONG_VALUES)
    changed = copy.copy(document)
    key = pick(draw, changed if isinstance(changed, dict) else range(len(changed)))
    how = pick(draw, ("inside", "inside", "inside", "value", "value", "remove"))
    if how == "inside":
        changed[key] = value_in(draw, changed[key])
    elif how == "value":
        changed[key] = pick(draw, WRONG_VALUES)
    else:
        del changed[key]
    return changed


def change_json(draw: Draw, content: bytes) -> bytes:
    """JSON, or JSON lines, with another value."""
    lines = content.decode().splitlines()
    if not lines[0].endswith(("}", "]")):  # a JSON document of several lines
        lines = [content.decode()]
    index = pick(draw, range(len(lines)))
    lines[index] = json.dumps(value_in(draw, json.loads(lines[index])))
    return "\n".join(lines).encode() + b"\n"


def spoil(draw: Draw, path: Path) -> None:
    """Change a file, or remove it."""
    content = path.read_bytes()
    how = pick(draw, ("json",) * 6 + ("bytes",) * 3 + ("remove",))
    if how == "remove":
        path.unlink()
        return
    is_json = how == "json" and path.suffix in (".json", ".jsonl") and content[:1] in (b"{", b"[")
    path.write_bytes((change_json if is_json else damage)(draw, content))
