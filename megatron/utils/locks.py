"""A file that tells other processes to keep away. The system gives the lock up with the process, however that ends."""

import fcntl
import os
from pathlib import Path

from megatron.utils.errors import UserError


class Lock:
    """Held between entering and leaving; the file is there as long. A context manager.

    Args:
        path: of the file; its folder is made.
        refusal: the UserError's message where another process holds it.
    """

    def __init__(self, path: str | Path, refusal: str):
        self._path = Path(path)
        self._refusal = refusal

    def __enter__(self) -> "Lock":
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self._path, "ab")
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._holds_the_file():
                raise BlockingIOError
        except BlockingIOError as error:
            raise UserError(self._refusal) from error
        except OSError as error:
            raise UserError(f"cannot write {error.filename or self._path}: {error.strerror}") from error
        return self

    def _holds_the_file(self) -> bool:
        """False if the process that held the lock removed the file in this very moment."""
        try:
            return os.path.samestat(os.fstat(self._stream.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def __exit__(self, *exception) -> None:
        self._path.unlink(missing_ok=True)
        self._stream.close()
