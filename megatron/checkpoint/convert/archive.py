"""Unpacking an untrusted archive: no files outside its folder, no links, no unlimited sizes."""

import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO

from megatron.checkpoint.storage import CheckpointError

MAX_BYTES = 64 * 1024**3
MAX_FILES = 100_000
_BLOCK = 1 << 20


def unpack(archive: str | Path, folder: Path, max_bytes: int = MAX_BYTES) -> int:
    """Unpack a zip or tar file (plain, gz, bz2 or xz) into an empty folder; return the number of files.

    Rejects names outside the folder, links, devices, duplicate names, more than `max_bytes` in total (as unpacked,
    whatever the archive declares) and more than 100,000 members. Raises CheckpointError, naming the member. The caller
    must then remove what was unpacked before.
    """
    archive = Path(archive)
    if not archive.is_file():
        raise CheckpointError(f"{archive}: no such file; give a zip, tar or tar.gz archive")
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
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, EOFError) as error:
        raise CheckpointError(f"{archive}: is not a complete archive ({error})") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"{archive}: {Path(error.filename).name!r} is both a file and a folder") from error
    except RuntimeError as error:  # zipfile raises it for an encrypted member
        raise CheckpointError(f"{archive}: cannot be unpacked ({error})") from error
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
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zip_file:
            for info in zip_file.infolist():
                file_type = stat.S_IFMT(info.external_attr >> 16)
                if file_type not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise CheckpointError(f"{archive}: {info.filename!r} is a link or a device; only files are allowed")
                yield info.filename, None if info.is_dir() else zip_file.open(info)
        return
    with tarfile.open(archive, mode="r|*") as tar_file:
        for member in tar_file:
            if member.isdir():
                if PurePosixPath(member.name).parts:
                    yield member.name, None
            elif member.isreg():
                yield member.name, tar_file.extractfile(member)
            else:
                raise CheckpointError(f"{archive}: {member.name!r} is a link or a device; only files are allowed")
