"""Writing files atomically: a file has either its old or its complete new content, even after a crash."""

import contextlib
import os
from pathlib import Path

from megatron.utils.errors import UserError


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write `content` to a temporary file in the same folder, and rename it to `path`.

    Raises UserError if the file cannot be written, for example because the disk is full.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with open(partial, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def sync_folder(folder: str | Path) -> None:
    """Make renames in `folder` survive a power failure, on file systems that support it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
