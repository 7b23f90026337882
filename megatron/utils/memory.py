"""How much memory is free on this host or GPU."""

import contextlib
from pathlib import Path

import psutil
import torch

_CGROUPS = Path("/sys/fs/cgroup")


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that processes of this host can still allocate on a GPU, or in host memory for any other device."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([psutil.virtual_memory().available, *_free_in_control_groups()])


def _free_in_control_groups() -> list[int]:
    """What each memory limit of this process's control groups leaves, in bytes; page cache counts as free.

    Containers and batch systems set such limits: memory.max in version 2 of the kernel's interface, and
    memory.limit_in_bytes in version 1.
    """
    free = []
    lines = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage = _CGROUPS, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = _CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            # A group without a limit has the word max. In a container, the path may be that of the host.
            with contextlib.suppress(OSError, ValueError):
                if group.is_relative_to(root):
                    statistics = dict(entry.split() for entry in (group / "memory.stat").read_text().splitlines())
                    prefix = "total_" if "total_active_file" in statistics else ""
                    cache = sum(int(statistics.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                    left = int((group / limit).read_text()) - int((group / usage).read_text()) + cache
                    free.append(max(left, 0))
    return free
