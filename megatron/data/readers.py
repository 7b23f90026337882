"""Files of text to chunks: blocks of JSON lines, or whole texts, with where they come from.

`megatron.data.input_files` says which name is read as what. Archives are read in passing, not unpacked. Parsing is left
to the workers, so that this one process keeps up with many.
"""

import hashlib
import json
import lzma
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import BinaryIO

import zstandard

from megatron.data.chunks import START, Chunk, Position
from megatron.data.decompression import decompressed
from megatron.data.input_files import READABLE, SEEKING, InputFile, is_hidden, kind_of
from megatron.utils.errors import UserError

# How much is read at a time. Which chunks come out of a file, and so what a Position means, depends on it.
BLOCK = 1 << 20


class Corpus:
    """Input files, read in order: a `megatron.data.chunks.ChunkSource`.

    Args:
        files: from `find_files`.
        suffixes: as given to `find_files`; members of archives are chosen by them too.
        columns: of Parquet files, to read; JSON lines are read whole.
    """

    def __init__(self, files: Sequence[InputFile], suffixes: Sequence[str] = (), columns: Sequence[str] = ("text",)):
        self.files = list(files)
        self.total_bytes = sum(file.size for file in self.files)
        self.bytes_read = 0
        self.position = START
        self._suffixes = tuple(suffixes)
        self._columns = tuple(columns)

    def identity(self) -> str:
        files = [[file.name, file.size, file.version] for file in self.files]
        return hashlib.sha256(json.dumps([files, self._suffixes]).encode("utf-8", "surrogatepass")).hexdigest()

    def chunks(self, start: Position = START) -> Iterator[Chunk]:
        """All chunks from `start` on. Raises UserError, naming the file, for a damaged or truncated one."""
        self.position = start
        done = sum(file.size for file in self.files[: start.file])
        for number in range(start.file, len(self.files)):
            file, already = self.files[number], start.chunk if number == start.file else 0
            count = 0
            for count, (chunk, read) in enumerate(self._file_chunks(file), start=1):
                if count > already:
                    self.bytes_read = done + read
                    self.position = Position(number, count)
                    yield chunk
            if count < already:
                raise UserError(f"{file.name} has changed while it was read")
            done += file.size
            self.bytes_read = done
            self.position = Position(number + 1)

    def _file_chunks(self, file: InputFile) -> Iterator[tuple[Chunk, int]]:
        """The chunks of a file, each with how many bytes of it are read."""
        try:
            with file.open() as raw:
                for chunk in self._chunks(raw, file.base_name, file.name, seekable=True):
                    yield chunk, raw.tell() if chunk.share is None else int(chunk.share * file.size)
        except _DAMAGE as error:
            raise UserError(f"{file.name} is damaged or truncated: {error}") from error
        except OSError as error:  # gzip's "not a gzipped file" among them
            raise UserError(f"cannot read {file.name}: {error.strerror or error}") from error
        except UserError:
            raise
        except Exception as error:
            if not file.is_remote:
                raise
            raise UserError(f"cannot read {file.name}: {error}") from error  # each object store has errors of its own

    def _chunks(self, raw: BinaryIO, name: str, source: str, seekable: bool = False) -> Iterator[Chunk]:
        kind = kind_of(name, self._suffixes)
        if kind is None:
            raise UserError(f"{source} is of no kind read here: {READABLE}")
        if kind in SEEKING and not seekable:
            with _seekable_copy(raw) as copy:
                yield from self._chunks(copy, name, source, seekable=True)
            return
        if kind == "parquet":
            from megatron.data.parquet import parquet_chunks

            yield from parquet_chunks(raw, source, self._columns)
            return
        if kind == "zip":
            yield from self._zip_members(raw, source)
            return
        stream = decompressed(raw, PurePosixPath(name.lower()).suffix, source)
        if kind == "tar":
            yield from self._tar_members(stream, source)
        elif kind == "text":
            yield Chunk(source, "text", 1, stream.read())
        elif kind == "dat":
            yield from _dat_records(stream, source)
        else:
            yield from _line_blocks(stream, source, may_be_list=kind == "json")

    def _is_passed_over(self, name: str) -> bool:
        """With suffixes, an archive's other members are; without, hidden ones, and an unknown one is an error."""
        return kind_of(name, self._suffixes) is None if self._suffixes else is_hidden(name)

    def _tar_members(self, stream: BinaryIO, source: str) -> Iterator[Chunk]:
        # "r|": one pass without seeking, so that a compressed archive is never held in memory. Nothing is extracted:
        # names that lead out of a folder do no harm, links and devices are passed over.
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
            for member in archive:
                archive.members = []  # the library would remember all of a large archive's
                name = PurePosixPath(member.name).name
                content = archive.extractfile(member) if member.isfile() and not self._is_passed_over(name) else None
                if content is not None:
                    yield from self._member_chunks(content, name, f"{source}:{member.name}")
            # Reading on to the end also lets a compression check its checksum.
            while block := archive.fileobj.read(BLOCK):
                if block.strip(b"\0"):
                    raise UserError(
                        f"{source} goes on behind the end of its archive: damaged, or several archives in one file; "
                        "pack it again"
                    )

    def _member_chunks(self, content: BinaryIO, name: str, source: str) -> Iterator[Chunk]:
        for chunk in self._chunks(content, name, source):
            yield replace(chunk, share=None)  # that of the member is not that of the archive

    def _zip_members(self, raw: BinaryIO, source: str) -> Iterator[Chunk]:
        with zipfile.ZipFile(raw) as archive:
            for member in archive.infolist():
                name = PurePosixPath(member.filename).name
                if member.is_dir() or self._is_passed_over(name):
                    continue
                if member.flag_bits & 1:
                    raise UserError(f"{source}:{member.filename} is encrypted; unpack it first")
                with archive.open(member) as content:
                    yield from self._member_chunks(content, name, f"{source}:{member.filename}")


class _Member(tarfile.TarInfo):
    """A header that must be whole: the library takes a damaged or missing one for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Member":
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {archive.offset:,} of the archive") from error


def _seekable_copy(content: BinaryIO) -> BinaryIO:
    """A member of an archive in a temporary file without a name, which goes when it is closed."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (closed by the caller)
    shutil.copyfileobj(content, copy, BLOCK)
    copy.seek(0)
    return copy


# What the libraries raise for a damaged file.
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError, tarfile.TarError, zipfile.BadZipFile)


def _line_blocks(stream: BinaryIO, source: str, may_be_list: bool) -> Iterator[Chunk]:
    """Blocks of whole lines; a file whose first character is `[` may be a list instead."""
    pieces: list[bytes] = []
    line = 1
    while block := stream.read(BLOCK):
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
