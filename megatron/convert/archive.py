"""Unpacking an untrusted archive: no files outside its folder, no links, no unlimited sizes."""

import bz2
import gzip
import io
import lzma
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from megatron.checkpoint.storage import CheckpointError, RejectedFile, check_zip_directory
from megatron.utils.errors import first_line
from megatron.utils.files import open_file

MAX_BYTES = 64 * 1024**3
MAX_FILES = 100_000
MAX_HEADER = 1 << 20
MAX_GLOBAL_HEADERS = 100  # git archive writes one
_BLOCK = 1 << 20
# What the libraries raise for damaged archives.
_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, struct.error),
    *(ValueError, IndexError, NotImplementedError, OverflowError),
)


def unpack(archive: str | Path, folder: Path, max_bytes: int = MAX_BYTES) -> int:
    """Unpack a zip or tar file (plain, gz, bz2 or xz) into an empty folder; return the number of files. Leaves out
    hidden files, such as the ._NAME that macOS adds for every file.

    Rejects names outside the folder, links, devices, duplicate names, more than `max_bytes` in total (as unpacked,
    whatever the archive declares) and more than 100,000 members. Raises CheckpointError, naming the member. The caller
    must then remove what was unpacked before.
    """
    # The smaller limit, with the reason to name.
    archive = Path(archive)
    free = shutil.disk_usage(folder).free
    limit, reason = min((max_bytes, "the limit (change it with --max-gigabytes)"), (free, "the free disk space"))
    remaining = limit
    written: set[Path] = set()
    try:
        for number, (name, content) in enumerate(_members(archive), start=1):
            if number > MAX_FILES:
                raise CheckpointError(f"{archive}: has more than {MAX_FILES} members")
            target = folder / _relative_path(archive, name)
            if target in written:
                raise CheckpointError(f"{archive}: contains {name!r} twice")
            if content is None:
                target.mkdir(parents=True, exist_ok=True)
                continue
            written.add(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, open(target, "xb") as handle:
                while block := content.read(_BLOCK):
                    remaining -= len(block)
                    if remaining < 0:
                        raise CheckpointError(f"{archive}: unpacks to more than {limit} bytes, {reason}")
                    handle.write(block)

        # Hidden files count for the limits, but are not needed.
        for target in [path for path in written if path.name.startswith(".")]:
            target.unlink()
            written.remove(target)
    except RejectedFile as error:
        raise CheckpointError(f"{archive}: rejected because it {error}") from error
    except _DAMAGE as error:
        raise CheckpointError(f"{archive}: is not a complete archive ({first_line(error)})") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"{archive}: {Path(error.filename).name!r} is both a file and a folder") from error
    except (RuntimeError, OSError) as error:  # RuntimeError: an encrypted member of a zip file
        raise CheckpointError(
            f"{archive}: cannot be unpacked ({getattr(error, 'strerror', None) or first_line(error)})"
        ) from error
    if not written:
        raise CheckpointError(f"{archive}: contains no files")
    return len(written)


def _relative_path(archive: Path, name: str) -> Path:
    """The member's path relative to the folder. Raises CheckpointError if it is outside."""
    path = PurePosixPath(name)
    parts = [part for part in path.parts if part != "."]
    windows = "\\" in name or ":" in name or "\0" in name
    if path.is_absolute() or windows or ".." in parts or not parts:
        raise CheckpointError(f"{archive}: {name!r} is outside the folder; nothing was unpacked")
    return Path(*parts)


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    """(name, content) of every member; content is None for a folder."""
    with open_file(archive) as stream:
        if stream.read(4) in (b"PK\3\4", b"PK\5\6"):  # the second is an empty archive
            check_zip_directory(stream)
            with zipfile.ZipFile(stream) as zip_file:
                for info in zip_file.infolist():
                    file_type = stat.S_IFMT(info.external_attr >> 16)
                    if file_type not in (0, stat.S_IFREG, stat.S_IFDIR):
                        raise CheckpointError(
                            f"{archive}: {info.filename!r} is a link or a device; only files are allowed"
                        )
                    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                        raise CheckpointError(f"{archive}: {info.filename!r} is not compressed with deflate")
                    yield info.filename, None if info.is_dir() else zip_file.open(info)
            return
        with tarfile.open(fileobj=(content := _Decompressed(stream)), mode="r|") as tar_file:
            while True:
                # tarfile reads names, PAX headers and sparse maps of any size into memory.
                content.remaining = MAX_HEADER
                member = tar_file.next()
                content.remaining = None
                # tarfile keeps the headers of all members, and copies global ones to each.
                tar_file.members.clear()  # type: ignore[attr-defined]
                if len(tar_file.pax_headers) > MAX_GLOBAL_HEADERS:
                    raise tarfile.ReadError(f"more than {MAX_GLOBAL_HEADERS} global headers")
                if member is None:
                    return
                if member.isdir():
                    if PurePosixPath(member.name).parts:
                        yield member.name, None
                elif member.isreg():
                    yield member.name, tar_file.extractfile(member)
                else:
                    raise CheckpointError(f"{archive}: {member.name!r} is a link or a device; only files are allowed")


class _Decompressed(io.RawIOBase):
    """The contents of a plain, gzip, bzip2 or xz file. Reading more than `remaining` bytes raises tarfile.ReadError."""

    def __init__(self, stream: IO[bytes]):
        self.remaining: int | None = MAX_HEADER  # tarfile.open reads the first header
        self._stream: Any = stream
        stream.seek(0)
        start = stream.read(6)
        stream.seek(0)
        self._decompressor: Any = None
        if start[:2] == b"\x1f\x8b":
            self._stream = gzip.GzipFile(fileobj=stream)
        elif start[:3] == b"BZh":
            self._new: Callable[[], Any] = bz2.BZ2Decompressor
            self._decompressor = self._new()
        elif start == b"\xfd7zXZ\0":
            # The file sets how much memory its decompression takes. `xz -9` needs 65 MiB.
            self._new = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=128 << 20)
            self._decompressor = self._new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer)) if self._decompressor is None else self._decompress(len(buffer))
        if self.remaining is not None:
            self.remaining -= len(data)
            if self.remaining < 0:
                raise tarfile.ReadError(f"a header has more than {MAX_HEADER:,} bytes")
        buffer[: len(data)] = data
        return len(data)

    def _decompress(self, size: int) -> bytes:
        while True:
            rest = b""
            if self._decompressor.eof:
                rest = self._decompressor.unused_data or self._stream.read(_BLOCK)
                if not rest:
                    return b""
                self._decompressor = self._new()
            elif self._decompressor.needs_input:
                rest = self._stream.read(_BLOCK)
                if not rest:
                    raise EOFError("the compressed data ends too early")
            data: bytes = self._decompressor.decompress(rest, size)
            if data:
                return data
