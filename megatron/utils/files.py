"""Writing files so that a name never shows a half-written one."""

import contextlib
import os
from pathlib import Path

from megatron.utils.errors import UserError


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write `content` beside `path` and rename it into place; a kill or a full disk leaves the old file, or none.

    Raises:
        UserError: from the OSError that says why it cannot be written.
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
    """Make renames in `folder` survive a power cut, on file systems that can (some remote ones refuse)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
