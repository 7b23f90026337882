"""Hosts and slots: this machine or a hostfile, with and without GPUs."""

from pathlib import Path

import pytest

from megatron.launcher.resources import (
    Resources,
    check_installed,
    check_slots,
    find_resources,
    uses_other_hosts,
)
from tests.support.configs import make_config
from tests.support.errors import assert_rejected


@pytest.fixture
def hostfile(tmp_path) -> str:
    path = tmp_path / "hostfile"
    path.write_text("# two nodes\nworker-1 slots=4\nworker-2 slots=4\n")
    return str(path)


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n, visible): pretend that the machine has n GPUs and that CUDA_VISIBLE_DEVICES is
    `visible`.
    """

    def pretend(count: int, visible: str | None = None) -> None:
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr("megatron.utils.environment.shutil.which", lambda program: None)

    return pretend


def test_this_machine_on_the_cpu(gpus, monkeypatch):
    gpus(0)
    assert find_resources(make_config()) == Resources({"localhost": [0]}, None, on_cpu=True)
    assert find_resources(make_config(num_gpus=3)).world_size == 3
    assert_rejected(
        "include and exclude .*no GPU", find_resources, make_config(include="localhost:0")
    )
    gpus(2)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert "DS_ACCELERATOR" in find_resources(make_config()).describe()
    assert_rejected(
        "include and exclude .*DS_ACCELERATOR", find_resources, make_config(include="localhost:0")
    )


def test_this_machine_with_gpus(gpus):
    gpus(4)
    assert find_resources(make_config()).slots == {"localhost": [0, 1, 2, 3]}
    assert find_resources(make_config(num_gpus=2)).slots == {"localhost": [0, 1]}
    assert find_resources(make_config(include="localhost:1,3")).slots == {"localhost": [1, 3]}
    assert find_resources(make_config(exclude="localhost:0")).slots == {"localhost": [1, 2, 3]}
    for keys, message in (
        ({"num_gpus": 5}, r"num_gpus is 5, but only 4 GPU\(s\) are visible here"),
        ({"include": "localhost:7"}, "include: localhost has no slot '7' in this machine"),
        (
            {"include": "elsewhere:0"},
            "include: 'elsewhere' is not a host of this machine, which has localhost",
        ),
        ({"exclude": "localhost"}, "exclude localhost leaves no slot of this machine"),
    ):
        assert_rejected(message, find_resources, make_config(**keys))


def test_a_missing_hostfile(gpus, capsys):
    gpus(2)
    assert find_resources(make_config(hostfile="/mock_path")).slots == {"localhost": [0, 1]}
    assert capsys.readouterr().out.startswith(
        "deepy: hostfile /mock_path does not exist; using only this machine"
    )
    for keys in ({"num_nodes": 2}, {"force_multi": True}, {"launcher": "slurm"}):
        assert_rejected("/mock_path", find_resources, make_config(hostfile="/mock_path", **keys))
    assert_rejected(
        "hostfile nowhere: No such file or directory",
        find_resources,
        make_config(hostfile="nowhere"),
    )


def test_visible_devices_are_respected(gpus):
    gpus(2, visible="2,5")
    assert find_resources(make_config()).slots == {"localhost": [2, 5]}
    assert find_resources(make_config(num_gpus=1)).slots == {"localhost": [2]}
    assert find_resources(make_config()).describe() == "2 processes on GPU 2, 5 of this machine"
    gpus(1, visible="GPU-5ebe9f43")
    assert_rejected("CUDA_VISIBLE_DEVICES is GPU-5ebe9f43.*indices", find_resources, make_config())


def test_a_hostfile_of_this_machine(gpus, tmp_path):
    (tmp_path / "local").write_text("localhost slots=3\n")
    keys = {"hostfile": str(tmp_path / "local")}
    gpus(0)
    resources = find_resources(make_config(**keys, num_gpus=2))
    assert (resources.slots, resources.on_cpu) == ({"localhost": [0, 1]}, True)
    assert resources.describe().endswith(", on the CPU")
    gpus(4, visible="2,5,6,7")
    resources = find_resources(make_config(**keys))
    assert (resources.slots, resources.on_cpu) == ({"localhost": [2, 5, 6]}, False)
    assert find_resources(make_config(**keys, include="localhost:2")).slots == {"localhost": [6]}
    gpus(2, visible="2,5")
    assert_rejected(r"slot 2 of localhost.*2 GPU", find_resources, make_config(**keys))


def test_hostfile(hostfile, monkeypatch):
    resources = find_resources(make_config(hostfile=hostfile))
    assert resources.slots == {"worker-1": [0, 1, 2, 3], "worker-2": [0, 1, 2, 3]}
    assert resources.describe() == f"8 processes on 2 host(s) of {hostfile}"
    monkeypatch.setenv("DLTS_HOSTFILE", hostfile)
    assert find_resources(make_config()) == resources
    text = Path(hostfile).read_text()
    Path(hostfile).write_text("\ufeff" + text, encoding="utf-8")  # by an editor of Windows
    assert find_resources(make_config()) == resources
    Path(hostfile).write_text(text)
    monkeypatch.setenv("DLTS_HOSTFILE", "nowhere")
    assert_rejected("DLTS_HOSTFILE", find_resources, make_config())
    assert find_resources(make_config(hostfile=hostfile, num_nodes=1, num_gpus=2)).slots == {
        "worker-1": [0, 1]
    }
    assert find_resources(make_config(hostfile=hostfile, num_nodes=2, num_gpus=4)) == resources
    assert find_resources(make_config(hostfile=hostfile, include="worker-2:1,2")).slots == {
        "worker-2": [1, 2]
    }


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        (None, {"num_nodes": 3}, "num_nodes.*3.*2"),
        (None, {"num_gpus": 5}, "num_gpus.*5.*worker-1, worker-2"),
        (None, {"include": "worker-9"}, "include: 'worker-9'.*worker-1, worker-2"),
        (
            None,
            {"include": "worker-1:9"},
            r"include: worker-1 has no slot '9' in .*, only \[0, 1, 2, 3\]",
        ),
        (None, {"exclude": "worker-1@worker-2"}, "exclude worker-1@worker-2"),
        ("worker-1 4\n", {}, "1.*HOST.*'worker-1"),
        ("# a\nworker-1 slots=0\n", {}, "2.*HOST.*1"),
        ("a slots=1\na slots=2\n", {}, "line 2: a was listed before"),
        (
            "node[1-2] slots=4\n",
            {},
            r"line 1: 'node\[1-2\]' is not the name of one host; use a line per host",
        ),
    ],
)
def test_rejected_hostfiles(hostfile, text, keys, message):
    if text is not None:
        Path(hostfile).write_text(text)
    assert_rejected(message, find_resources, make_config(hostfile=hostfile, **keys))


def test_other_hosts(tmp_path):
    def uses(hosts: str, **keys) -> bool:
        (tmp_path / "hosts").write_text(hosts)
        config = make_config(hostfile=str(tmp_path / "hosts"), **keys)
        return uses_other_hosts(config, find_resources(config))

    assert not uses("localhost slots=1\n")
    assert uses("localhost slots=1\n", force_multi=True)
    assert uses("localhost slots=1\n", launcher="slurm")
    assert uses("no-such-host.invalid slots=1\n")
    assert uses("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    assert not uses("127.0.0.1 slots=1\n127.0.0.2 slots=1\n", num_nodes=1)
    assert not uses_other_hosts(make_config(), Resources({"localhost": [0]}, None, on_cpu=True))


def test_a_launcher_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert_rejected("launcher pdsh", check_installed, make_config())
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    check_installed(make_config())


def test_slots_that_a_launcher_can_use(hostfile):
    def check(**keys):
        config = make_config(hostfile=hostfile, **keys)
        check_slots(config, find_resources(config))

    check(include="worker-1:1@worker-2:0,3")
    check(launcher="openmpi", num_gpus=2, num_nodes=1)
    check(launcher="openmpi", include="worker-1:0@worker-2")
    check(launcher="slurm", num_gpus=2)
    assert_rejected("1.*worker-1", check, launcher="openmpi", include="worker-1:1@worker-2")
    assert_rejected(
        "worker-1.*1.*worker-2.*4", check, launcher="slurm", include="worker-1:0@worker-2"
    )
