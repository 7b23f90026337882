"""A process that is one rank: its variables under Slurm and MPI, and what it does when its launcher stops or dies."""

import os
import re
import signal
import threading
import time
from collections.abc import MutableMapping

from megatron.config import Config
from megatron.utils.errors import UserError

DEFAULT_PORT = 29500
_SECONDS_TO_SAVE = 300

# Rank, rank on this node and number of processes, as srun and the MPI launchers pass them.
_SLURM_VARIABLES = (("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),)
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
)


def set_rank_variables(config: Config, environment: MutableMapping[str, str]) -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from Slurm's or MPI's variables.

    Does nothing if RANK is set already, as it is by deepy.py, or if the configuration names neither Slurm nor MPI. With
    Slurm, rank 0 is on the first node of the step. Raises UserError if there are several processes but the address of
    rank 0 is unknown.
    """
    launcher = config.launcher
    if "RANK" in environment:
        return
    families: tuple[tuple[str, str, str], ...] = ()
    if launcher.deepspeed_slurm or launcher.launcher == "slurm":
        families += _SLURM_VARIABLES
    if launcher.deepspeed_mpi or launcher.launcher in ("openmpi", "mvapich", "mpich", "impi"):
        families += _MPI_VARIABLES
    for names in families:
        if not all(name in environment for name in names):
            continue
        rank, local_rank, world_size = (environment[name] for name in names)
        address = launcher.master_addr or environment.get("MASTER_ADDR")
        if address is None and names in _SLURM_VARIABLES and "SLURM_STEP_NODELIST" in environment:
            address = first_host(environment["SLURM_STEP_NODELIST"])
        if address is None:
            if int(world_size) > 1:
                raise UserError(f"{world_size} processes, but the address of rank 0 is unknown; set master_addr")
            address = "127.0.0.1"
        environment.update(RANK=rank, LOCAL_RANK=local_rank, WORLD_SIZE=world_size, MASTER_ADDR=address)
        environment["MASTER_PORT"] = str(launcher.master_port or environment.get("MASTER_PORT", DEFAULT_PORT))
        return


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: gpu-[03-05,9],cpu-1 -> gpu-03."""
    prefix, number, suffix = re.findall(r"^([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodelist)[0]
    return f"{prefix}{number}{suffix}"


def follow_launcher() -> None:
    """Treat SIGUSR1 as SIGTERM, and send SIGTERM to this process when the process that started it has died.

    srun and mpirun forward SIGUSR1, but kill all ranks when they receive SIGTERM. If a host's launcher daemon
    (slurmstepd, orted) or ssh connection is killed, nothing else would end its ranks.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_SECONDS_TO_SAVE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
