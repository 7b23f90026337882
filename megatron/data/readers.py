"""Files of text to chunks: blocks of JSON lines, or whole texts, with where they come from.

Formats, by the ending of the name; a compressed file is read as what it holds:

    .jsonl .ndjson         one JSON value per line
    .json                  the same, or one JSON list (lm-dataformat's JSONArchive)
    .txt, no ending        one document
    .dat                   lm-dataformat's DatArchive: 16 decimal digits, then so many bytes of text, and again
    .tar .zip              members of the kinds above, in the order of the archive
    .gz .zst .xz           around any of the above but .zip

Nothing is ever unpacked to disk. Parsing is left to the workers, so that this one process keeps up with many.
"""

import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

import zstandard

from megatron.config.errors import UserError

_BLOCK = 1 << 20
_COMPRESSIONS = (".gz", ".zst", ".xz")
_KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".txt": "text",
    "": "text",
    ".dat": "dat",
    ".tar": "tar",
    ".zip": "zip",
}

READABLE = ".jsonl, .json, .txt, .dat, .tar (each also .gz, .zst, .xz) and .zip"


@dataclass(frozen=True)
class Chunk:
    """A piece of input, not yet parsed.

    Attributes:
        source: the file, and the member or record of an archive.
        kind: "lines": whole JSON lines; "list": a JSON list of texts; "text": one document.
        first_line: number, from 1, of its first line in the source.
    """

    source: str
    kind: Literal["lines", "list", "text"]
    first_line: int
    content: bytes


class Corpus:
    """Input files, read once, in order.

    Attributes:
        total_bytes: sum of the files' sizes on disk.
        bytes_read: of that, how much `chunks` has gone through so far.
    """

    def __init__(self, files: Sequence[Path]):
        self.files = list(files)
        self.total_bytes = sum(path.stat().st_size for path in self.files)
        self.bytes_read = 0

    def chunks(self) -> Iterator[Chunk]:
        """All chunks. Raises UserError, naming the file, for a damaged or truncated one."""
        done = 0
        for path in self.files:
            with open(path, "rb") as raw:
                for chunk in _guarded(str(path), _chunks(raw, path.name, str(path))):
                    self.bytes_read = done + raw.tell()
                    yield chunk
            done += path.stat().st_size
            self.bytes_read = done


def find_files(inputs: Iterable[str | Path]) -> list[Path]:
    """The files that `inputs` name: files as they are, and for a folder every readable file below it, sorted by path.

    Raises:
        UserError: a path that does not exist, a file of unknown kind, a folder without a readable file.
    """
    files = []
    for path in map(Path, inputs):
        if path.is_dir():
            # lm-dataformat keeps the archive it is still writing under a name that begins with this word.
            names = (name for name in sorted(path.rglob("*")) if name.is_file() and "current_chunk" not in name.name)
            found = [name for name in names if name.suffix and not name.name.startswith(".") and _kind(name.name)]
            if not found:
                raise UserError(f"{path} holds no file of a kind read here: {READABLE}")
            files.extend(found)
        elif not path.exists():
            raise UserError(f"input {path} does not exist")
        elif _kind(path.name) is None:
            raise UserError(f"input {path} is of no kind read here: {READABLE}")
        else:
            files.append(path)
    return files


def _kind(name: str) -> str | None:
    """What a file of this name holds once its compression is undone; None if nothing known."""
    path = PurePosixPath(name.lower())
    if path.suffix == ".tgz":
        return "tar"
    if path.suffix in _COMPRESSIONS:
        path = path.with_suffix("")
        if path.suffix == ".zip":
            return None
    return _KINDS.get(path.suffix)


def _chunks(raw: BinaryIO, name: str, source: str) -> Iterator[Chunk]:
    kind = _kind(name)
    if kind is None:
        raise UserError(f"{source} is of no kind read here: {READABLE}")
    if kind == "zip":
        yield from _zip_members(raw, source)
        return
    stream = _decompressed(raw, PurePosixPath(name.lower()).suffix, source)
    if kind == "tar":
        yield from _tar_members(stream, source)
    elif kind == "text":
        yield Chunk(source, "text", 1, stream.read())
    elif kind == "dat":
        yield from _dat_records(stream, source)
    else:
        yield from _line_blocks(stream, source, may_be_list=kind == "json")


def _line_blocks(stream: BinaryIO, source: str, may_be_list: bool) -> Iterator[Chunk]:
    """Blocks of whole lines; a file whose first character is `[` may be a list instead."""
    pieces: list[bytes] = []
    line = 1
    while block := stream.read(_BLOCK):
        if may_be_list and block.lstrip()[:1] == b"[":
            yield Chunk(source, "list", 1, block + stream.read())
            return
        may_be_list = False
        end = block.rfind(b"\n") + 1
        if end == 0:
            pieces.append(block)
            continue
        content = b"".join([*pieces, block[:end]])
        pieces = [block[end:]] if end < len(block) else []
        yield Chunk(source, "lines", line, content)
        line += content.count(b"\n")
    if pieces:
        yield Chunk(source, "lines", line, b"".join(pieces))


def _dat_records(stream: BinaryIO, source: str) -> Iterator[Chunk]:
    record = 0
    while header := stream.read(16):
        record += 1
        if len(header) < 16 or not header.isdigit():
            raise UserError(f"{source}, record {record}: expected 16 digits, found {header!r}")
        content = stream.read(int(header))
        if len(content) < int(header):
            raise UserError(f"{source}, record {record}: truncated, {len(content)} of {int(header)} bytes")
        yield Chunk(f"{source}, record {record}", "text", 1, content)


def _tar_members(stream: BinaryIO, source: str) -> Iterator[Chunk]:
    # "r|": one pass without seeking, so that a compressed archive is never held in memory.
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                yield from _chunks(content, PurePosixPath(member.name).name, f"{source}:{member.name}")


def _zip_members(raw: BinaryIO, source: str) -> Iterator[Chunk]:
    with zipfile.ZipFile(raw) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                with archive.open(member) as content:
                    yield from _chunks(content, PurePosixPath(member.filename).name, f"{source}:{member.filename}")


def _decompressed(raw: BinaryIO, suffix: str, source: str) -> BinaryIO:
    if suffix in (".gz", ".tgz"):
        return gzip.GzipFile(fileobj=raw)
    if suffix == ".xz":
        return lzma.LZMAFile(raw)
    if suffix == ".zst":
        return io.BufferedReader(_ZstandardStream(raw, source), _BLOCK)
    return raw


class _ZstandardStream(io.RawIOBase):
    """Decompressed bytes of one or several frames. zstandard's own reader takes a truncated file for a whole one."""

    def __init__(self, raw: BinaryIO, source: str):
        self._raw = raw
        self._source = source
        self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._frame_begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _fill(self) -> bool:
        """Decompress some more; False at the end of the file."""
        compressed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            self._frame_begun = False
        if not compressed:
            compressed = self._raw.read(_BLOCK // 8)
        if not compressed:
            if self._frame_begun:
                raise UserError(f"{self._source} is truncated: its last compressed frame has no end")
            return False
        self._frame_begun = True
        self._ready = memoryview(self._frame.decompress(compressed))
        return True


def _guarded(source: str, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Name the file in the many errors that the decompressors have for a damaged one."""
    try:
        yield from chunks
    except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise UserError(f"{source} is damaged or truncated: {error}") from error
    except OSError as error:  # gzip's "not a gzipped file" among them
        raise UserError(f"cannot read {source}: {error.strerror or error}") from error
