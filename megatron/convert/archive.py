"""Unpacking a downloaded archive: no files outside its folder, and a limited size."""

import struct
import tarfile
import zipfile
import zlib
from lzma import LZMAError
from pathlib import Path

from megatron.checkpoint.storage import CheckpointError
from megatron.utils.errors import first_line
from megatron.utils.files import open_file

# Of damaged archives; RuntimeError: encrypted, or an unknown compression.
ERRORS = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, struct.error),
    *(EOFError, ValueError, OSError, RuntimeError),
)


def unpack(archive: str | Path, folder: Path, max_bytes: int) -> None:
    """Unpack a zip or tar file (plain, gz, bz2 or xz) into a folder.

    Raises UserError if the archive is missing or no regular file; and CheckpointError if it is damaged, has more than
    `max_bytes`, or is a tar file with members that tarfile's filter "data" rejects. The caller must then remove what
    was unpacked before.
    """
    open_file(archive).close()
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                _check_size(archive, sum(member.file_size for member in opened.infolist()), max_bytes)
                opened.extractall(folder)  # without ".." and the root in names
        else:
            with tarfile.open(archive) as opened_tar:
                size = 0
                for member in opened_tar:
                    size += member.size
                    _check_size(archive, size, max_bytes)
                opened_tar.extractall(folder, filter="data")
    except ERRORS as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise CheckpointError(f"{archive}: cannot be unpacked ({reason})") from error


def _check_size(archive: str | Path, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise CheckpointError(f"{archive}: unpacks to more than {max_bytes} bytes; change it with --max-gigabytes")
