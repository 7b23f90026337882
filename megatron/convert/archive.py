"""Unpacking a downloaded archive."""

import shutil
import tarfile
import zipfile
from pathlib import Path

from megatron.checkpoint.storage import CheckpointError
from megatron.utils.errors import first_line
from megatron.utils.files import open_file

# The first bytes of a zip file. The directory at its end, which zipfile.is_zipfile searches for,
# also ends a tar file whose last member is a file of torch.
_ZIP_SIGNATURES = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")


def unpack(archive: str | Path, folder: Path) -> None:
    """Unpack a zip or tar file (plain, gz, bz2 or xz) into a folder, and no file outside it.

    Raises UserError if the archive is missing or no regular file; and CheckpointError if it is
    damaged, takes more than the free space of the disk, or is a tar file with members that
    tarfile's filter "data" rejects. The caller must then remove what was unpacked before.
    """
    with open_file(archive) as stream:
        is_zip = stream.read(4) in _ZIP_SIGNATURES
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

    try:
        if is_zip:
            with zipfile.ZipFile(archive) as opened:
                check_size(sum(entry.file_size for entry in opened.infolist()))
            shutil.unpack_archive(archive, folder, "zip")
        else:
            shutil.unpack_archive(
                archive, folder, "tar", filter=check_member
            )  # with or without compression
    except Exception as error:  # the libraries raise many types for damaged files
        raise CheckpointError(f"{archive}: cannot be unpacked ({first_line(error)})") from error
