"""An exclusive lock between processes, based on a lock file that names its holder.

On a local disk it is an flock, which the kernel releases when the process ends for any reason. On a network file
system, flock may be missing, or work only within a host. There, filelock's lease is used: the holder creates the file
atomically and changes its modification time every few seconds (the heartbeat). Another process takes over the lock if
the holder was on the same host and has ended (process id and start time), or if it sees no heartbeat for
`LEASE_SECONDS`. It measures this time with its own monotonic clock, so the clocks of hosts may differ or jump.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import time
from pathlib import Path
from types import TracebackType

import filelock
import psutil

from megatron.utils.errors import UserError

# All processes that use a lock must agree on it. A holder that is suspended or disconnected for longer can lose it.
LEASE_SECONDS = 60.0
HEARTBEAT_SECONDS = 6.0
POLL_SECONDS = 0.5
# Errors of flock that mean that the file system does not support it.
_UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\w*|fuse|fuse\..*|lustre|gpfs|beegfs|ceph|afs|9p|virtiofs|pvfs2|orangefs|panfs|wekafs|glusterfs"
)
_HOLDER = re.compile(r"^pid=(\d{1,20})\nhost=([!-~]{1,255})$", re.MULTILINE)
_IS_LEASE = re.compile(r"^mode=lease$", re.MULTILINE)


class LockBusyError(UserError):
    """Another process holds the lock."""


class Lock:
    """An exclusive lock between processes. Use it as a context manager, or call `acquire` and `release`.

    The file is removed by `release`. A killed process leaves it behind, but not the lock.

    Args:
        path: the lock file. Its folder is created if missing; `release` then removes it if it is still empty.
        busy_message: the message of the UserError that `acquire` raises if another process holds the lock. `acquire`
            appends that process and its host in parentheses.
        force: take the lock over from another process. If that process still runs, its next `check` raises UserError.
    """

    def __init__(self, path: str | Path, busy_message: str, *, force: bool = False):
        self._path = Path(path)
        self._busy_message = busy_message
        self._force = force
        self._lock: filelock.BaseFileLock | None = None
        self._content = ""  # of the file, while this object holds the lock
        self._created_folder = False

    def acquire(self) -> None:
        """Acquire the lock. Waits only for a lease, for up to `LEASE_SECONDS`, until it sees that its holder runs.

        Raises:
            LockBusyError: another process holds the lock.
            UserError: the file cannot be written.
        """
        try:
            self._created_folder = not self._path.parent.exists()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            holder = self._holder() if self._force else ""
            if self._force:
                self._path.unlink(missing_ok=True)
            # A lease on a local disk is from a host that mounts the folder over the network.
            if _needs_lease(self._path.parent) or _IS_LEASE.search(self._read()):
                self._acquire_lease()
            else:
                self._acquire_flock()
            if holder:
                print(f"{self._path}: took over the lock{holder}", flush=True)
        except OSError as error:
            raise UserError(f"cannot write {error.filename or self._path}: {error.strerror}") from error

    def _acquire_flock(self) -> None:
        lock = filelock.FileLock(self._path, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise self._busy() from None
        # The format of filelock's leases, with a mode that filelock never takes over.
        lines = ("filelock/2", f"pid={os.getpid()}", f"host={socket.gethostname()}", "mode=exclusive")
        self._content = "\n".join((*lines, f"token={secrets.token_hex(16)}", ""))
        self._path.write_text(self._content)
        self._lock = lock

    def _acquire_lease(self) -> None:
        lock = filelock.SoftFileLease(
            self._path,
            lease_duration=LEASE_SECONDS,
            heartbeat_interval=HEARTBEAT_SECONDS,
            timeout=0,
            thread_local=False,
        )
        observed, started_at = self._observe(), time.monotonic()
        waited = broken = False
        while True:
            with contextlib.suppress(filelock.Timeout):
                lock.acquire()
                break
            now = self._observe()
            if now is not None and now != observed:
                if observed is not None:
                    raise self._busy()
                observed, started_at = now, time.monotonic()
            if time.monotonic() - started_at > LEASE_SECONDS + HEARTBEAT_SECONDS:
                if now is not None and now[0] and not _IS_LEASE.search(now[0]):
                    raise self._busy()  # an flock
                # filelock cannot take over this lease, because the file system cannot exchange two files.
                lock.force_break()
                broken = True
            if not waited:
                waited = True
                print(
                    f"{self._path} exists{self._holder()}; waiting up to {LEASE_SECONDS:.0f} s to see whether that "
                    "process still runs",
                    flush=True,
                )
            time.sleep(POLL_SECONDS)
        self._lock, self._content = lock, self._read()
        if broken:
            # Another process may have found the same lease expired, and then removed our file instead of it.
            time.sleep(4 * POLL_SECONDS)
            if not self._is_held():
                self._lock = None
                lock.release(force=True)
                raise self._busy()

    def check(self) -> None:
        """Raises UserError if another process has taken the lock over. Does nothing if this object does not hold it."""
        if self._lock is None or self._is_held():
            return
        time.sleep(2 * POLL_SECONDS)  # a process that tries to acquire a lease may move the file for a moment
        if not self._is_held():
            raise UserError(
                f"{self._path}: this process has lost the lock{self._holder()}, so it stops; another process took it "
                "over (--force-lock), the file was removed, or this process could not reach the file for "
                f"{LEASE_SECONDS:.0f} s"
            )

    def _is_held(self) -> bool:
        if isinstance(self._lock, filelock.SoftFileLease) and self._lock.compromise is not None:
            return False
        return self._read() == self._content

    def release(self) -> None:
        """Remove the file and release the lock. Does nothing if this object does not hold the lock."""
        lock, self._lock = self._lock, None
        if lock is not None:
            if not isinstance(lock, filelock.SoftFileLease) and self._read() == self._content:
                # Safe while locked: filelock does not accept a file that was removed between its open() and flock().
                self._path.unlink(missing_ok=True)
            lock.release(force=True)
            if self._created_folder:
                with contextlib.suppress(OSError):
                    self._path.parent.rmdir()

    def _busy(self) -> LockBusyError:
        return LockBusyError(self._busy_message + self._holder())

    def _holder(self) -> str:
        """ " (held by process 123 on host)"; empty if the file does not say."""
        match = _HOLDER.search(self._read())
        return f" (held by process {match[1]} on {match[2].partition('?')[0]})" if match else ""

    def _read(self) -> str:
        """The first kilobyte of the file; empty if it cannot be read."""
        observed = self._observe()
        return observed[0] if observed else ""

    def _observe(self) -> tuple[str, int, int] | None:
        """(first kilobyte, inode, modification time) of the file; None if it cannot be read.

        Opens the file, because network file systems cache the modification time of closed ones.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            return os.read(descriptor, 1024).decode(errors="replace"), status.st_ino, status.st_mtime_ns
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _needs_lease(folder: Path) -> bool:
    """Whether flock does not work in this folder, or not between hosts, as on a network file system."""
    path = folder.resolve()
    mounted = {Path(partition.mountpoint): partition.fstype for partition in psutil.disk_partitions(all=True)}
    file_system = next((mounted[parent] for parent in (path, *path.parents) if parent in mounted), "")
    if _NETWORK_FILE_SYSTEMS.fullmatch(file_system):
        return True
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _UNSUPPORTED
    finally:
        os.close(descriptor)
    return False
