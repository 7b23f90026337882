"""Processes that end with the process that started them, even if that one is killed with SIGKILL."""

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # only Linux has it


def signal_without_parent(number: int) -> Callable[[], None]:
    """A preexec_fn for subprocess.Popen: the new process receives a signal as soon as this one has ended.

    Linux sends it when the *thread* that starts the process ends, so start it in the main thread. Elsewhere nothing is
    sent.
    """
    parent = os.getpid()

    def prepare() -> None:
        if _prctl is None:
            return
        if number != signal.SIGKILL:
            # Until the new program runs, a handler of the parent, written in Python, would discard the signal.
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
