"""A process that is one rank: its variables under Slurm and MPI, and what it does when its launcher
stops or dies.
"""

import os
import re
import select
import signal
import threading
import time
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from megatron.config import Config
from megatron.launcher.node import LAUNCHER_VARIABLE
from megatron.utils.errors import UserError

DEFAULT_PORT = 29500
# srun and mpirun receive it when deepy.py has been killed, and pass it on to the ranks.
LAUNCHER_DIED = signal.SIGUSR2
_SECONDS_TO_SAVE = 300


class Starter(NamedTuple):
    """A program that can start the ranks itself, without deepy.py.

    Attributes:
        program: its name.
        key: the key which says that it has started the ranks.
        variables: what it sets for each of them: rank, rank on this node, and number of processes.
    """

    program: str
    key: str
    variables: tuple[str, str, str]

    def has_started(self, environment: Mapping[str, str]) -> bool:
        """Whether the program has started this process.

        Slurm also sets a rank in the shell of sbatch, and one process in the interactive shell of
        salloc; the number of processes in the job (SLURM_NTASKS) tells the latter from a rank.
        """
        if not all(name in environment for name in self.variables):
            return False
        number = environment[self.variables[-1]]
        return self.program != "srun" or environment.get("SLURM_NTASKS", number) == number


# `launcher` -> what starts the ranks.
STARTERS = {
    "slurm": Starter(
        "srun", "deepspeed_slurm", ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    ),
    "openmpi": Starter(
        "mpirun",
        "deepspeed_mpi",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ),
}


def find_starter(config: Config, environment: Mapping[str, str]) -> Starter | None:
    """The program that has started this process, if the configuration names it."""
    launcher = config.launcher
    for name, starter in STARTERS.items():
        is_named = launcher.launcher == name or getattr(launcher, starter.key)
        if is_named and starter.has_started(environment):
            return starter
    return None


def check_starter(config: Config, environment: Mapping[str, str]) -> None:
    """Raises UserError if deepspeed_slurm or deepspeed_mpi is set, but neither srun nor mpirun has
    started this process: it would be the only rank.
    """
    for name, starter in STARTERS.items():
        is_set = getattr(config.launcher, starter.key)
        if is_set and find_starter(config, environment) is None:
            raise UserError(
                f"{starter.key} is true, but {starter.program} has not started this process; put "
                f"{starter.program} before the command, let deepy.py or kerple train start "
                f"{starter.program} (launcher: {name}), or set {starter.key} to false "
                "(docs/clusters.md)"
            )


def set_rank_variables(config: Config, environment: MutableMapping[str, str]) -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from Slurm's or MPI's
    variables.

    Does nothing if RANK is set already, as it is by deepy.py, if the configuration names neither
    Slurm nor MPI, or if there is only one process, which needs no port. With Slurm, rank 0 is on
    the first node of the step. Raises UserError if the address of rank 0 is unknown.
    """
    starter = find_starter(config, environment)
    if "RANK" in environment or starter is None:
        return
    rank, local_rank, world_size = (environment[name] for name in starter.variables)
    if int(world_size) == 1:
        return

    # Rank 0 is on the first host of a Slurm step. Other launchers must name its address.
    launcher = config.launcher
    address = launcher.master_addr or environment.get("MASTER_ADDR")
    default_port = DEFAULT_PORT
    if starter.program == "srun":
        default_port = slurm_port(environment)
        if address is None and "SLURM_STEP_NODELIST" in environment:
            address = first_host(environment["SLURM_STEP_NODELIST"])
    if address is None:
        raise UserError(
            f"{world_size} processes, but the address of rank 0 is unknown; set master_addr"
        )
    port = launcher.master_port or environment.get("MASTER_PORT", default_port)
    environment.update(
        RANK=rank,
        LOCAL_RANK=local_rank,
        WORLD_SIZE=world_size,
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )


def slurm_port(environment: Mapping[str, str]) -> int:
    """A port for the ranks of a Slurm job step, from 29500 to 32498: steps that share a node
    usually have different ones. Linux assigns none of them to other sockets by default.
    """
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return DEFAULT_PORT + (17 * job + step) % 2999


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: gpu-[03-05,9],cpu-1 -> gpu-03, rack[1-2]node[01-16] ->
    rack1node01.
    """
    match = re.match(r"([^,\[]|\[[^\]]*\])+", nodelist)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0]) if match else nodelist


def _kill_this_rank() -> None:
    """deepy.py makes each rank the leader of a process group, which includes its data workers."""
    kill = os.killpg if os.getpgrp() == os.getpid() else os.kill
    kill(os.getpid(), signal.SIGKILL)


def follow_launcher() -> None:
    """Stop like after SIGTERM when SIGUSR1 or LAUNCHER_DIED arrives, or when the process that
    started this one has ended. In the latter two cases, no one can stop the run any more, so
    SIGKILL follows after five minutes.

    srun and mpirun forward SIGUSR1, but kill all ranks when they receive SIGTERM. If deepy.py,
    node.py, or the daemon of Slurm or Open MPI on this host is killed, nothing else would end its
    ranks.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    launcher = int(os.environ.get(LAUNCHER_VARIABLE) or os.getppid())
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
    # The interpreter writes the number of every signal that has a handler to the pipe, even if the
    # main thread never gets to run the handler because it waits for another rank.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(LAUNCHER_DIED, lambda *_: None)

    def watch() -> None:
        while os.getppid() == launcher:
            if select.select([reader], [], [], 1)[0] and LAUNCHER_DIED in os.read(reader, 4096):
                break
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_SECONDS_TO_SAVE)
        _kill_this_rank()

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
