"""Changes of valid files, drawn by hypothesis: `spoil` makes one of any kind, `archive` one of an archive."""

import copy
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.soak.cases import Draw, pick
from tests.support.archives import tar_of, zip_of
from tests.support.hostile import MEMBER_NAMES, NAMES, WRONG_VALUES

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
    if not isinstance(document, dict | list) or not document:
        return pick(draw, VALUES)
    changed = copy.copy(document)
    key = pick(draw, changed if isinstance(changed, dict) else range(len(changed)))
    how = pick(draw, ("inside", "inside", "inside", "value", "value", "remove", "again"))
    if how == "inside":
        changed[key] = value_in(draw, changed[key])
    elif how == "value":
        changed[key] = pick(draw, VALUES)
    elif how == "remove":
        del changed[key]
    elif isinstance(changed, list):
        changed += [changed[key]] * pick(draw, (1, 100, 10_000))
    else:
        changed[pick(draw, NAMES)] = changed.pop(key)
    return changed


def change_json(draw: Draw, content: bytes) -> bytes:
    """JSON lines, or JSON, with another value, or with text that is not JSON or long in place of a digit."""
    lines = content.decode().splitlines()
    if not lines[0].endswith(("}", "]")):  # a JSON document of several lines
        lines = [content.decode()]
    index = pick(draw, range(len(lines)))
    if flip(draw, 3):
        at = pick(draw, [match.start() for match in re.finditer(r"\d", lines[index])] or [0])
        lines[index] = lines[index][:at] + pick(draw, RAW) + lines[index][at + 1 :]
    else:
        lines[index] = json.dumps(value_in(draw, json.loads(lines[index])))
    return "\n".join(lines * (1000 if len(content) < 10_000 and flip(draw, 20) else 1)).encode() + b"\n"


def spoil(draw: Draw, path: Path) -> None:
    """Change a file, or replace it by something that is not a regular file."""
    content = path.read_bytes()
    how = pick(draw, ("json",) * 6 + ("bytes",) * 3 + ("special",))
    if how != "special":
        is_json = how == "json" and path.suffix in (".json", ".jsonl") and content[:1] in (b"{", b"[")
        path.write_bytes((change_json if is_json else damage)(draw, content))
        return
    path.unlink()
    target = pick(draw, (os.mkfifo, Path.mkdir, Path.touch, "/dev/zero", "/etc/passwd", "nowhere", path.name, None))
    if isinstance(target, str):
        path.symlink_to(target)
    elif target is not None:
        target(path)


_PAX = {"size": "99999999999", "path": "x" * 100_000, "GNU.sparse.realsize": "9" * 30, "GNU.sparse.map": "0,9,"}
_TYPES = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, b"Z")


def archive(draw: Draw, kind: str, files: dict[str, bytes]) -> bytes:
    """An archive (zip, tar, tar.gz ...) of `files`, with a hostile name, content or member, damaged, or both."""
    how, chosen = pick(draw, ("name", "content", "member", "bytes")), pick(draw, files)
    if how == "name":
        hostile = pick(draw, MEMBER_NAMES)
        files = {hostile if name == chosen else name: content for name, content in files.items()}
    elif how == "content":
        files = files | {chosen: damage(draw, files[chosen])}
    if kind == "zip":
        changed = bytearray(zip_of(files))
        if how == "member":  # a field of its header: flags, method, checksum, sizes, offset
            place = changed.rfind(b"PK\x01\x02") + pick(draw, (8, 10, 16, 20, 24, 42))
            changed[place : place + 2] = draw(st.binary(min_size=2, max_size=2))
        content = bytes(changed)
    else:
        member = tarfile.TarInfo("run/member.jsonl")
        if flip(draw):
            member.type, member.linkname = pick(draw, _TYPES), pick(draw, ("../../escaped", "/etc/passwd", member.name))
        else:
            key = pick(draw, _PAX)
            member.pax_headers = {key: _PAX[key]}
        form = pick(draw, (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
        content = tar_of(files, f"w:{kind[4:]}", [member] if how == "member" else [], form)
    return damage(draw, content) if how == "bytes" or flip(draw, 3) else content
