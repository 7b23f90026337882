"""The command line and environment of DeepSpeed's launcher (tests/integration/test_launch.py runs it)."""

import socket
import sys
from pathlib import Path

import pytest

from megatron.config import Config
from megatron.launcher.deepspeed_runner import (
    ReservedPort,
    add_addresses,
    launcher_environment,
    runner_command,
)
from megatron.launcher.resources import Resources
from megatron.launcher.script_arguments import decode_config

KEYS = {"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 16, "pos-emb": "none"}


def make_config(**keys) -> Config:
    return Config.from_flat({**KEYS, **keys})


@pytest.fixture
def hostfile(tmp_path) -> str:
    path = tmp_path / "hostfile"
    path.write_text("# two nodes\nworker-1 slots=4\nworker-2 slots=4\n")
    return str(path)


def command(config: Config, resources: Resources, port: int = 4711) -> list[str]:
    config = add_addresses(config, resources, port)
    return runner_command(config, resources, Path("train.py"), ["--lengths", "8"])


def test_command_on_the_cpu():
    words = command(make_config(seed=5), Resources({"localhost": [0, 1]}, None, on_cpu=True))
    assert words[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert {"--master_port=4711", "--master_addr=127.0.0.1", "--num_gpus=2", "--hostfile="} <= set(words)
    assert words[-5:-2] == ["train.py", "--neox-config", words[-3]]
    assert words[-2:] == ["--lengths", "8"]
    config = decode_config(words[-3])
    assert (config.training.seed, config.launcher.master_port) == (5, 4711)


def test_command_on_gpus():
    words = command(make_config(master_port=1234), Resources({"localhost": [2, 5]}, None, on_cpu=False))
    assert "--include=localhost:2,5" in words
    assert "--master_port=1234" in words
    assert not any(word.startswith("--num_gpus") for word in words)


def test_command_on_several_nodes(hostfile):
    resources = Resources({"worker-1": [0, 1], "worker-2": [0, 1]}, hostfile, on_cpu=False)
    words = command(make_config(hostfile=hostfile, num_gpus=2, no_ssh_check=True), resources)
    assert {
        f"--hostfile={hostfile}",
        "--launcher=pdsh",
        "--num_gpus=2",
        "--no_ssh_check",
        "--master_port=29500",
    } <= set(words)
    assert not any(word.startswith("--master_addr") for word in words)
    slurm = {"launcher": "SLURM", "comment": "a run", "account": "lab", "force_multi": True, "num_nodes": 2}
    words = command(make_config(hostfile=hostfile, **slurm), resources)
    assert {"--launcher=slurm", "--master_addr=worker-1", "--force_multi", "--num_nodes=2"} <= set(words)
    assert "--launcher_args='--comment=a run' --account=lab" in words
    assert decode_config(words[-3]).launcher.master_addr == "worker-1"


def test_deepspeed_parses_the_command(hostfile):
    from deepspeed.launcher.runner import parse_args

    resources = Resources({"worker-1": [0, 1], "worker-2": [0, 1]}, hostfile, on_cpu=False)
    keys = {"hostfile": hostfile, "launcher": "slurm", "comment": "a run", "num_nodes": 2}
    options = parse_args(command(make_config(**keys), resources)[3:])
    assert (options.hostfile, options.launcher, options.num_nodes) == (hostfile, "slurm", 2)
    assert (options.launcher_args, options.master_addr, options.master_port) == ("'--comment=a run'", "worker-1", 29500)
    assert (options.user_script, options.user_args[0], options.user_args[2:]) == (
        "train.py",
        "--neox-config",
        ["--lengths", "8"],
    )


def test_environment(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    cpu = Resources({"localhost": [0, 1]}, None, on_cpu=True)
    variables, notes = launcher_environment(cpu, {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "3"})
    assert variables == {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "4"}
    assert notes == ["4 thread(s) per process (OMP_NUM_THREADS is not set)"]
    variables, notes = launcher_environment(cpu, {"OMP_NUM_THREADS": "1"})
    assert (variables["OMP_NUM_THREADS"], notes) == ("1", [])
    variables, notes = launcher_environment(
        Resources({"localhost": [3]}, None, on_cpu=False), {"CUDA_VISIBLE_DEVICES": "3"}
    )
    assert (variables, notes) == ({}, [])
    several_nodes = Resources({"worker-1": [0]}, "hostfile", on_cpu=False)
    assert launcher_environment(several_nodes, {"A": "b"}) == ({"A": "b"}, [])


def test_reserved_port_can_be_listened_on_and_is_given_to_no_other_process():
    with ReservedPort() as port, ReservedPort() as second, socket.socket() as listener:
        assert port.number != second.number
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port.number))
        listener.listen()
        with socket.create_connection(("127.0.0.1", port.number), timeout=5) as connection:
            assert connection.getpeername()[1] == port.number
