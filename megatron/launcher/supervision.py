"""Running DeepSpeed's launcher to its end: signals reach the training processes, and their exit status comes back.

DeepSpeed's launcher answers SIGTERM and SIGINT by terminating its processes one after the other and killing each after
30 seconds, saved or not. So it runs in a session of its own, where a terminal's Ctrl-C does not reach it, and the
training processes are signalled from here, all at once; they save and exit, and the launcher ends because they have.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import psutil

from megatron.config.command_line import MERGED_OPTION

STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A process that reads data for a training process notices within five seconds that this one is gone.
_SECONDS_TO_END = 8


def run_to_end(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run DeepSpeed's launcher and return its exit status; 128 + N if signal N ended it or one of its processes.

    SIGTERM, SIGINT and SIGHUP are passed to the training processes as SIGTERM, once; the next of them kills whatever
    still runs. Call it in the main thread.
    """
    received: list[int] = []
    process: subprocess.Popen | None = None

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        if process is not None:
            _stop(process, number, again=len(received) > 1)

    earlier = {number: signal.signal(number, stop) for number in STOPPING_SIGNALS}
    try:
        process = subprocess.Popen(command, env=dict(environment), start_new_session=True)
        if received:
            _kill(process)
        status = process.wait()
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if status < 0:
        return 128 - status
    if status == 0 and _left_behind(process):
        print("error: DeepSpeed's launcher died before its processes; they were killed", file=sys.stderr, flush=True)
        _kill(process)
        return 1
    # The launcher's own exit status for a process that a signal ended is that signal, negative, as a byte.
    return 128 + (256 - status) if status > 256 - signal.NSIG else status


def _stop(process: subprocess.Popen, number: int, again: bool) -> None:
    name = signal.Signals(number).name
    if again:
        print(f"{name} again: killing all processes", file=sys.stderr, flush=True)
        _kill(process)
        return
    targets = _training_processes(process)
    if not targets:
        print(f"{name}: nothing is running yet; stopping", file=sys.stderr, flush=True)
        _kill(process)
        return
    request = f"asked {len(targets)} process(es) to save and exit; the same again kills them"
    print(f"{name}: {request}", file=sys.stderr, flush=True)
    for target in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            target.send_signal(signal.SIGTERM)


def _training_processes(process: subprocess.Popen) -> list[psutil.Process]:
    """What to signal: the training processes of this machine, or what stands for those of other machines.

    On one machine: runner -> deepspeed.launcher.launch -> the processes. With srun and mpirun: runner -> srun, which
    passes signals on. With pdsh the runner itself ends the remote processes (DeepSpeed's 30 seconds apply there).
    """
    try:
        runner = psutil.Process(process.pid)
        children = runner.children()
        if not children:
            return []
        command = children[0].cmdline()
        if "deepspeed.launcher.launch" in command:
            return children[0].children()
        if any(os.path.basename(word) == "pdsh" for word in command[:2]):
            return [runner]
        return children
    except psutil.NoSuchProcess:
        return []


def _left_behind(process: subprocess.Popen) -> bool:
    """True if training processes outlive the launcher, as they do when it was killed itself.

    Its status is 0 then too. Processes of theirs, such as those that read data, may take a moment to end.
    """
    end = time.monotonic() + _SECONDS_TO_END
    while any(MERGED_OPTION in one.info["cmdline"] for one in _of_session(process.pid)):
        if time.monotonic() > end:
            return True
        time.sleep(0.1)
    return False


def _of_session(session: int) -> Iterator[psutil.Process]:
    for one in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(OSError):
            if one.info["cmdline"] and os.getsid(one.pid) == session:
                yield one


def _kill(process: subprocess.Popen) -> None:
    """Kill every process of the launcher's group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
