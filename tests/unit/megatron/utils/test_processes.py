"""Locks between real processes, and what a process does to end with its parent (test_orphans.py
kills parents).
"""

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.utils.processes import Lock, LockBusyError
from tests.support.errors import assert_rejected


@pytest.fixture
def hold() -> Iterator[Callable[[Path], int]]:
    """hold(path): the id of a process that holds the lock until the test ends. A forked child of it
    lives as long.
    """
    stopped, stop = os.pipe()
    holders = []

    def start(path: Path) -> int:
        locked, ready = os.pipe()
        holder = os.fork()
        if holder == 0:
            try:
                os.close(stop)
                lock = Lock(path, "busy")
                lock.acquire()
                if os.fork() == 0:
                    os.write(
                        ready, b"locked"
                    )  # by now, this child has closed its copy of the locked file
                os.close(ready)
                os.read(stopped, 1)
            finally:
                os._exit(0)
        os.close(ready)
        assert os.read(locked, 6) == b"locked"
        os.close(locked)
        holders.append(holder)
        return holder

    yield start
    os.close(stop)
    for holder in holders:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(holder, 0)
    os.close(stopped)


def test_the_error_names_the_holding_process(tmp_path, hold):
    holder = hold(tmp_path / "corpus.lock")
    message = rf"^busy \(held by process {holder} on {socket.gethostname()}\)$"
    with pytest.raises(LockBusyError, match=message):
        Lock(tmp_path / "corpus.lock", "busy").acquire()


def test_the_lock_of_a_killed_process_is_free_even_if_its_children_live(tmp_path, hold):
    path = tmp_path / "corpus.lock"
    holder = hold(path)
    with pytest.raises(LockBusyError):
        Lock(path, "busy").acquire()
    os.kill(holder, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(holder, 0)[1]) == -signal.SIGKILL
    assert path.exists()
    with Lock(path, "busy"):
        assert str(os.getpid()) in path.read_text()
    assert not path.exists()


def test_only_one_lock_in_a_process(tmp_path):
    path = tmp_path / "new folder" / "corpus.lock"
    with Lock(path, "busy"), pytest.raises(LockBusyError, match="busy"):
        Lock(path, "busy").acquire()
    assert not path.parent.exists()
    with Lock(path, "busy"):
        (path.parent / "file").write_text("")
    assert [file.name for file in path.parent.iterdir()] == ["file"]


def test_a_file_that_cannot_be_removed_stays_behind(tmp_path):
    """As in a folder that has become read-only; root could remove a file there."""
    path = tmp_path / "corpus.lock"
    lock = Lock(path, "busy")
    with lock:
        path.unlink()
        path.mkdir()
    path.rmdir()
    with lock:
        assert path.is_file()


def test_a_folder_without_locks(tmp_path, monkeypatch):
    """One that cannot be created, and one on a file system without flock."""
    (tmp_path / "file").write_text("")
    lock = Lock(tmp_path / "file" / "corpus.lock", "busy")
    assert_rejected(f"{tmp_path}/file/corpus.lock: ", lock.acquire)

    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    lock = Lock(tmp_path / "corpus.lock", "busy")
    assert_rejected(f"{tmp_path}/corpus.lock: .* flock", lock.acquire)
