"""Output whose reader has gone (tests/integration/test_launch_training.py closes a terminal)."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from megatron.training.output import DetachableStream, detachable_output


@pytest.fixture
def hangups() -> Iterator[list[int]]:
    received: list[int] = []
    previous = signal.signal(signal.SIGHUP, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGHUP, previous)


def test_the_first_failed_write_asks_to_stop_and_later_ones_are_dropped(hangups):
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        detachable = DetachableStream(stream)
        print("read", file=detachable, flush=True)
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        for _ in range(3):
            print("lost", file=detachable, flush=True)
    assert hangups == [signal.SIGHUP]


def test_other_errors_are_raised(hangups):
    stream = DetachableStream(open("/dev/full", "w"))  # noqa: SIM115 (closing it fails)
    stream.write("text")
    with pytest.raises(OSError, match="No space left"):
        stream.flush()
    assert hangups == []
    with contextlib.suppress(OSError):
        stream.close()


def test_standard_streams(capsys):
    streams = sys.stdout, sys.stderr
    with detachable_output():
        print("out")
        print("err", file=sys.stderr)
        assert isinstance(sys.stdout, DetachableStream)
        assert not sys.stdout.isatty()
    assert (sys.stdout, sys.stderr) == streams
    assert capsys.readouterr() == ("out\n", "err\n")


def test_a_closed_stream(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with detachable_output():
        print("dropped", flush=True)
        sys.stdout.write("dropped")
    assert sys.stdout is None
