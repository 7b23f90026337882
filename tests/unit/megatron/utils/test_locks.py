import errno
import os
import signal
import socket
import threading
import time

import filelock
import pytest

from megatron.utils import locks
from megatron.utils.errors import UserError
from megatron.utils.locks import Lock


@pytest.fixture(autouse=True)
def seconds(monkeypatch):
    monkeypatch.setattr(locks, "LEASE_SECONDS", 0.8)
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(locks, "POLL_SECONDS", 0.02)


@pytest.fixture
def lease(monkeypatch):
    """All folders are on a network file system."""
    monkeypatch.setattr(locks.psutil, "disk_partitions", lambda all: [_Partition("/", "nfs4")])


@pytest.fixture(params=["flock", "lease"])
def either(request):
    """Both kinds of locks."""
    if request.param == "lease":
        request.getfixturevalue("lease")


class _Partition:
    def __init__(self, mountpoint, fstype):
        self.mountpoint, self.fstype = mountpoint, fstype


class OtherHost:
    """A process on another host that holds a lease. It sends heartbeats with its own clock, in seconds."""

    def __init__(self, path, *, mode="lease", duration=0.8):
        self.path = path
        lines = ("filelock/2", "pid=1", "host=node-7", f"mode={mode}", "token=abc", f"duration={duration}", "")
        path.write_text("\n".join(lines))
        self._ended = threading.Event()

    def send_heartbeats(self, clock):
        def run():
            while not self._ended.wait(0.1):
                seconds = clock()
                os.utime(self.path, (seconds, seconds))

        self._thread = threading.Thread(target=run)
        self._thread.start()
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()


# -- both kinds -------------------------------------------------------------------------------------------------------


def test_only_one_holder(tmp_path, either):
    path = tmp_path / "new folder" / "corpus.lock"
    with Lock(path, "busy"), pytest.raises(UserError, match="busy"):
        Lock(path, "busy").acquire()
    assert not path.parent.exists()
    with Lock(path, "busy") as lock:
        assert path.exists()
        (path.parent / "file").write_text("")
        lock.check()
    assert [file.name for file in path.parent.iterdir()] == ["file"]


def test_the_message_names_the_holder(tmp_path, either):
    path = tmp_path / "corpus.lock"
    holder = rf"busy \(held by process {os.getpid()} on {socket.gethostname()}\)"
    with Lock(path, "busy"), pytest.raises(UserError, match=holder):
        Lock(path, "busy").acquire()


def test_release_without_acquire(tmp_path, either):
    lock = Lock(tmp_path / "corpus.lock", "busy")
    lock.release()
    lock.check()
    lock.acquire()
    lock.release()
    lock.release()


def test_the_lock_of_a_killed_process_is_free(tmp_path, either):
    path = tmp_path / "corpus.lock"
    child = os.fork()
    if child == 0:
        lock = Lock(path, "busy")
        lock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.exists()
    started_at = time.monotonic()
    with Lock(path, "busy"):
        assert time.monotonic() - started_at < 0.5  # without waiting for a lease to expire


def test_force_takes_over_and_the_previous_holder_notices(tmp_path, either, capsys):
    path = tmp_path / "corpus.lock"
    first = Lock(path, "busy")
    first.acquire()
    second = Lock(path, "busy", force=True)
    second.acquire()
    assert f"took over the lock (held by process {os.getpid()} on" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"this process has lost the lock \(held by process .*--force-lock"):
        first.check()
    first.release()
    second.check()
    with pytest.raises(UserError, match="busy"):
        Lock(path, "busy").acquire()
    second.release()
    assert not path.exists()
    Lock(path, "busy", force=True).acquire()  # nobody holds it


def test_a_removed_file_is_a_lost_lock(tmp_path, either):
    with Lock(tmp_path / "corpus.lock", "busy") as lock:
        (tmp_path / "corpus.lock").unlink()
        with pytest.raises(UserError, match="has lost the lock, so it stops"):
            lock.check()


def test_a_folder_that_cannot_be_created(tmp_path, either):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file: "):
        Lock(tmp_path / "file" / "corpus.lock", "busy").acquire()


# -- flock ------------------------------------------------------------------------------------------------------------


def test_a_file_that_does_not_name_its_holder(tmp_path):
    with Lock(tmp_path / "corpus.lock", "busy"):
        (tmp_path / "corpus.lock").write_bytes(b"\x1b[31m\xff")  # by a program that is not ours
        with pytest.raises(UserError, match=r"busy$"):
            Lock(tmp_path / "corpus.lock", "busy").acquire()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_flock_gets_a_lease(number, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    path = tmp_path / "corpus.lock"
    with Lock(path, "busy"):
        assert "mode=lease" in path.read_text()
        with pytest.raises(UserError, match="busy"):
            Lock(path, "busy").acquire()


# -- leases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "network"),
    [("/nfs/user", True), ("/nfs/user/local/runs", False), ("/home/user", False), ("/fuse", True), ("/ntfs", False)],
)
def test_the_file_system_of_a_folder(folder, network, monkeypatch, tmp_path):
    folder = tmp_path / folder[1:]
    folder.mkdir(parents=True)
    mounts = {"/": "ext4", "/nfs": "nfs4", "/nfs/user/local": "xfs", "/fuse": "fuse.sshfs", "/ntfs": "fuseblk"}
    mounted = [_Partition(str(tmp_path / folder[1:]), file_system) for folder, file_system in mounts.items()]
    monkeypatch.setattr(locks.psutil, "disk_partitions", lambda all: mounted)
    assert locks._needs_lease(folder) == network


