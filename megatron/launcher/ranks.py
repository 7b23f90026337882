"""Ranks that Slurm or MPI gave a process, as the variables torch.distributed reads (RANK, LOCAL_RANK, WORLD_SIZE ...).

DeepSpeed's own launcher sets these; `srun` and `mpirun` set theirs.
"""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.config.loader import Config

DEFAULT_PORT = 29500

# (rank, rank on this node, number of processes); a process started by none of these lacks the variables.
_SLURM = (("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),)
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
)


def adopt_ranks(config: "Config", environment: MutableMapping[str, str]) -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from Slurm's or MPI's variables.

    Only where the configuration names Slurm or MPI, and nothing has set RANK yet.
    Raises UserError if several processes have no address of the first node to meet at.
    """
    launcher = config.launcher
    if "RANK" in environment:
        return
    families: tuple[tuple[str, str, str], ...] = ()
    if launcher.deepspeed_slurm or launcher.launcher == "slurm":
        families += _SLURM
    if launcher.deepspeed_mpi or launcher.launcher in ("openmpi", "mvapich", "mpich", "impi"):
        families += _MPI
    for rank, local_rank, world_size in families:
        if not all(name in environment for name in (rank, local_rank, world_size)):
            continue
        address = launcher.master_addr or environment.get("MASTER_ADDR")
        if address is None:
            if int(environment[world_size]) > 1:
                raise UserError(f"{environment[world_size]} processes, but no address to meet at; set master_addr")
            address = "127.0.0.1"
        environment["RANK"] = environment[rank]
        environment["LOCAL_RANK"] = environment[local_rank]
        environment["WORLD_SIZE"] = environment[world_size]
        environment["MASTER_ADDR"] = address
        environment["MASTER_PORT"] = str(launcher.master_port or environment.get("MASTER_PORT", DEFAULT_PORT))
        return
