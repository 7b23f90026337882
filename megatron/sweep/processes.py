"""The processes of a run: they save and end when the sweep itself dies, and are found again if they do not."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

# In the environment of all processes of a run, the launcher's among them: the run's folder.
MARK = "SWEEP_RUN"
_PR_SET_PDEATHSIG = 1


def start(command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> subprocess.Popen:
    """Start a process of the run in `folder`, in a session of its own, what it prints being added to `log`."""
    with open(log, "ab") as stream:
        return subprocess.Popen(
            command,
            env={**environment, MARK: str(folder.resolve())},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )


def left_over(folder: Path) -> list[int]:
    """Processes of the run in `folder` that an earlier sweep started and that outlived it."""
    marked, found = str(folder.resolve()), []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == marked:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue  # it has ended, or is another user's
    return found


def last_lines(log: Path, count: int = 12) -> list[str]:
    """Of a log; what a progress bar overwrote is left out."""
    try:
        with open(log, "rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 65_536))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
    return [line for line in lines if line][-count:]


def _end_with_parent() -> None:
    """deepy.py passes SIGTERM on to the training processes, which save and exit."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
