"""Unpacking an archive that a stranger made: nothing outside its folder, no links, no endless files."""

import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from megatron.checkpoint.storage import CheckpointError

MOST_BYTES = 64 * 1024**3
MOST_FILES = 100_000
_BLOCK = 1 << 20


class Refused(CheckpointError):
    """An archive's member that is not unpacked, and why."""


def unpack(archive: str | Path, folder: Path, most_bytes: int = MOST_BYTES) -> int:
    """Unpack a zip or tar file (plain, gz, bz2 or xz) into an empty folder; returns the number of files.

    Names that lead out of the folder, links, devices, a name that comes twice, more than `most_bytes` in all (as
    unpacked, whatever the archive declares) or more than 100,000 members are refused. Raises CheckpointError that names
    the member; what was unpacked by then is the caller's to remove.
    """
    archive = Path(archive)
    if not archive.is_file():
        raise CheckpointError(f"{archive}: no such file; give a zip, tar or tar.gz archive")
    free = shutil.disk_usage(folder).free
    limit, why = min((most_bytes, "the limit (--max-gigabytes sets another)"), (free, "all the disk has free"))
    room = limit
    taken: set[Path] = set()
    try:
        for number, (name, content) in enumerate(_members(archive), start=1):
            if number > MOST_FILES:
                raise Refused(f"{archive}: holds more than {MOST_FILES} members")
            target = folder / _inside(archive, name)
            if target in taken:
                raise Refused(f"{archive}: {name!r} is in it twice")
            if content is None:
                target.mkdir(parents=True, exist_ok=True)
                continue
            taken.add(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, open(target, "xb") as handle:
                while block := content.read(_BLOCK):
                    room -= len(block)
                    if room < 0:
                        raise Refused(f"{archive}: unpacks to more than {limit} bytes, {why}")
                    handle.write(block)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, EOFError) as error:
        raise CheckpointError(f"{archive}: is not a whole archive ({error})") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise Refused(f"{archive}: {Path(error.filename).name!r} is both a file and a folder in it") from error
    except RuntimeError as error:  # zipfile's word for a password
        raise CheckpointError(f"{archive}: cannot be unpacked ({error})") from error
    if not taken:
        raise CheckpointError(f"{archive}: holds no files")
    return len(taken)


def _inside(archive: Path, name: str) -> Path:
    """The member's path, relative to the folder. Raises Refused if it leads elsewhere."""
    path = PurePosixPath(name)
    parts = [part for part in path.parts if part != "."]
    windows = "\\" in name or ":" in name or "\0" in name
    if path.is_absolute() or windows or ".." in parts or not parts:
        raise Refused(f"{archive}: {name!r} leads out of the folder; nothing of the archive was kept")
    return Path(*parts)


def _members(archive: Path) -> Iterator[tuple[str, BinaryIO | None]]:
    """(name, content) of every member; None for a folder."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)
                if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise Refused(f"{archive}: {info.filename!r} is a link or a device; only files are unpacked")
                yield info.filename, None if info.is_dir() else opened.open(info)
        return
    with tarfile.open(archive, mode="r|*") as opened:
        for member in opened:
            if member.isdir():
                if PurePosixPath(member.name).parts:
                    yield member.name, None
            elif member.isreg():
                yield member.name, opened.extractfile(member)
            else:
                raise Refused(f"{archive}: {member.name!r} is a link or a device; only files are unpacked")
