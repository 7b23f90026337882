"""Reads input files into chunks: blocks of JSON lines or whole documents, with their location for
error messages.

`input_files` defines which file name is read in which format. Archives are streamed, never
extracted, so names of members and links that lead outside are harmless. Chunks are parsed in the
worker processes, so that the single reading process can feed many of them.
"""

import codecs
import hashlib
import io
import json
import lzma
import struct
import sys
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import BinaryIO, Literal, NamedTuple, cast

from megatron.preparation.decompression import BLOCK, decompress
from megatron.preparation.input_files import (
    ARCHIVE_FORMATS,
    READABLE,
    InputFile,
    file_format,
    is_hidden,
)
from megatron.utils.errors import UserError, first_line, import_package
from megatron.utils.files import open_file

# Parquet rows per chunk. Their texts, several kilobytes each, are in memory together.
PARQUET_ROWS = 256

# Limit for one document (line, JSON list, or text) of a compressed file or archive, which may be
# far larger than the file. A document of an uncompressed file is limited by the size of the file.
MAX_COMPRESSED_DOCUMENT = 100 << 20

# The record at the end of a zip file, with the longest comment.
_ZIP_END_BYTES = 22 + 0xFFFF

# Exceptions that the libraries raise for damaged files.
_DAMAGE_ERRORS = (
    EOFError,
    ValueError,
    OverflowError,
    LookupError,
    AttributeError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
)


@dataclass
class TextChunk:
    """A piece of input, not yet parsed. It can be parsed once, because `take_content` frees the
    memory.

    Attributes:
        source: the file, and the member of an archive.
        kind: "lines": complete JSON lines; "list": a JSON list of documents; "text": one document.
        first_line: number of its first line in the source, from 1.
        unit: what a line is called in messages: "line", or "row" of a table.
        fraction_read: share of its file (0 to 1) read so far; None: derived from the file position.
    """

    source: str
    kind: Literal["lines", "list", "text"]
    first_line: int
    content: bytes
    unit: str = "line"
    fraction_read: float | None = None

    def take_content(self) -> bytes:
        """Return the content and remove it from the chunk, to which generators still refer."""
        content, self.content = self.content, b""
        return content


class ReadPosition(NamedTuple):
    """A position: the number of finished files, and of chunks (or rows) read from the next one."""

    file: int = 0
    chunk: int = 0


START = ReadPosition()


class ChunkSource(ABC):
    """A corpus that can be read from any earlier position.

    Attributes:
        total_bytes: size of the input, None if unknown.
        bytes_read: input bytes that `chunks` has read so far.
        position: after the last chunk that `chunks` returned.
        skipped_empty, skipped_bad: documents that the corpus itself leaves out, because they have
            no text or are unreadable; complete once all chunks are read.
    """

    total_bytes: int | None = None
    bytes_read = 0
    position = START
    skipped_empty = 0
    skipped_bad = 0

    @abstractmethod
    def chunks(self, start: ReadPosition = START) -> Iterator[TextChunk]:
        """Yield the chunks from `start` on. They are the same for the same `identity`."""

    @abstractmethod
    def identity(self) -> str:
        """Return a SHA-256 (hexadecimal) that changes whenever the input changes."""


