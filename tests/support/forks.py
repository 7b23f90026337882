"""Python scripts as forks of this process, which has imported their modules: a run starts in
milliseconds.

A run is the real script with its own session, working directory, environment, standard streams and
signal handlers. If it starts Python scripts with `subprocess`, they are forks too. Linux only.
"""

import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)
_original_environment = dict(os.environ)
# The environment variable with constants for a script and those that it starts, as JSON:
# "module:NAME" -> value.
CONSTANTS = "TESTED_CONSTANTS"
_POPEN_PARAMETERS = inspect.signature(subprocess.Popen._execute_child)


# What the entry points import, most of it in functions.
MODULES = (
    "deepspeed",
    "matplotlib.pyplot",
    "megatron.cli.evaluate",
    "megatron.cli.generate",
    "megatron.cli.prepare_data",
    "megatron.cli.report",
    "megatron.cli.sweep",
    "megatron.preparation.preprocessing",
    "megatron.launcher.main",
    "megatron.training.loop",
    "pandas",
    "pyarrow.parquet",
    "safetensors.torch",
    "scipy.stats",
    "tokenizers",
    "transformers",
)


def import_modules() -> None:
    """Import `MODULES`, so that forks need not."""
    warnings.filterwarnings("ignore", module=r"megatron\.core|pyarrow")
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)  # a fork has no other threads
    gc.freeze()  # a fork that visits these objects to find garbage would copy their memory


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the parent of all descendants whose own parent dies from now on, or stop
    this.
    """
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class ForkedPython(subprocess.Popen):
    """`subprocess.Popen` that runs `[python, "-u", SCRIPT.py, ...]` in a fork. Other commands run
    as usual.
    """

    def _execute_child(self, *values: object) -> None:
        given = _POPEN_PARAMETERS.bind(self, *values).arguments
        words = (
            [os.fspath(word) for word in given["args"]]
            if not isinstance(given["args"], str)
            else []
        )
        script = [word for word in words[1:] if word != "-u"]
        if not script or words[0] != sys.executable or not script[0].endswith(".py"):
            super()._execute_child(*values)
            return
        self.pid = self._start_script(
            script, given, [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        )
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))

    def _start_script(
        self, words: Sequence[str], given: Mapping[str, Any], streams: Sequence[int]
    ) -> int:
        """Run `python WORDS` as a child of this process; returns its id. given: parameters of
        `subprocess.Popen`.
        """

        def prepare() -> None:
            if given["start_new_session"]:
                os.setsid()
            if given["preexec_fn"] is not None:
                given["preexec_fn"]()

        return fork_script(words, given["cwd"], given["env"], streams, given["pass_fds"], prepare)


def fork_script(
    words: Sequence[str],
    cwd: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    streams: Sequence[int] = (-1, -1, -1),
    keep: Sequence[int] = (),
    prepare: Callable[[], None] | None = None,
) -> int:
    """Run `python WORDS` in a fork; returns its process id.

    Args:
        streams: file descriptors of standard input, output and error; -1 for those of this process.
        keep: other file descriptors that stay open.
        prepare: called in the fork before the script starts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for target, source in enumerate([os.dup(fd) if 0 <= fd < 3 else fd for fd in streams]):
            if source != -1:
                os.dup2(source, target)
        _close_all_but({0, 1, 2, *keep})
        _reset_signals()
        if cwd is not None:
            os.chdir(cwd)
        if environment is not None:
            _replace_environment(environment)
        for path, value in json.loads(os.environ.get(CONSTANTS, "{}")).items():
            module, _, name = path.partition(":")
            setattr(importlib.import_module(module), name, value)
        if prepare is not None:
            prepare()
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
        )
        subprocess.Popen = ForkedPython  # type: ignore[misc]
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        status = _run_script(words[0])
        threading._shutdown()  # waits for other threads, as the interpreter does
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _run_script(path: str) -> int:
    """Run the script as __main__; returns its exit status, and prints what the interpreter would
    print.
    """
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _close_all_but(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):  # the descriptor of this listing
                os.close(int(name))


def _reset_signals() -> None:
    """What exec and the start of the interpreter do: handlers are reset, ignored signals stay
    ignored.
    """
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _replace_environment(environment: Mapping[str, str]) -> None:
    """Replace os.environ, and what /proc/PID/environ shows: first the variables that this process
    does not have.
    """
    os.environ.clear()
    os.environ.update(environment)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    names = sorted(
        environment, key=lambda name: environment[name] == _original_environment.get(name)
    )
    shown = b"".join(os.fsencode(f"{name}={environment[name]}\0") for name in names)[
        : end - start - 1
    ]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


# -- runs
# --------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A script and its descendants. The session and process group have the id `pid`.

    Only one run exists at a time: all children of this process belong to it.

    Attributes:
        status: exit status of the script; -N if signal N killed it; None while it runs.
        peak: largest resident memory of a process of the run that has ended, in bytes.
    """

    pid: int
    status: int | None = None
    peak: int = 0
    started_at: float = field(default_factory=time.monotonic)

    def poll(self) -> int | None:
        """Reap the processes that have ended; returns `status`."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                self.peak = max(self.peak, usage.ru_maxrss * 1024)
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def wait(self, seconds: float, condition: Callable[[], bool] = lambda: False) -> int | None:
        """Wait until the script has ended or `condition` is true, at most `seconds`; returns
        `status`.
        """
        deadline = time.monotonic() + seconds
        while self.poll() is None and not condition() and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.status

    def processes(self) -> list[int]:
        """Ids of the processes of this run that have not been reaped. A zombie counts: other
        threads of it may still run, and hold its locks.
        """
        self.poll()
        return [process.pid for process in psutil.Process().children(recursive=True)]

    def wait_for_all(self, seconds: float) -> list[int]:
        """Wait until all processes have ended, at most `seconds`; returns those that are still
        running.
        """
        deadline = time.monotonic() + seconds
        while (running := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return running

    def kill_all(self) -> None:
        while running := self.processes():
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def start_run(
    words: Sequence[str],
    log: Path,
    *,
    constants: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    memory: int | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> Run:
    """Start `python SCRIPT OPTIONS` in the folder of `log`, in a session of its own, with its
    output appended to `log`.

    Args:
        words: the path of the script, relative to the root of the project, and its options.
        constants: see `CONSTANTS`.
        memory: bytes that the script may allocate on top of what this process has mapped.
        prepare: called in the fork.
    """
    ready, started = os.pipe()

    def prepare_fork() -> None:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if memory is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(
                resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + memory,) * 2
            )
        prepare()
        os.close(started)

    words = [str(ROOT / words[0]), *words[1:]]
    environment = {
        **(os.environ if environment is None else environment),
        CONSTANTS: json.dumps(dict(constants)),
    }
    with open(os.devnull) as null, open(log, "a") as output:
        streams = (null.fileno(), output.fileno(), output.fileno())
        pid = fork_script(words, log.parent, environment, streams, (started,), prepare_fork)
    os.close(started)
    os.read(ready, 1)  # until the signal handlers are those of the script
    os.close(ready)
    return Run(pid)
