"""Runs DeepSpeed's launcher: its command line and environment, signals, and exit status.

DeepSpeed's launcher reacts to SIGTERM and SIGINT by terminating its processes one after the other, and kills each after
30 seconds even while it saves a checkpoint. So it runs in its own session, where Ctrl-C does not reach it, and deepy.py
signals the training processes directly and all at once. They save and exit, after which the launcher ends by itself.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from megatron.config import Config
from megatron.launcher.resources import Resources
from megatron.launcher.script_arguments import DEFAULT_PORT, MERGED_CONFIG_OPTION, encode_config

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Data workers notice within five seconds that their training process has ended.
_SECONDS_FOR_DATA_WORKERS = 8


class ReservedPort:
    """A free port on this machine. While it is reserved, the system assigns it to no other process.

    The socket is bound with SO_REUSEADDR but does not listen, so rank 0 can listen on the port.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> "ReservedPort":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def add_addresses(config: Config, resources: Resources, free_port: int) -> Config:
    """The configuration with master_addr and master_port, so that every process knows the address of rank 0.

    On several nodes the port is DeepSpeed's default: a port that is free here may be in use on the first node.
    """
    launcher = config.launcher
    port = launcher.master_port or (free_port if resources.hostfile is None else DEFAULT_PORT)
    keys: dict[str, object] = {"master_port": port}
    if resources.hostfile is None:
        keys["master_addr"] = "127.0.0.1"
    elif launcher.master_addr is None and launcher.launcher != "pdsh":
        # With pdsh, DeepSpeed queries the address over ssh. The other launchers pass no address to the processes.
        keys["master_addr"] = resources.hosts[0]
    return config.updated(**keys)


def runner_command(config: Config, resources: Resources, script: Path, script_options: Sequence[str]) -> list[str]:
    """The command line of DeepSpeed's runner; `config` is that of `add_addresses`."""
    launcher = config.launcher
    command = [sys.executable, "-m", "deepspeed.launcher.runner", f"--master_port={launcher.master_port}"]
    if launcher.master_addr is not None:
        command.append(f"--master_addr={launcher.master_addr}")
    if resources.hostfile is None:
        # critical: the launcher's messages repeat the full command line, and the script prints its own errors.
        command += ["--hostfile=", "--log_level=critical"]
        slots = resources.slots["localhost"]
        if resources.on_cpu:
            command.append(f"--num_gpus={len(slots)}")
        else:
            command.append(f"--include=localhost:{','.join(map(str, slots))}")
    else:
        command += [f"--hostfile={resources.hostfile}", f"--launcher={launcher.launcher}", "--log_level=warning"]
        filters = {name: getattr(launcher, name) for name in ("include", "exclude", "num_gpus")}
        filters["num_nodes"] = launcher.num_nodes if launcher.num_nodes > 0 else None
        command += [f"--{name}={value}" for name, value in filters.items() if value is not None]
        command += [f"--{name}" for name in ("force_multi", "no_ssh_check") if getattr(launcher, name)]
        if launcher.launcher == "slurm":
            options = {"--comment": launcher.comment, "--account": launcher.account}
            words = [f"{option}={value}" for option, value in options.items() if value is not None]
            if words:
                command.append(f"--launcher_args={shlex.join(words)}")
    return [*command, str(script), MERGED_CONFIG_OPTION, encode_config(config), *script_options]


def launcher_environment(resources: Resources, environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment of DeepSpeed's launcher, derived from `environment`, and notes for the user."""
    result = dict(environment)
    notes: list[str] = []
    if resources.hostfile is not None:
        return result, notes
    # The GPUs are on the command line; DeepSpeed sets the variable for each process.
    result.pop("CUDA_VISIBLE_DEVICES", None)
    if resources.on_cpu:
        result["DS_ACCELERATOR"] = "cpu"
        result["CUDA_VISIBLE_DEVICES"] = ""
        if resources.world_size > 1 and "OMP_NUM_THREADS" not in result:
            threads = max(1, len(os.sched_getaffinity(0)) // resources.world_size)
            result["OMP_NUM_THREADS"] = str(threads)
            notes.append(f"{threads} thread(s) per process (OMP_NUM_THREADS is not set)")
    return result, notes


def run_launcher(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run DeepSpeed's launcher and return its exit status; 128 + N if signal N ended it or one of its processes.

    The first SIGTERM, SIGINT or SIGHUP is forwarded to the training processes as SIGTERM; the second one kills all
    processes. Must be called in the main thread.
    """
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def handle(number: int, _frame: object) -> None:
        received.append(number)
        if process is not None:
            _stop(process, signal.Signals(number).name, again=len(received) > 1)

    previous_handlers = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        process = subprocess.Popen(command, env=dict(environment), start_new_session=True)
        if received:
            _kill(process)
        status = process.wait()
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    if status < 0:
        return 128 - status
    # A launcher that was itself killed also exits with 0, and leaves its processes running.
    if status == 0 and _training_processes_survive(process):
        print("error: DeepSpeed's launcher died before its processes; they were killed", file=sys.stderr, flush=True)
        _kill(process)
        return 1
    # If a signal ended a process, the launcher exits with the negative number of the signal, as a byte.
    return 128 + (256 - status) if status > 256 - signal.NSIG else status


def _stop(process: subprocess.Popen[bytes], name: str, again: bool) -> None:
    """Send SIGTERM to the training processes, or kill everything if there are none or this is the second signal."""
    targets = [] if again else _processes_to_signal(process)
    if targets:
        message = f"{name}: asked {len(targets)} process(es) to save and exit; repeat to kill them"
    else:
        message = f"{name} again: killing all processes" if again else f"{name}: nothing is running yet; stopping"
    print(message, file=sys.stderr, flush=True)
    if not targets:
        _kill(process)
    for target in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            target.send_signal(signal.SIGTERM)


def _processes_to_signal(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The training processes on this machine, or the local processes that control those on other machines.

    On one machine: runner -> deepspeed.launcher.launch -> training processes. With srun and mpirun: runner -> srun,
    which forwards signals. With pdsh, the runner itself ends the remote processes (after DeepSpeed's 30 seconds).
    """
    try:
        runner = psutil.Process(process.pid)
        children: list[psutil.Process] = runner.children()
        if not children:
            return []
        command = children[0].cmdline()
        if "deepspeed.launcher.launch" in command:
            return list(children[0].children())
        if any(os.path.basename(word) == "pdsh" for word in command[:2]):
            return [runner]
        return children
    except psutil.NoSuchProcess:
        return []


def _training_processes_survive(launcher: subprocess.Popen[bytes]) -> bool:
    """True if processes of the launcher's session still run after data workers have had time to exit."""

    def any_left() -> bool:
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(OSError):
                command = process.info["cmdline"] or []
                if MERGED_CONFIG_OPTION in command and os.getsid(process.pid) == launcher.pid:
                    return True
        return False

    end = time.monotonic() + _SECONDS_FOR_DATA_WORKERS
    while any_left():
        if time.monotonic() > end:
            return True
        time.sleep(0.1)
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill every process of the launcher's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
