"""The call of DeepSpeed's launcher: its command line and environment."""

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.config import Config
from megatron.config.command_line import MERGED_OPTION, encode
from megatron.launcher.ranks import DEFAULT_PORT
from megatron.launcher.resources import Resources


class ReservedPort:
    """A free port of this machine, kept from other runs until rank 0 listens on it.

    The socket is bound, never listens, and allows its address to be used again: another listener may take the port, but
    the system gives it to nobody who asks for any free one.
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


def with_addresses(config: Config, resources: Resources, free_port: int) -> Config:
    """The configuration with master_addr and master_port filled in, so that every process knows where to meet.

    On several nodes a port that is free here may be taken on the first of them, so it is DeepSpeed's usual one there.
    """
    launcher = config.launcher
    port = launcher.master_port or (free_port if resources.hostfile is None else DEFAULT_PORT)
    keys: dict[str, object] = {"master_port": port}
    if resources.hostfile is None:
        keys["master_addr"] = "127.0.0.1"
    elif launcher.master_addr is None and launcher.launcher != "pdsh":
        # pdsh has DeepSpeed ask the host over ssh; the others work without ssh, and hand no address to the processes.
        keys["master_addr"] = resources.hosts[0]
    return config.updated(**keys)


def launcher_command(config: Config, resources: Resources, script: Path, script_options: Sequence[str]) -> list[str]:
    """Command line of DeepSpeed's runner for this configuration (addresses filled in)."""
    launcher = config.launcher
    command = [sys.executable, "-m", "deepspeed.launcher.runner", f"--master_port={launcher.master_port}"]
    if launcher.master_addr is not None:
        command.append(f"--master_addr={launcher.master_addr}")
    if resources.hostfile is None:
        # The launcher's own messages repeat the whole command line; the errors of a local run are the script's own.
        command += ["--hostfile=", "--log_level=critical"]
        slots = resources.slots["localhost"]
        if resources.on_cpu:
            command.append(f"--num_gpus={len(slots)}")
        else:
            command.append(f"--include=localhost:{','.join(map(str, slots))}")
    else:
        command += [f"--hostfile={resources.hostfile}", f"--launcher={launcher.launcher}", "--log_level=warning"]
        command += [f"--{name}={value}" for name, value in _filters(config)]
        command += [f"--{name}" for name in ("force_multi", "no_ssh_check") if getattr(launcher, name)]
        arguments = _launcher_arguments(config)
        if arguments:
            command.append(f"--launcher_args={shlex.join(arguments)}")
    return [*command, str(script), MERGED_OPTION, encode(config), *script_options]


def launcher_environment(resources: Resources, environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment of DeepSpeed's launcher, and notes on what was chosen in it."""
    chosen = dict(environment)
    notes: list[str] = []
    if resources.hostfile is not None:
        return chosen, notes
    # The GPUs are named on the command line; DeepSpeed sets the variable again, per process.
    chosen.pop("CUDA_VISIBLE_DEVICES", None)
    if resources.on_cpu:
        chosen["DS_ACCELERATOR"] = "cpu"
        chosen["CUDA_VISIBLE_DEVICES"] = ""
        if resources.world_size > 1 and "OMP_NUM_THREADS" not in chosen:
            threads = max(1, len(os.sched_getaffinity(0)) // resources.world_size)
            chosen["OMP_NUM_THREADS"] = str(threads)
            notes.append(f"{threads} thread(s) per process (OMP_NUM_THREADS is not set)")
    return chosen, notes


def _filters(config: Config) -> list[tuple[str, object]]:
    launcher = config.launcher
    given = {name: getattr(launcher, name) for name in ("include", "exclude", "num_gpus")}
    filters = [(name, value) for name, value in given.items() if value is not None]
    return filters + ([("num_nodes", launcher.num_nodes)] if launcher.num_nodes > 0 else [])


def _launcher_arguments(config: Config) -> list[str]:
    launcher = config.launcher
    if launcher.launcher != "slurm":
        return []
    given = {"--comment": launcher.comment, "--account": launcher.account}
    return [f"{option}={value}" for option, value in given.items() if value is not None]
