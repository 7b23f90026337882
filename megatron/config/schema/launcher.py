"""How deepy.py starts processes: handed to DeepSpeed's launcher."""

from typing import Annotated, Literal

from megatron.config.schema.base import CaseInsensitive, Group, Int, key


class LauncherConfig(Group):
    """Launcher"""

    hostfile: str | None = key(
        None,
        "File with one `HOST slots=N` line per node. Default: /job/hostfile where it exists, else this machine alone.",
    )
    include: str | None = key(
        None, "Hosts and slots to use: HOST[:SLOT,SLOT...] joined by @. Not with num_gpus or num_nodes."
    )
    exclude: str | None = key(None, "Hosts and slots to leave out, in the same form. Not with num_gpus or num_nodes.")
    num_nodes: Int = key(-1, "Nodes to use: the first ones of the hostfile. -1: all.", ge=-1)
    num_gpus: Int | None = key(
        None, "Processes per node, one per GPU. Default: one per GPU there is; on a machine without GPU, 1.", ge=1
    )
    master_addr: str | None = key(
        None, "Address of the first node. Default: with pdsh asked of it over ssh, else the name of the first host."
    )
    master_port: Int | None = key(
        None,
        "Port of the first node for torch.distributed. Default: a free one; on several nodes 29500.",
        ge=1,
        le=65535,
    )
    launcher: Annotated[Literal["pdsh", "openmpi", "mvapich", "mpich", "impi", "slurm"], CaseInsensitive] = key(
        "pdsh", "What starts processes on other nodes."
    )
    deepspeed_slurm: bool = key(False, "True: ranks are those Slurm gave the processes; `launcher: slurm` implies it.")
    deepspeed_mpi: bool = key(False, "True: ranks are those MPI gave the processes; the MPI launchers imply it.")
    force_multi: bool = key(False, "True: use the launcher for several nodes even for one.")
    no_ssh_check: bool = key(False, "True: do not try ssh to the first node before starting.")
    comment: str | None = key(None, "Slurm: --comment of the job step.")
    account: str | None = key(None, "Slurm: --account of the job step.")