class FileCorpus(ChunkSource):
    """Input files, read in order.

    Args:
        files: from `find_files`.
        suffixes: as passed to `find_files`. They also select the members of archives.
        columns: columns to read from Parquet files; the first one must exist. JSON lines are always
            read completely.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        suffixes: Sequence[str] = (),
        columns: Sequence[str] = ("text",),
    ):
        self.files = list(files)
        self.total_bytes = sum(file.size for file in self.files)
        self._suffixes = tuple(suffixes)
        self._columns = tuple(columns)

    def identity(self) -> str:
        files = [[file.name, file.size, file.version] for file in self.files]
        content = json.dumps([files, self._suffixes]).encode("utf-8", "surrogatepass")
        return hashlib.sha256(content).hexdigest()

    def chunks(self, start: ReadPosition = START) -> Iterator[TextChunk]:
        """Yield all chunks from `start` on.

        Raises UserError if a file is damaged, truncated, or has changed since the position was
        recorded.
        """
        self.position = start
        finished_bytes = sum(file.size for file in self.files[: start.file])
        for file_number in range(start.file, len(self.files)):
            # Skip the chunks that an earlier run has read.
            file = self.files[file_number]
            skip = start.chunk if file_number == start.file else 0
            count = 0
            for count, (chunk, bytes_read) in enumerate(self._file_chunks(file), start=1):
                if count > skip:
                    self.bytes_read = finished_bytes + bytes_read
                    self.position = ReadPosition(file_number, count)
                    yield chunk
            if count < skip:
                raise UserError(f"{file.name} changed while it was being read")
            finished_bytes += file.size
            self.bytes_read = finished_bytes
            self.position = ReadPosition(file_number + 1)

    def _file_chunks(self, file: InputFile) -> Iterator[tuple[TextChunk, int]]:
        """Yield the chunks of a file, with the number of its bytes read so far."""
        try:
            with open_file(file.name) as raw:
                for chunk in self._stream_chunks(raw, PurePosixPath(file.name).name, file.name):
                    read = raw.tell()
                    if chunk.fraction_read is not None:
                        read = int(chunk.fraction_read * file.size)
                    yield chunk, read
        except NotImplementedError as error:  # for example, of a zip member
            raise UserError(
                f"{file.name} cannot be read: {first_line(error)}; extract or compress it again"
            ) from error
        except _DAMAGE_ERRORS as error:
            raise UserError(f"{file.name} is damaged or truncated: {first_line(error)}") from error
        except OSError as error:  # includes gzip's "not a gzipped file"
            raise UserError(
                f"cannot read {file.name}: {error.strerror or first_line(error)}"
            ) from error

    def _stream_chunks(self, raw: BinaryIO, name: str, source: str) -> Iterator[TextChunk]:
        """Yield the chunks of a file. `name` determines the format, `source` is for messages."""
        if file_format(name, self._suffixes) not in ARCHIVE_FORMATS:
            yield from self._document_chunks(raw, name, source)
            return
        for path, content in archive_members(raw, name, source, self._is_wanted):
            member, source_of_member = PurePosixPath(path).name, f"{source}:{path}"
            if file_format(member, self._suffixes) in (*ARCHIVE_FORMATS, "parquet"):
                raise UserError(
                    f"{source_of_member} cannot be read inside an archive; extract the outer "
                    "archive, and pass its files"
                )
            yield from self._document_chunks(content, member, source_of_member, in_archive=True)

    def _is_wanted(self, path: str) -> bool:
        """Hidden members are skipped, with `suffixes` also other types, otherwise errors."""
        if is_hidden(path):
            return False
        return not self._suffixes or file_format(path, self._suffixes) is not None

    def _document_chunks(
        self, raw: BinaryIO, name: str, source: str, in_archive: bool = False
    ) -> Iterator[TextChunk]:
        format_name = file_format(name, self._suffixes)
        if format_name is None:
            raise UserError(f"{source} has an unsupported file type; supported: {READABLE}")
        if format_name == "parquet":
            yield from parquet_chunks(raw, source, self._columns)
            return
        stream = decompress(raw, PurePosixPath(name.lower()).suffix, source)
        is_packed = in_archive or stream is not raw
        limit = MAX_COMPRESSED_DOCUMENT if is_packed else sys.maxsize
        if format_name == "text":
            yield TextChunk(source, "text", 1, read_document(stream, source, limit))
        else:
            yield from line_chunks(stream, source, format_name == "json", limit)


def archive_members(
    raw: BinaryIO, name: str, source: str, is_wanted: Callable[[str], bool]
) -> Iterator[tuple[str, BinaryIO]]:
    """Yield path and content of each wanted file in a tar or zip archive, in archive order.

    Args:
        name: of the archive; ends in .zip, or in .tar or .tgz with a compression.
        source: the name of the archive for messages.
        is_wanted: called with the path of a file in the archive.
    """
    if name.lower().endswith(".zip"):
        with zipfile.ZipFile(raw) as zipped:
            check_entries(zipped, raw)
            for entry in zipped.infolist():
                if entry.is_dir() or not is_wanted(entry.filename):
                    continue
                if entry.flag_bits & 1:
                    raise UserError(f"{source}:{entry.filename} is encrypted; unpack it first")
                with zipped.open(entry) as content:
                    yield entry.filename, cast(BinaryIO, content)
        return

    # "r|" reads in one pass without seeking, so a compressed archive is never in memory as a whole.
    stream = decompress(raw, PurePosixPath(name.lower()).suffix, source)
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=StrictTarInfo) as archive:
        for member in archive:
            # Otherwise the archive keeps every member.
            archive.members = []  # type: ignore[attr-defined]
            if member.isfile() and is_wanted(member.name):
                yield member.name, cast(BinaryIO, archive.extractfile(member))
        check_end(archive, source)


def check_entries(archive: zipfile.ZipFile, raw: BinaryIO) -> None:
    """Raises BadZipFile if the directory at the end of a zip file has fewer files than it says, or
    if the first file is not at the beginning. `zipfile` skips files after a damaged entry, and an
    archive in front of another one.
    """
    # The record at the end (section 4.3.16 of APPNOTE.TXT). 0xFFFF: the number is elsewhere.
    raw.seek(max(0, raw.seek(0, io.SEEK_END) - _ZIP_END_BYTES))
    tail = raw.read()
    (expected,) = struct.unpack_from("<H", tail, tail.rfind(b"PK\5\6") + 10)
    found = len(archive.infolist())
    if expected not in (found & 0xFFFF, 0xFFFF):
        raise zipfile.BadZipFile(f"its directory has {found} of {expected} files")
    starts = [entry.header_offset for entry in archive.infolist()]
    if starts and min(starts) > 0:
        raise zipfile.BadZipFile("it has data, or another archive, in front of its files")


def check_end(archive: tarfile.TarFile, source: str) -> None:
    """Read a tar file of mode "r|" to its end, which also verifies the checksum of a compressed
    one. Raises UserError if its end is not that of one complete archive.
    """
    remainder, zeros = cast(BinaryIO, archive.fileobj), 0
    while block := remainder.read(BLOCK):
        if block.strip(b"\0"):
            raise UserError(
                f"{source} has data after the end of its archive: it is damaged, or several "
                "archives are concatenated; pack it again"
            )
        zeros += len(block)
    if zeros > tarfile.RECORDSIZE:
        raise UserError(
            f"{source} ends with {zeros:,} zeros, in which files may have been lost (a tar file "
            f"ends with at most {tarfile.RECORDSIZE:,}); pack it again"
        )


class StrictTarInfo(tarfile.TarInfo):
    """A header that must be valid. `tarfile` treats a damaged one as the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "StrictTarInfo":
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # missing in typeshed
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {archive.offset:,} of the archive") from error


