"""An exclusive lock between processes, based on a lock file. The system releases it when the process dies."""

import os
import socket
from pathlib import Path
from types import TracebackType

import filelock

from megatron.utils.errors import UserError


class Lock:
    """An exclusive lock between processes. Use it as a context manager, or call `acquire` and `release`.

    The file exists only while the lock is held. It contains the process and host that hold it.

    Args:
        path: the lock file. Its folder is created if missing.
        busy_message: the message of the UserError that `acquire` raises if another process holds the lock. `acquire`
            appends that process and its host in parentheses.
    """

    def __init__(self, path: str | Path, busy_message: str):
        self._path = Path(path)
        self._busy_message = busy_message
        self._lock = filelock.FileLock(str(path), timeout=0, thread_local=False)

    def acquire(self) -> None:
        """Acquire the lock without waiting.

        Raises:
            UserError: another process holds the lock, or the file cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        except filelock.Timeout as error:
            raise UserError(self._busy_message + self._holder()) from error
        except OSError as error:
            raise UserError(f"cannot write {error.filename or self._path}: {error.strerror}") from error

    def _holder(self) -> str:
        """ " (held by process 123 on host)"; empty if the file does not say."""
        try:
            holder = self._path.read_text(encoding="utf-8", errors="replace")[:200].strip()
        except OSError:
            return ""
        return f" (held by {holder})" if holder.isprintable() and holder else ""

    def release(self) -> None:
        """Remove the file and release the lock. Does nothing if this object does not hold the lock."""
        if self._lock.is_locked:
            # Safe while locked: filelock does not accept a file that was removed between its open() and flock().
            self._path.unlink(missing_ok=True)
            self._lock.release(force=True)

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
