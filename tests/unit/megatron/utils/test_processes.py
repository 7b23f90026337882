"""What a process does to end with its parent (tests/integration/test_orphans.py kills parents)."""

import os
import signal
from types import SimpleNamespace

import pytest

from megatron.utils import processes


class ProcessEndedError(Exception):
    pass


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int]]:
    """Calls of prctl. Ending this process raises ProcessEndedError."""
    arguments: list[tuple[int, int]] = []

    def end(status: int) -> None:
        raise ProcessEndedError

    monkeypatch.setattr(processes, "_prctl", lambda *each: arguments.append(each))
    monkeypatch.setattr(processes.os, "_exit", end)
    return arguments


def test_signal_without_parent(calls, monkeypatch):
    prepare = processes.signal_without_parent(signal.SIGUSR1)
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)
    monkeypatch.setattr(processes.os, "getppid", os.getpid)
    try:
        prepare()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert calls == [(1, signal.SIGUSR1)]


def test_sigkill_has_no_handler(calls, monkeypatch):
    prepare = processes.signal_without_parent(signal.SIGKILL)
    monkeypatch.setattr(processes.os, "getppid", os.getpid)
    prepare()
    assert calls == [(1, signal.SIGKILL)]


def test_parent_that_ended_before_the_call_of_prctl(calls, monkeypatch):
    prepare = processes.signal_without_parent(signal.SIGUSR1)
    monkeypatch.setattr(processes.os, "getppid", lambda: 1)
    previous = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(ProcessEndedError):
            prepare()
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_without_prctl(monkeypatch):
    monkeypatch.setattr(processes, "_prctl", None)
    previous = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        processes.signal_without_parent(signal.SIGUSR1)()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_exit_with_parent(calls, monkeypatch):
    joined = []
    parent = SimpleNamespace(join=lambda: joined.append(True))
    monkeypatch.setattr(processes.multiprocessing, "parent_process", lambda: parent)
    monkeypatch.setattr(processes.threading.Thread, "start", processes.threading.Thread.run)  # in this thread
    with pytest.raises(ProcessEndedError):
        processes.exit_with_parent()
    assert joined == [True]