def read_document(stream: BinaryIO, source: str, limit: int, beginning: bytes = b"") -> bytes:
    """`beginning` and the rest of the stream. Raises UserError for more than `limit` bytes."""
    content = io.BytesIO()
    content.write(beginning)
    while block := stream.read(BLOCK):
        content.write(block)
        _check_document_size(content.tell(), source, limit)
    return content.getvalue()  # without a copy


def _check_document_size(size: int, source: str, limit: int) -> None:
    if size > limit:
        raise UserError(
            f"{source}: a document has more than {limit >> 20} MiB, the limit in compressed files "
            "and archives; unpack the file, or split the document"
        )


def line_chunks(
    stream: BinaryIO, source: str, may_be_list: bool, limit: int
) -> Iterator[TextChunk]:
    """Yield blocks of complete lines, or one list if `may_be_list` and the file begins with `[`."""
    pieces: list[bytes] = []  # of an incomplete line
    line = 1
    while block := stream.read(BLOCK):
        # Only the first block can begin a list.
        if may_be_list and block.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            yield TextChunk(source, "list", 1, read_document(stream, source, limit, block))
            return
        may_be_list = False

        # Cut after the last complete line.
        end = block.rfind(b"\n") + 1
        if end == 0:
            pieces.append(block)
            _check_document_size(sum(map(len, pieces)), source, limit)
            continue
        chunk = TextChunk(source, "lines", line, b"".join([*pieces, block[:end]]))
        pieces = [block[end:]]
        line += block.count(b"\n")
        yield chunk
    if any(pieces):
        chunk = TextChunk(source, "lines", line, b"".join(pieces))
        pieces.clear()  # a long line is in memory once
        yield chunk


def parquet_chunks(raw: BinaryIO, source: str, columns: Sequence[str]) -> Iterator[TextChunk]:
    """Yield the rows as JSON lines, restricted to those of `columns` that the table has."""
    pyarrow = import_package("pyarrow", "data", f"reading {source}")
    import_package("pyarrow.parquet", "data", f"reading {source}")
    try:
        table = pyarrow.parquet.ParquetFile(raw)
        schema = table.schema_arrow
        if columns[0] not in schema.names:
            raise UserError(
                f"{source} has no column {columns[0]!r}; its columns: "
                f"{', '.join(schema.names[:20])}"
            )
        present = [name for name in columns if name in schema.names]
        for name in present:
            column_type = schema.field(name).type
            if pyarrow.types.is_binary(column_type) or pyarrow.types.is_large_binary(column_type):
                raise UserError(f"{source}: column {name!r} is binary, not text")
        rows = 0
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=present):
            lines = []
            for row in batch.to_pylist():
                lines.append(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            first_row, rows = rows + 1, rows + len(lines)
            content = "".join(lines).encode("utf-8", "surrogatepass")
            fraction = rows / table.metadata.num_rows
            yield TextChunk(source, "lines", first_row, content, "row", fraction)
    except pyarrow.ArrowException as error:
        raise UserError(
            f"{source} is damaged or not a Parquet file: {str(error).splitlines()[0]}"
        ) from error