@pytest.mark.parametrize("atomic_exchange", [True, False], ids=["local", "NFS"])
def test_the_lease_of_another_host_expires_without_heartbeats(atomic_exchange, tmp_path, lease, monkeypatch, capsys):
    """NFS cannot exchange two files."""
    if not atomic_exchange:
        monkeypatch.setattr("filelock._soft.exchange_names", lambda *_: False, raising=False)
    OtherHost(tmp_path / "corpus.lock")
    started_at = time.monotonic()
    with Lock(tmp_path / "corpus.lock", "busy") as lock:
        assert time.monotonic() - started_at > locks.LEASE_SECONDS
        lock.check()
    assert "exists (held by process 1 on node-7); waiting up to 1 s to see" in capsys.readouterr().out


@pytest.mark.parametrize("clock", ["correct", "jumps back", "stands still in 1980", "jumps ahead"])
def test_the_lease_of_another_host_with_heartbeats_is_respected(clock, tmp_path, lease, monkeypatch):
    """Whatever the clocks of both hosts show."""
    now, ticks = time.time(), iter(range(10_000))
    clocks = {
        "correct": time.time,
        "jumps back": lambda: now - 1000 * next(ticks),
        "stands still in 1980": lambda: 315532800 + next(ticks) / 1e6,
        "jumps ahead": lambda: now + 100_000 * next(ticks),
    }
    if clock != "correct":
        own_ticks = iter(range(10_000))
        monkeypatch.setattr(time, "time", lambda: now - 86400 * next(own_ticks))
    with (
        OtherHost(tmp_path / "corpus.lock").send_heartbeats(clocks[clock]),
        pytest.raises(UserError, match=r"busy \(held by process 1 on node-7\)"),
    ):
        Lock(tmp_path / "corpus.lock", "busy").acquire()


def test_a_lease_survives_jumps_of_the_holders_clock(tmp_path, lease, monkeypatch):
    with Lock(tmp_path / "corpus.lock", "busy") as lock:
        for jump in (-86400 * 365, 86400 * 365):
            real = time.time()
            monkeypatch.setattr(time, "time", lambda real=real, jump=jump: real + jump)
            time.sleep(0.3)
            lock.check()
            with pytest.raises(UserError, match="busy"):
                Lock(tmp_path / "corpus.lock", "busy").acquire()


def test_an_empty_file_of_a_process_that_was_killed_while_it_wrote_its_lease(tmp_path, lease):
    (tmp_path / "corpus.lock").touch()
    with Lock(tmp_path / "corpus.lock", "busy"):
        pass


def test_the_lease_of_a_process_whose_id_was_reused_is_free(tmp_path, lease):
    """This process has the id of the holder, but started at another time."""
    path = tmp_path / "corpus.lock"
    with Lock(path, "busy"):
        content = path.read_text()
    start = content.rpartition("start=")[2]
    path.write_text(content.replace(start, str(int(start) + 12345) + "\n"))
    started_at = time.monotonic()
    with Lock(path, "busy"):
        assert time.monotonic() - started_at < 0.5


def test_a_host_that_mounts_the_folder_locally_respects_a_lease(tmp_path):
    """An NFS server: flock succeeds, but clients do not see it."""
    with (
        OtherHost(tmp_path / "corpus.lock").send_heartbeats(time.time),
        pytest.raises(UserError, match=r"busy \(held by process 1 on node-7\)"),
    ):
        Lock(tmp_path / "corpus.lock", "busy").acquire()


def test_a_lease_does_not_replace_an_flock(tmp_path, lease, monkeypatch):
    """An NFS client: it does not see the server's flock, and the server sends no heartbeats."""
    OtherHost(tmp_path / "corpus.lock", mode="exclusive")
    with pytest.raises(UserError, match=r"busy \(held by process 1 on node-7\)"):
        Lock(tmp_path / "corpus.lock", "busy").acquire()
    with Lock(tmp_path / "corpus.lock", "busy", force=True):
        pass


def test_a_holder_that_could_not_send_heartbeats_notices_that_it_lost_the_lease(tmp_path, lease, monkeypatch):
    def unreachable(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with Lock(tmp_path / "corpus.lock", "busy") as lock:
        monkeypatch.setattr("filelock._lease.touch", unreachable)
        deadline = time.monotonic() + 10
        while lock._is_held() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(UserError, match="could not reach the file for 1 s"):
            lock.check()


def test_of_many_processes_only_one_takes_an_expired_lease_over(tmp_path, lease, monkeypatch):
    """On a file system that cannot exchange two files, where they all see the same expired lease."""
    monkeypatch.setattr("filelock._soft.exchange_names", lambda *_: False, raising=False)
    monkeypatch.setattr(locks, "POLL_SECONDS", 0.05)
    OtherHost(tmp_path / "corpus.lock")
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            try:
                lock = Lock(tmp_path / "corpus.lock", "busy")
                lock.acquire()
                time.sleep(1.5)
                os._exit(0)
            except UserError:
                os._exit(1)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(statuses) == [0, 1, 1, 1, 1, 1]
    assert filelock.SoftFileLease(tmp_path / "corpus.lock").pid is not None
