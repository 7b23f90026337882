"""Locks between processes, and processes that end with the one that started them, even if it is
killed with SIGKILL.

A lock is an flock on a file that names its holder. The kernel releases it when the process ends for
any reason.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import filelock

from megatron.utils.errors import UserError

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # only Linux has it


def available_cores() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def signal_without_parent(number: int) -> Callable[[], None]:
    """A preexec_fn for subprocess.Popen: the new process receives a signal as soon as this one has
    ended.

    Linux sends it when the *thread* that starts the process ends, so start it in the main thread.
    Elsewhere nothing is sent.
    """
    parent = os.getpid()

    def prepare() -> None:
        if _prctl is None:
            return
        if number != signal.SIGKILL:
            # Until the new program runs, a handler of the parent, written in Python, would discard
            # the signal.
            signal.signal(number, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it has ended before the call of prctl
            os._exit(1)

    return prepare


def exit_with_parent() -> None:
    """Make this process, started by `multiprocessing`, exit when its parent has ended.

    Otherwise it might wait forever for its next task.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


class LockBusyError(UserError):
    """Another process holds the lock."""


class Lock:
    """An exclusive lock between processes. Use it as a context manager, or call `acquire` and
    `release`.

    The file is removed by `release`. A killed process leaves it behind, but not the lock.

    Args:
        path: the lock file. Its folder is created if missing; `release` then removes it if it is
            still empty.
        busy_message: the message of the UserError that `acquire` raises if another process holds
            the lock. `acquire` appends that process and its host in parentheses.
    """

    def __init__(self, path: str | Path, busy_message: str):
        self._path = Path(path)
        self._busy_message = busy_message
        self._lock = filelock.FileLock(self._path, thread_local=False, fallback_to_soft=False)
        self._created_folder = False

    def acquire(self, timeout: float = 0) -> None:
        """Acquire the lock. timeout: seconds to wait for a process that holds it; negative:
        forever.

        Raises LockBusyError if a process still holds it then, and UserError if the file cannot be
        written, or its file system does not support flock.
        """
        # The content of the file is only for the message of other processes.
        try:
            self._created_folder = not self._path.parent.exists()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout)
            self._path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        except filelock.Timeout:
            raise LockBusyError(self._busy_message + self._holder()) from None
        except OSError as error:
            self._lock.release()
            raise UserError(
                f"cannot lock {self._path}: {error.strerror}; choose a writable folder on a file "
                "system that supports flock"
            ) from error

    def release(self) -> None:
        """Remove the file and release the lock. Does nothing if this object does not hold the lock.

        A file that cannot be removed, for example because the folder has become read-only, stays
        behind like that of a killed process.
        """
        if not self._lock.is_locked:
            return
        # Safe while locked: filelock does not accept a file that was removed between its open() and
        # flock().
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._lock.release(force=True)
        if self._created_folder:
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()

    def _holder(self) -> str:
        """ " (held by process 123 on host)"; empty if the file does not say."""
        try:
            return f" (held by {self._path.read_text(errors='replace').strip()})"
        except OSError:
            return ""

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
