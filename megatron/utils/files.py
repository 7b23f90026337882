"""Expanding paths, reading files of limited size, writing files atomically (a file has either its
old or its complete new content, even after a crash), and checking in advance that a folder is
writable.
"""

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from megatron.utils.errors import UserError
from megatron.utils.secrets import contains_secret, is_secret_name

# The file in log_dir to which training appends metrics.
METRICS = "metrics.jsonl"


def expanded_path(text: str) -> str:
    """`text` with the values of `~`, `~USER`, `$NAME` and `${NAME}`, as in a shell.

    Raises UserError if there is no such user or variable, or if the variable contains a secret.
    """
    for match in re.finditer(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", text):
        name = match[1] or match[2]
        if is_secret_name(name):
            raise UserError(
                f"{text}: {name} contains a secret, which cannot be part of a path; remove it"
            )
        if name not in os.environ:
            raise UserError(
                f"{text}: the environment variable {name} is not set; set it, or write the path in "
                "full"
            )
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise UserError(f"{text}: there is no such user; for a file of this name, write ./{text}")
    expanded = os.path.expandvars(path)
    if expanded != path and contains_secret(expanded):
        raise UserError(
            f"{text}: a variable contains a secret, which cannot be part of a path; remove it"
        )
    return expanded


def open_file(path: str | Path) -> BufferedReader:
    """Open a regular file for reading. Never waits for a FIFO or opens a device.

    Raises UserError if the file is missing, unreadable, or not a regular file.
    """
    with read_errors(path):
        # O_NONBLOCK: open() would wait for the writer of a FIFO.
        stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise UserError(f"{path} is not a regular file")
    return stream


def read_file(path: str | Path, limit: int = 1 << 26) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Use it for files from outside that are parsed as a whole. Raises UserError if the file is
    larger, or as `open_file`.
    """
    with read_errors(path), open_file(path) as stream:
        content = stream.read(min(os.fstat(stream.fileno()).st_size, limit) + 1)
    if len(content) > limit:
        raise UserError(f"{path} is larger than {limit:,} bytes, the limit for files of this kind")
    return content


def read_lines(path: str | Path, limit: int) -> Iterator[bytes]:
    """The lines of a regular file of any size, with newlines. limit: of a line."""
    with read_errors(path), open_file(path) as stream:
        number = 0
        while line := stream.readline(limit + 1):
            number += 1
            if len(line) > limit:
                raise UserError(f"{path}, line {number} is longer than {limit:,} bytes")
            yield line


@contextlib.contextmanager
def read_errors(path: str | Path) -> Iterator[None]:
    """Turn every OSError into a UserError that names the file that is read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


@contextlib.contextmanager
def write_errors(path: str | Path) -> Iterator[None]:
    """Turn every OSError into a UserError that names the file that is written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def check_writable(folder: str | Path, key: str) -> None:
    """Check that files can be written to `folder`, by writing, flushing and deleting a small one.

    Commands call it before long work whose result they write to `folder`. If it does not exist, its
    closest existing parent is checked. Raises UserError that names `key`, the key or option of the
    folder.
    """
    # The closest folder that exists.
    place = Path(folder).absolute()
    try:
        while not os.path.lexists(place):
            place = place.parent

        # Without a name where the file system allows it, so that a killed process leaves nothing
        # behind.
        with tempfile.TemporaryFile(prefix=".writable-", dir=place) as stream:
            stream.write(bytes(4096))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise UserError(
            f"{key}: cannot write to {folder}: {error.strerror}; choose a writable folder"
        ) from error


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write `content` to a temporary file in the same folder, and rename it to `path`.

    Raises UserError if the file cannot be written, for example because the disk is full.
    """
    # The name has the process, so that two processes do not write to one file.
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with write_errors(path):
            with open(partial, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(path)
            sync_folder(path.parent)
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
