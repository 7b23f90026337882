"""The resources of a run: the hosts and slots of a hostfile, or the GPUs or CPU of this machine."""

import dataclasses
import os
import re
import shutil
import socket
from pathlib import Path

from megatron.config import Config
from megatron.utils.errors import UserError
from megatron.utils.progress import fitted

# DeepSpeed and GPT-NeoX read this hostfile if none is given, or the one that DLTS_HOSTFILE names.
DEFAULT_HOSTFILE = "/job/hostfile"
MOCK_HOSTFILE = "/mock_path"  # in GPT-NeoX's configs; it does not exist
PROGRAMS = {"pdsh": "pdsh", "slurm": "srun", "openmpi": "ompi_info"}


@dataclasses.dataclass(frozen=True)
class Resources:
    """Slots by host, in rank order: indices of GPUs, or of processes on the CPU.

    `hostfile` is None if it was not read, so only this machine is used.
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
            cpu = ", on the CPU" if self.on_cpu else ""
            return f"{processes} on {len(self.hosts)} host(s) of {self.hostfile}{cpu}"
        if self.on_cpu:
            return (
                f"{processes} on the CPU ({_reason_for_cpu()}; num_gpus sets the number of "
                "processes)"
            )
        return f"{processes} on GPU {', '.join(map(str, self.slots['localhost']))} of this machine"


def find_resources(config: Config) -> Resources:
    """The slots that the configuration requests. Raises UserError if they are not available."""
    # The hostfile: the configured one, or else the default if it exists.
    launcher = config.launcher
    hostfile = launcher.hostfile
    default = os.environ.get("DLTS_HOSTFILE", DEFAULT_HOSTFILE)
    if hostfile is None and default != DEFAULT_HOSTFILE and not Path(default).is_file():
        raise UserError(
            f"DLTS_HOSTFILE is {default}, but there is no such file; unset the variable, or set "
            "hostfile"
        )
    if hostfile is None and Path(default).is_file():
        hostfile = default
    needed_by = None
    if launcher.num_nodes > 1:
        needed_by = f"num_nodes {launcher.num_nodes}"
    elif launcher.force_multi:
        needed_by = "force_multi"
    elif launcher.launcher != "pdsh":
        needed_by = f"launcher {launcher.launcher}"
    if hostfile == MOCK_HOSTFILE and needed_by is None and not Path(hostfile).exists():
        line = (
            f"deepy: hostfile {hostfile} does not exist; using only this machine, as GPT-NeoX does"
        )
        print(fitted(line), flush=True)
        hostfile = None

    # Its hosts, or this machine.
    if hostfile is not None:
        resources = _resources_of_hostfile(config, hostfile)
        return resources if uses_other_hosts(config, resources) else _on_this_machine(resources)
    if needed_by is None:
        return _resources_of_this_machine(config)
    raise UserError(
        f"{needed_by} needs a hostfile with one `HOST slots=N` line per node "
        "(on Slurm: scontrol show hostnames | sed 's/$/ slots=8/' > hostfile); set hostfile"
    )


def uses_other_hosts(config: Config, resources: Resources) -> bool:
    """True if `launcher` must start the ranks: there are several hosts, or one that is not this
    machine.
    """
    if resources.hostfile is None:
        return False
    launcher = config.launcher
    several = len(resources.hosts) > 1 or launcher.force_multi or launcher.launcher == "slurm"
    return several or not _is_this_machine(resources.hosts[0])


def check_installed(config: Config) -> None:
    """Raises UserError if the launcher is not installed."""
    launcher = config.launcher.launcher
    program = PROGRAMS[launcher]
    if shutil.which(program) is None:
        alternatives = ", ".join(name for name in PROGRAMS if name != launcher)
        raise UserError(
            f"launcher {launcher} is not installed here ({program} is not found); install it, or "
            f"set launcher to one of {alternatives}"
        )


def check_slots(config: Config, resources: Resources) -> None:
    """Raises UserError if the launcher cannot start these ranks."""
    # Slurm and MPI number the slots themselves.
    launcher = config.launcher.launcher
    if launcher == "pdsh":
        return
    for host, slots in resources.slots.items():
        if slots != list(range(len(slots))):
            raise UserError(
                f"launcher {launcher} cannot select slots {', '.join(map(str, slots))} of {host}, "
                "only the first ones; change include or exclude, or use launcher pdsh"
            )
    counts = {host: len(slots) for host, slots in resources.slots.items()}
    if launcher != "openmpi" and len(set(counts.values())) > 1:
        text = ", ".join(f"{host} has {count}" for host, count in counts.items())
        raise UserError(
            f"launcher {launcher} needs the same number of slots on every host, but {text}"
        )


def _is_this_machine(host: str) -> bool:
    """True if the host's address is one of this machine, or if the name has no address but is this
    machine's.
    """
    try:
        with socket.socket() as probe:
            probe.bind((socket.gethostbyname(host), 0))
        return True
    except OSError:
        return host == socket.gethostname()


def read_hostfile(path: str) -> dict[str, list[int]]:
    """Host -> slots from 0, in the order of the file: one `HOST slots=N` per line, # starts a
    comment.

    Raises UserError if the file cannot be read, or a line is wrong.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"hostfile {path}: {getattr(error, 'strerror', None) or 'not a text file'}"
        ) from error

    # A line per host, with the number of its slots.
    hosts: dict[str, list[int]] = {}
    for number, line in enumerate(lines, start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+slots\s*=\s*([1-9]\d*)", line)
        if match is None:
            raise UserError(
                f"hostfile {path}, line {number}: expected HOST slots=N with N >= 1, not {line!r}"
            )
        if not re.fullmatch(r"[A-Za-z0-9_.@:][A-Za-z0-9_.@:-]*", match[1]):
            raise UserError(
                f"hostfile {path}, line {number}: {match[1]!r} is not the name of one host; use a "
                "line per host"
            )
        if match[1] in hosts:
            raise UserError(
                f"hostfile {path}, line {number}: {match[1]} was listed before; add up its slots"
            )
        hosts[match[1]] = list(range(int(match[2])))
    if not hosts:
        raise UserError(f"hostfile {path} lists no host; expected one HOST slots=N per line")
    return hosts


def _resources_of_hostfile(config: Config, hostfile: str) -> Resources:
    # include and exclude select first, then num_nodes and num_gpus.
    launcher = config.launcher
    slots = _select(read_hostfile(hostfile), config, hostfile)
    if launcher.num_nodes > len(slots):
        raise UserError(
            f"num_nodes is {launcher.num_nodes}, but {hostfile} lists {len(slots)} host(s)"
        )
    if launcher.num_nodes > 0:
        slots = dict(list(slots.items())[: launcher.num_nodes])
    count = launcher.num_gpus
    if count is not None:
        too_small = [host for host, indices in slots.items() if len(indices) < count]
        if too_small:
            raise UserError(
                f"num_gpus is {count}, but {', '.join(too_small)} has fewer slots in {hostfile}"
            )
        slots = {host: indices[:count] for host, indices in slots.items()}
    return Resources(slots, hostfile, on_cpu=False)


def _on_this_machine(resources: Resources) -> Resources:
    """The GPUs that slots of a hostfile stand for on this machine: slot i is the i-th visible one.
    Without a GPU, they are processes on the CPU. Raises UserError if there are fewer GPUs.
    """
    gpus = visible_gpus()
    if gpus is None:
        return dataclasses.replace(resources, on_cpu=True)
    ((host, slots),) = resources.slots.items()
    if slots[-1] >= len(gpus):
        raise UserError(
            f"hostfile {resources.hostfile}: slot {slots[-1]} of {host} is not available, because "
            f"only {len(gpus)} GPU(s) are visible here (slots start at 0); lower slots or "
            "num_gpus, or change CUDA_VISIBLE_DEVICES"
        )
    return dataclasses.replace(resources, slots={host: [gpus[slot] for slot in slots]})


def _select(slots: dict[str, list[int]], config: Config, source: str) -> dict[str, list[int]]:
    """The slots that include and exclude leave: HOST[:SLOT,SLOT...] joined by @, as in DeepSpeed.

    Raises UserError if a host or slot is not in `slots`, which came from `source`, or if none is
    left.
    """
    name, text = "include", config.launcher.include
    if not text:
        name, text = "exclude", config.launcher.exclude
    if text is None:
        return slots

    # The named slots; a host without slots names all of its own.
    named: set[tuple[str, str]] = set()
    for word in text.split("@"):
        host, _, indices = word.strip().partition(":")
        if host not in slots:
            raise UserError(
                f"{name}: {host!r} is not a host of {source}, which has {', '.join(slots)}"
            )
        known = list(map(str, slots[host]))
        chosen = known
        if indices:
            chosen = indices.split(",")
        for index in map(str.strip, chosen):
            if index not in known:
                raise UserError(
                    f"{name}: {host} has no slot {index!r} in {source}, only {slots[host]}"
                )
            named.add((host, index))

    kept: dict[str, list[int]] = {}
    for host, all_slots in slots.items():
        for slot in all_slots:
            if ((host, str(slot)) in named) == (name == "include"):
                kept.setdefault(host, []).append(slot)
    if not kept:
        raise UserError(f"{name} {text} leaves no slot of {source}")
    return kept


def _resources_of_this_machine(config: Config) -> Resources:
    launcher = config.launcher
    gpus = visible_gpus()
    if gpus is None:
        if launcher.include or launcher.exclude:
            raise UserError(
                f"include and exclude select GPUs, but {_reason_for_cpu()}; use num_gpus"
            )
        return Resources({"localhost": list(range(launcher.num_gpus or 1))}, None, on_cpu=True)
    gpus = _select({"localhost": gpus}, config, "this machine")["localhost"]
    if launcher.num_gpus is not None:
        if launcher.num_gpus > len(gpus):
            raise UserError(
                f"num_gpus is {launcher.num_gpus}, but only {len(gpus)} GPU(s) are visible here"
            )
        gpus = gpus[: launcher.num_gpus]
    return Resources({"localhost": gpus}, None, on_cpu=False)


def _reason_for_cpu() -> str:
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return "DS_ACCELERATOR is cpu"
    return "no GPU was found"


def visible_gpus() -> list[int] | None:
    """Indices of the GPUs in CUDA_VISIBLE_DEVICES, or of all; None to use the CPU."""
    import torch

    from megatron.utils.environment import use_gpus

    if not use_gpus():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(torch.cuda.device_count()))
    try:
        return [int(index) for index in visible.split(",")]
    except ValueError:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES is {visible}, but deepy.py and sweeps accept only GPU indices, "
            "such as 0,1; use indices, or start the script without deepy.py on one GPU"
        ) from None
