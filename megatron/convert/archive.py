"""Unpacking a downloaded archive."""

import bz2
import gzip
import lzma
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.checkpoint.storage import CheckpointError
from megatron.preparation.readers import StrictTarInfo, check_end, check_entries
from megatron.utils.errors import first_line
from megatron.utils.files import open_file

# The first bytes of a zip file. The directory at its end, which zipfile.is_zipfile searches for,
# also ends a tar file whose last member is a file of torch.
_ZIP_SIGNATURES = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
# The first bytes of a compressed tar file -> how to open it.
_COMPRESSIONS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}


def unpack(archive: str | Path, folder: Path) -> None:
    """Unpack a zip or tar file (plain, gz, bz2 or xz) into a folder, and no file outside it.

    Raises UserError if the archive is missing or no regular file; and CheckpointError if it is
    damaged, takes more than the free space of the disk, or is a tar file with members that
    tarfile's filter "data" rejects. The caller must then remove what was unpacked before.
    """
    # The format, and the space for the files.
    with open_file(archive) as stream:
        start = stream.read(6)
    free, size = shutil.disk_usage(folder).free, 0

    def check_size(added: int) -> None:
        nonlocal size
        size += added
        if size > free:
            raise CheckpointError(
                f"its files have at least {size:,} bytes, but the disk of {folder} has {free:,} "
                "left"
            )

    def check_member(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        """The sizes in a compressed tar file are known only while it is unpacked."""
        check_size(member.size)
        return tarfile.data_filter(member, path)

    # A tar file is read to its end, with the checksum of the compression.
    try:
        if start.startswith(_ZIP_SIGNATURES):
            with open_file(archive) as stream, zipfile.ZipFile(stream) as zipped:
                check_entries(zipped, stream)
                check_size(sum(entry.file_size for entry in zipped.infolist()))
                zipped.extractall(folder)
            return
        opened: Callable[..., Any] = open
        for signature, function in _COMPRESSIONS.items():
            if start.startswith(signature):
                opened = function
        with (
            opened(archive, "rb") as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=StrictTarInfo) as tar,
        ):
            tar.extractall(folder, filter=check_member)
            check_end(tar, str(archive))
    except Exception as error:  # the libraries raise many types for damaged files
        raise CheckpointError(f"{archive}: cannot be unpacked ({first_line(error)})") from error
