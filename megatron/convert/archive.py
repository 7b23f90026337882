"""Unpacking a downloaded archive: no files outside its folder, no links, and a limited size."""

import contextlib
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from lzma import LZMAError
from pathlib import Path

from megatron.checkpoint.storage import CheckpointError
from megatron.utils.errors import first_line
from megatron.utils.files import open_file

MAX_BYTES = 64 * 1024**3


def unpack(archive: str | Path, folder: Path, max_bytes: int = MAX_BYTES) -> int:
    """Unpack a zip or tar file (plain, gz, bz2 or xz) into an empty folder; return the number of files. Leaves out
    hidden files, such as the ._NAME that macOS adds for every file.

    Raises CheckpointError for a damaged archive, a name outside the folder, a link, a device, and more than
    `max_bytes`. The caller must then remove what was unpacked before.
    """
    # The smaller limit, with the reason to name.
    free = shutil.disk_usage(folder).free
    limit, reason = min((max_bytes, "the limit (change it with --max-gigabytes)"), (free, "the free disk space"))
    open_file(archive).close()
    with _errors_of(archive):
        if zipfile.is_zipfile(archive):
            size = _unpack_zip(archive, folder, limit)
        else:
            size = _unpack_tar(archive, folder, limit)
    if size > limit:
        raise CheckpointError(f"{archive}: unpacks to more than {limit} bytes, {reason}")

    # Hidden files count for the limit, but are not needed.
    files = [path for path in folder.rglob("*") if path.is_file()]
    hidden = [path for path in files if path.name.startswith(".")]
    for path in hidden:
        path.unlink()
    if len(files) == len(hidden):
        raise CheckpointError(f"{archive}: contains no files")
    return len(files) - len(hidden)


def _unpack_zip(archive: str | Path, folder: Path, limit: int) -> int:
    """The total size of the members, which are unpacked if it is at most `limit`. zipfile reads no more bytes of a
    member than its directory says, and removes ".." and the root from names.
    """
    with zipfile.ZipFile(archive) as opened:
        members = opened.infolist()
        for member in members:
            if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise CheckpointError(f"{archive}: {member.filename!r} is a link or a device; only files are allowed")
            _check_inside(archive, member.filename)
        size = sum(member.file_size for member in members)
        if size <= limit:
            opened.extractall(folder)
    return size


def _unpack_tar(archive: str | Path, folder: Path, limit: int) -> int:
    """The total size of the members; unpacking ends where it exceeds `limit`."""
    size = 0
    with tarfile.open(archive) as opened:
        for member in opened:
            if not (member.isreg() or member.isdir()):
                raise CheckpointError(f"{archive}: {member.name!r} is a link or a device; only files are allowed")
            _check_inside(archive, member.name)
            size += member.size
            if size > limit:
                break
            opened.extract(member, folder, filter="data")
    return size


def _check_inside(archive: str | Path, name: str) -> None:
    """Raises CheckpointError for an absolute name and one with "..", in the notation of Linux or Windows."""
    parts = name.replace("\\", "/").split("/")
    if ".." in parts or parts[0] == "" or ":" in parts[0]:
        raise CheckpointError(f"{archive}: {name!r} is outside the folder; nothing was unpacked")


@contextlib.contextmanager
def _errors_of(archive: str | Path) -> Iterator[None]:
    """Turn the errors of the libraries into a one-line CheckpointError."""
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, struct.error, EOFError, ValueError) as error:
        raise CheckpointError(f"{archive}: is not a complete archive ({first_line(error)})") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: encrypted, or an unknown compression
        raise CheckpointError(
            f"{archive}: cannot be unpacked ({getattr(error, 'strerror', None) or first_line(error)})"
        ) from error
