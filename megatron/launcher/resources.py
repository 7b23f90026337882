"""The resources of a run: the hosts and slots of a hostfile, or the GPUs or CPU of this machine."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config
from megatron.utils.errors import UserError

# DeepSpeed and GPT-NeoX read this hostfile if none is given.
DEFAULT_HOSTFILE = "/job/hostfile"

# The program by which DeepSpeed detects that a launcher is installed.
PROGRAMS = {
    "pdsh": "pdsh",
    "slurm": "sinfo",
    "openmpi": "ompi_info",
    "mvapich": "mpiname",
    "mpich": "mpirun",
    "impi": "mpirun",
}
MPI_LAUNCHERS = ("openmpi", "mvapich", "mpich", "impi")


@dataclass(frozen=True)
class Resources:
    """Slots by host, in rank order: indices of GPUs, or of processes on the CPU.

    `hostfile` is None if only this machine is used.
    """

    slots: dict[str, list[int]]
    hostfile: str | None
    on_cpu: bool

    @property
    def world_size(self) -> int:
        return sum(len(slots) for slots in self.slots.values())

    @property
    def hosts(self) -> list[str]:
        return list(self.slots)

    def describe(self) -> str:
        """One line: how many processes, and where."""
        processes = f"{self.world_size} process{'es' * (self.world_size > 1)}"
        if self.hostfile is not None:
            return f"{processes} on {len(self.hosts)} host(s) of {self.hostfile}"
        if self.on_cpu:
            return f"{processes} on the CPU (no GPU was found; num_gpus sets the number of processes)"
        return f"{processes} on GPU {', '.join(map(str, self.slots['localhost']))} of this machine"


def find_resources(config: Config) -> Resources:
    """The slots that the configuration requests. Raises UserError if they are not available."""
    launcher = config.launcher
    hostfile = launcher.hostfile
    if hostfile is None and Path(DEFAULT_HOSTFILE).is_file():
        hostfile = DEFAULT_HOSTFILE
    needs_hostfile = launcher.num_nodes > 1 or launcher.force_multi or launcher.launcher != "pdsh"
    if hostfile is not None and not needs_hostfile and not Path(hostfile).exists():
        # GPT-NeoX's configs name "/mock_path".
        print(f"deepy: hostfile {hostfile} does not exist; using only this machine, as GPT-NeoX does", flush=True)
        hostfile = None
    if hostfile is not None:
        return _resources_of_hostfile(config, hostfile)
    if launcher.num_nodes > 1:
        key = f"num_nodes {launcher.num_nodes}"
    elif launcher.force_multi:
        key = "force_multi"
    elif launcher.launcher != "pdsh":
        key = f"launcher {launcher.launcher}"
    else:
        return _resources_of_this_machine(config)
    raise UserError(
        f"{key} needs a hostfile with one `HOST slots=N` line per node "
        "(on Slurm: scontrol show hostnames | sed 's/$/ slots=8/' > hostfile); set hostfile"
    )


def check_launcher(config: Config, resources: Resources) -> None:
    """Raises UserError if the multi-node launcher is not installed, or does not support the keys that are set."""
    launcher = config.launcher
    if resources.hostfile is None or (len(resources.hosts) == 1 and not launcher.force_multi):
        return
    program = PROGRAMS[launcher.launcher]
    if shutil.which(program) is None:
        alternatives = ", ".join(name for name in PROGRAMS if name != launcher.launcher)
        raise UserError(
            f"launcher {launcher.launcher} is not installed here ({program} is not found); install it, or set launcher "
            f"to one of {alternatives}"
        )
    filters = {name: getattr(launcher, name) for name in ("include", "exclude", "num_gpus", "num_nodes")}
    names = [name for name, value in filters.items() if value not in (None, -1)]
    if launcher.launcher in MPI_LAUNCHERS and names:
        raise UserError(
            f"launcher {launcher.launcher} always uses all hosts in the hostfile; remove {', '.join(names)} "
            f"and edit {resources.hostfile}"
        )
    if launcher.launcher == "slurm":
        from deepspeed.launcher.multinode_runner import SlurmRunner

        try:
            SlurmRunner.validate_active_resources(resources.slots)
        except ValueError as error:
            raise UserError(f"launcher slurm: {error}") from error


def _resources_of_hostfile(config: Config, hostfile: str) -> Resources:
    from deepspeed.launcher.runner import apply_num_nodes_and_gpus, fetch_hostfile, parse_inclusion_exclusion

    launcher = config.launcher
    if not os.path.isfile(hostfile):
        raise UserError(f"hostfile {hostfile}: no such file")
    try:
        pool = fetch_hostfile(hostfile)
        slots = parse_inclusion_exclusion(pool, launcher.include or "", launcher.exclude or "")
    except (OSError, ValueError) as error:
        raise UserError(f"hostfile {hostfile}: {error}") from error
    if launcher.num_nodes > len(slots):
        raise UserError(f"num_nodes is {launcher.num_nodes}, but {hostfile} lists {len(slots)} host(s)")
    if launcher.num_gpus is not None:
        too_small = [host for host, host_slots in slots.items() if len(host_slots) < launcher.num_gpus]
        if too_small:
            raise UserError(
                f"num_gpus is {launcher.num_gpus}, but {', '.join(too_small)} has fewer slots in {hostfile}"
            )
    slots = apply_num_nodes_and_gpus(slots, launcher.num_nodes, launcher.num_gpus or -1)
    if not slots:
        raise UserError(f"hostfile {hostfile}: include and exclude leave no host")
    return Resources(dict(slots), hostfile, on_cpu=False)


def _resources_of_this_machine(config: Config) -> Resources:
    launcher = config.launcher
    filters = (launcher.include or "", launcher.exclude or "")
    gpus = _visible_gpus()
    if gpus is None:
        if any(filters):
            raise UserError("include and exclude select GPUs, but this machine has none; use num_gpus")
        return Resources({"localhost": list(range(launcher.num_gpus or 1))}, None, on_cpu=True)
    if any(filters):
        from deepspeed.launcher.runner import parse_resource_filter

        try:
            gpus = parse_resource_filter({"localhost": gpus}, *filters).get("localhost", [])
        except ValueError as error:
            raise UserError(f"include / exclude: {error}; without a hostfile the host is localhost") from error
        if not gpus:
            raise UserError("include and exclude leave no GPU")
    if launcher.num_gpus is not None:
        if launcher.num_gpus > len(gpus):
            raise UserError(f"num_gpus is {launcher.num_gpus}, but only {len(gpus)} GPU(s) are visible here")
        gpus = gpus[: launcher.num_gpus]
    return Resources({"localhost": gpus}, None, on_cpu=False)


def _visible_gpus() -> list[int] | None:
    """Indices of the GPUs this process may use, according to CUDA_VISIBLE_DEVICES; None without a GPU."""
    import torch

    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(torch.cuda.device_count()))
    try:
        return [int(index) for index in visible.split(",")]
    except ValueError:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES is {visible}, but DeepSpeed's launcher accepts only GPU indices, such "
            "as 0,1; use indices, or start the script without deepy.py on one GPU"
        ) from None
