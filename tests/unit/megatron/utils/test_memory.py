"""Free memory: that of the machine, and what the limits of control groups leave."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.utils import memory
from megatron.utils.memory import free_memory

FILES = {
    2: ("0::/job/step", "", "memory.max", "memory.current", "anon 1\ninactive_file 100\nactive_file 20\n"),
    1: (
        "5:cpuset:/\n4:cpu,memory:/job/step",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "active_file 1\ntotal_inactive_file 100\ntotal_active_file 20\n",
    ),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group", ["job/step", "job", "."])  # in a container, the root is the group of the process
def test_limits_of_control_groups(version, group, tmp_path, monkeypatch):
    own, controller, limit, usage, statistics = FILES[version]
    folder = tmp_path / controller / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((limit, "5000\n"), (usage, "3000\n"), ("memory.stat", statistics)):
        (folder / name).write_text(text)
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: own if str(path) == "/proc/self/cgroup" else read(path))
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10_000))
    assert free_memory() == 2_120
    (folder / limit).write_text("max\n" if version == 2 else str(2**63 - 4096))
    assert free_memory() == 10_000
