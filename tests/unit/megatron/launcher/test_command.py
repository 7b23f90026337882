"""What DeepSpeed's launcher is told: hosts and slots, addresses, environment."""

import socket
import sys
from pathlib import Path

import pytest

from megatron.config import Config, UserError
from megatron.config.command_line import decode
from megatron.launcher import resources as resources_module
from megatron.launcher.command import ReservedPort, launcher_command, launcher_environment, with_addresses
from megatron.launcher.command_line import parse_command_line
from megatron.launcher.resources import Resources, find_resources

FLAT = {"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 16, "pos-emb": "none"}


@pytest.fixture
def hostfile(tmp_path) -> str:
    path = tmp_path / "hostfile"
    path.write_text("# two nodes\nworker-1 slots=4\nworker-2 slots=4\n")
    return str(path)


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n, visible): pretend that the machine has n GPUs and that CUDA_VISIBLE_DEVICES is `visible`."""

    def pretend(count: int, visible: str | None = None) -> None:
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)

    return pretend


def make(**keys) -> Config:
    return Config.from_flat({**FLAT, **keys})


def test_this_machine_without_gpu(gpus):
    gpus(0)
    assert find_resources(make()) == Resources({"localhost": [0]}, None, on_cpu=True)
    assert find_resources(make(num_gpus=3)).world_size == 3
    with pytest.raises(UserError, match="include and exclude name GPUs, and this machine has none"):
        find_resources(make(include="localhost:0"))


def test_this_machine_with_gpus(gpus):
    gpus(4)
    assert find_resources(make()).slots == {"localhost": [0, 1, 2, 3]}
    assert find_resources(make(num_gpus=2)).slots == {"localhost": [0, 1]}
    assert find_resources(make(include="localhost:1,3")).slots == {"localhost": [1, 3]}
    assert find_resources(make(exclude="localhost:0")).slots == {"localhost": [1, 2, 3]}
    for keys, message in (
        ({"num_gpus": 5}, r"num_gpus is 5, but only 4 GPU\(s\) are visible here"),
        ({"include": "localhost:7"}, "include / exclude: No slot '7'"),
        ({"include": "elsewhere:0"}, "include / exclude: Hostname 'elsewhere' not found"),
        ({"exclude": "localhost"}, "include and exclude leave no GPU"),
    ):
        with pytest.raises(UserError, match=message):
            find_resources(make(**keys))


def test_visible_devices_are_respected(gpus):
    gpus(2, visible="2,5")
    assert find_resources(make()).slots == {"localhost": [2, 5]}
    assert find_resources(make(num_gpus=1)).slots == {"localhost": [2]}
    assert find_resources(make()).describe() == "2 processes on GPU 2, 5 of this machine"
    gpus(1, visible="GPU-5ebe9f43")
    with pytest.raises(UserError, match="takes GPU indices only"):
        find_resources(make())


def test_hostfile(hostfile):
    found = find_resources(make(hostfile=hostfile))
    assert found.slots == {"worker-1": [0, 1, 2, 3], "worker-2": [0, 1, 2, 3]}
    assert found.describe() == f"8 processes on 2 host(s) of {hostfile}"
    assert find_resources(make(hostfile=hostfile, num_nodes=1, num_gpus=2)).slots == {"worker-1": [0, 1]}
    assert find_resources(make(hostfile=hostfile, include="worker-2:1,2")).slots == {"worker-2": [1, 2]}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_nodes": 3}, r"num_nodes is 3, but .* lists 2 host\(s\)"),
        ({"num_gpus": 5}, "num_gpus is 5, but .* gives fewer slots to worker-1, worker-2"),
        ({"include": "worker-9"}, "Hostname 'worker-9' not found"),
        ({"exclude": "worker-1@worker-2"}, "include and exclude leave no host"),
    ],
)
def test_hostfile_that_does_not_hold_what_is_asked(hostfile, keys, message):
    with pytest.raises(UserError, match=message):
        find_resources(make(hostfile=hostfile, **keys))


def test_bad_hostfile(tmp_path, hostfile):
    Path(hostfile).write_text("worker-1 4\n")
    with pytest.raises(UserError, match="bad entry: worker-1 4"):
        find_resources(make(hostfile=hostfile))


def test_the_usual_hostfile_is_used_where_it_is(hostfile, monkeypatch, gpus):
    gpus(0)
    monkeypatch.setattr(resources_module, "DEFAULT_HOSTFILE", hostfile)
    assert find_resources(make()).hostfile == hostfile


@pytest.mark.parametrize("keys", [{"num_nodes": 2}, {"force_multi": True}, {"launcher": "slurm"}])
def test_several_nodes_need_a_hostfile(gpus, keys):
    gpus(0)
    with pytest.raises(UserError, match=r"needs a hostfile, one `HOST slots=N` line per node"):
        find_resources(make(**keys))


def test_launcher_for_several_nodes(hostfile, monkeypatch):
    def check(**keys):
        config = make(hostfile=hostfile, **keys)
        resources_module.check_launcher(config, find_resources(config))

    monkeypatch.setattr("shutil.which", lambda name: None)
    check(num_nodes=1)
    with pytest.raises(
        UserError, match=r"launcher pdsh is not installed here \(pdsh is not found\); install it, or set"
    ):
        check()
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    check()
    check(launcher="openmpi")
    check(launcher="slurm", num_gpus=2)
    with pytest.raises(UserError, match="launcher openmpi uses the hostfile as it is; remove num_gpus"):
        check(launcher="openmpi", num_gpus=2)
    with pytest.raises(UserError, match="launcher slurm: slurm backend cannot select specific device ids"):
        check(launcher="slurm", include="worker-1:1@worker-2:1")


def command(config: Config, found: Resources, port: int = 4711) -> list[str]:
    return launcher_command(with_addresses(config, found, port), found, Path("train.py"), ["--lengths", "8"])


def test_command_on_the_cpu():
    words = command(make(seed=5), Resources({"localhost": [0, 1]}, None, on_cpu=True))
    assert words[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert {"--master_port=4711", "--master_addr=127.0.0.1", "--num_gpus=2", "--hostfile="} <= set(words)
    assert words[-5:-2] == ["train.py", "--neox-config", words[-3]]
    assert words[-2:] == ["--lengths", "8"]
    config = decode(words[-3])
    assert (config.training.seed, config.launcher.master_port) == (5, 4711)


def test_command_on_gpus_names_them():
    words = command(make(master_port=1234), Resources({"localhost": [2, 5]}, None, on_cpu=False))
    assert "--include=localhost:2,5" in words
    assert "--master_port=1234" in words
    assert not any(word.startswith("--num_gpus") for word in words)


def test_command_on_several_nodes(hostfile):
    found = Resources({"worker-1": [0, 1], "worker-2": [0, 1]}, hostfile, on_cpu=False)
    words = command(make(hostfile=hostfile, num_gpus=2, no_ssh_check=True), found)
    assert {
        f"--hostfile={hostfile}",
        "--launcher=pdsh",
        "--num_gpus=2",
        "--no_ssh_check",
        "--master_port=29500",
    } <= set(words)
    assert not any(word.startswith("--master_addr") for word in words)
    slurm = {"launcher": "SLURM", "comment": "a run", "account": "lab", "force_multi": True, "num_nodes": 2}
    words = command(make(hostfile=hostfile, **slurm), found)
    assert {"--launcher=slurm", "--master_addr=worker-1", "--force_multi", "--num_nodes=2"} <= set(words)
    assert "--launcher_args='--comment=a run' --account=lab" in words
    assert decode(words[-3]).launcher.master_addr == "worker-1"


def test_deepspeed_understands_the_commands(hostfile):
    from deepspeed.launcher.runner import parse_args

    found = Resources({"worker-1": [0, 1], "worker-2": [0, 1]}, hostfile, on_cpu=False)
    keys = {"hostfile": hostfile, "launcher": "slurm", "comment": "a run", "num_nodes": 2}
    read = parse_args(command(make(**keys), found)[3:])
    assert (read.hostfile, read.launcher, read.num_nodes) == (hostfile, "slurm", 2)
    assert (read.launcher_args, read.master_addr, read.master_port) == ("'--comment=a run'", "worker-1", 29500)
    assert (read.user_script, read.user_args[0], read.user_args[2:]) == (
        "train.py",
        "--neox-config",
        ["--lengths", "8"],
    )


def test_environment(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    cpu = Resources({"localhost": [0, 1]}, None, on_cpu=True)
    made, notes = launcher_environment(cpu, {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "3"})
    assert made == {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "4"}
    assert notes == ["4 thread(s) per process (OMP_NUM_THREADS is not set)"]
    made, notes = launcher_environment(cpu, {"OMP_NUM_THREADS": "1"})
    assert (made["OMP_NUM_THREADS"], notes) == ("1", [])
    made, notes = launcher_environment(Resources({"localhost": [3]}, None, on_cpu=False), {"CUDA_VISIBLE_DEVICES": "3"})
    assert (made, notes) == ({}, [])
    elsewhere = Resources({"worker-1": [0]}, "hostfile", on_cpu=False)
    assert launcher_environment(elsewhere, {"A": "b"}) == ({"A": "b"}, [])


def test_reserved_port_is_free_to_listen_on_and_given_to_nobody_else():
    with ReservedPort() as port, ReservedPort() as other, socket.socket() as listener:
        assert port.number != other.number
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port.number))
        listener.listen()
        with socket.create_connection(("127.0.0.1", port.number), timeout=5) as connection:
            assert connection.getpeername()[1] == port.number


def test_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("")
    words = ["mine.py", "-d", "configs", "a.yml", "--set", "x=1", "b", "--lengths", "8", "c", "--set", "y=2", "-d", "z"]
    request = parse_command_line(words)
    assert (request.script, request.files, request.config_dir) == (Path("mine.py"), ["a.yml", "b"], "configs")
    assert request.overrides == ["x=1", "y=2"]
    assert request.script_options == ["--lengths", "8", "c", "-d", "z"]
    assert parse_command_line([]) is None
    assert parse_command_line(["--help"]) is None
    with pytest.raises(UserError, match="-d is the last word"):
        parse_command_line(["mine.py", "-d"])


def test_a_script_beside_deepy_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_command_line(["deepy.py", "a.yml"]).script == Path(__file__).parents[4] / "deepy.py"
