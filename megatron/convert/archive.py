"""Unpacking a downloaded archive."""

import shutil
import zipfile
from pathlib import Path

from megatron.checkpoint.storage import CheckpointError
from megatron.utils.errors import first_line
from megatron.utils.files import open_file


def unpack(archive: str | Path, folder: Path) -> None:
    """Unpack a zip or tar file (plain, gz, bz2 or xz) into a folder, and no file outside it.

    Raises UserError if the archive is missing or no regular file; and CheckpointError if it is damaged, or is a tar
    file with members that tarfile's filter "data" rejects. The caller must then remove what was unpacked before.
    """
    open_file(archive).close()
    try:
        if zipfile.is_zipfile(archive):
            shutil.unpack_archive(archive, folder, "zip")
        else:
            shutil.unpack_archive(archive, folder, "tar", filter="data")  # with or without compression
    except Exception as error:  # the libraries raise many types for damaged files
        raise CheckpointError(f"{archive}: cannot be unpacked ({first_line(error)})") from error
