"""What deepy.py reports before it starts a rank of train.py."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from megatron.cli.deepy import TRAIN, TRAIN_COMMAND, check_script, main, train
from megatron.config import Config
from megatron.data.indexed_dataset import bin_path, idx_path
from megatron.launcher import main as launcher
from megatron.launcher.node import Node, decode
from megatron.launcher.script_arguments import MERGED_CONFIG_OPTION, decode_config
from megatron.utils.command_line import run_main
from tests.support.runs import ROOT, training_settings


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(*words): run `deepy.py train.py config.yml WORDS`; fails if a rank would be started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(launcher, "run_node", lambda *_: pytest.fail("a rank was started"))
    (tmp_path / "config.yml").write_text(
        json.dumps(training_settings(tmp_path, str(tmp_path / "nowhere"), num_gpus=2))
    )
    return lambda *words: run_main(lambda: main([str(TRAIN), "config.yml", *words]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--set", "data-path=elsewhere"],
            r"no data at elsewhere: elsewhere\.bin and elsewhere\.idx missing; .*",
        ),
        (
            ["--set", "distributed_backend=mpi"],
            '--set: "distributed_backend": must be .nccl. or .gloo., not .mpi.',
        ),
        (
            ["--fallback", "other.yml"],
            r"other\.yml: configuration files come before the options of train\.py",
        ),
        (
            ["--set", "num_gpus=3", "model-parallel-size=2"],
            r"3 process\(es\) cannot be divided into replicas of 2: .*",
        ),
        (["--set", "train_batch_size="], "no batch size: .*"),
        (["--set", "train_iters="], "train-iters is not set; .*"),
        (
            ["--fallback", "-d", "other"],
            "-d comes directly after the script or the configuration files; .*",
        ),
        (
            ["--set", "data-path=null", 'train-data-paths=["one"]', 'valid-data-paths=["two"]'],
            r"no data at one: one\.bin and one\.idx missing; .*",
        ),
    ],
)
def test_errors_before_a_rank_is_started(start, capsys, words, message):
    assert start(*words) == 2
    assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err)


def test_unknown_option(start, capsys):
    with pytest.raises(SystemExit) as caught:
        start("--train-itres", "3")
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("usage: train.py")
    assert "unrecognized arguments: --train-itres" in errors


def test_train_command(start, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["kerple train", "config.yml", "--set", "data-path=elsewhere"])
    assert run_main(train) == 2
    assert "error: no data at elsewhere" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["kerple train"])
    assert run_main(train) == 2
    assert "error: no configuration files were given for train" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["kerple train", "config.yml", "--help"])
    assert run_main(train) == 0
    assert "--dry-run" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["deepspeed_slurm", "deepspeed_mpi"])
def test_ranks_that_nothing_has_started(start, monkeypatch, capsys, key):
    """They would be one rank, or the ranks of this machine."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["kerple train", "config.yml", "--set", f"{key}=true"])
    assert (start("--set", f"{key}=true"), run_main(train)) == (2, 2)
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
    assert first.startswith(f"error: {key} is true, but ")


def test_kerple_train_is_a_rank_of_srun(start, monkeypatch, capsys):
    variables = {"PROCID": "5", "LOCALID": "1", "STEP_NUM_TASKS": "8", "NTASKS": "8"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("megatron.cli.deepy.train_script.main", lambda: 17)
    words = ["--set", "deepspeed_slurm=true", "master_addr=node-7"]
    monkeypatch.setattr(sys, "argv", ["kerple train", "config.yml", *words])
    assert run_main(train) == 17
    assert start(*words) == 2
    assert "srun has started 8 processes" in capsys.readouterr().err


def test_accepted(tmp_path):
    keys = {
        "train_data_paths": ["a", "b"],
        "valid_data_paths": ["c", "b"],
        "distributed_backend": "nccl",
    }
    settings = {
        key: value
        for key, value in training_settings(tmp_path, "data").items()
        if key != "data_path"
    }
    config = Config.from_flat({**settings, **keys})
    assert check_script([str(ROOT / "train.py")], config, ["--fallback"], 1) == ["a", "b", "c"]
    assert check_script(TRAIN_COMMAND, config, ["--fallback"], 1) == ["a", "b", "c"]
    config = config.updated(model_parallel_size=2)  # evaluate.py needs no model-parallel ranks
    assert check_script([str(ROOT / "evaluate.py")], config, ["--lengths", "8"], 1) == []


def test_other_hosts_are_asked_for_the_datasets(start, tmp_path, monkeypatch, capsys):
    (tmp_path / "hostfile").write_text("node-1 slots=1\nnode-2 slots=1\n")
    monkeypatch.setattr(launcher, "check_installed", lambda *_: None)
    asked = []

    def check_hosts(hosts, folder, files, environment):
        asked.extend(files)
        return "10.0.0.1"

    monkeypatch.setattr(launcher, "check_hosts", check_hosts)
    monkeypatch.setattr(launcher, "run_pdsh", lambda *_: 0)
    assert start("--set", "hostfile=hostfile", "num_gpus=1", "data-path=nowhere") == 0
    assert asked[-2:] == [str(path(str(tmp_path / "nowhere"))) for path in (bin_path, idx_path)]


def write_dataset(prefix: Path) -> None:
    for path in (bin_path(str(prefix)), idx_path(str(prefix))):
        path.write_bytes(b"")


DRY_RUNS = {
    "pdsh": {"node-1": 2, "node-2": 1},
    "openmpi": {"node-1, node-2": 3},
    "slurm": {"node-1, node-2": 2},
}


@pytest.mark.parametrize("name", DRY_RUNS)
def test_dry_run_over_several_hosts(start, tmp_path, monkeypatch, capfd, name):
    """It prints what each host runs, without ssh, the launcher's program or the data."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0 %n")
    slots = 1 if name == "slurm" else 2
    (tmp_path / "hostfile").write_text(f"node-1 slots={slots}\nnode-2 slots=1\n")
    keys = ["hostfile=hostfile", f"launcher={name}", "num_gpus=", "train_batch_size=12"]
    keys += ["seed=61", "master_port=4711"]
    assert start("--fallback", "--dry_run", "--set", *keys) == 0
    lines = capfd.readouterr().out.splitlines()[-len(DRY_RUNS[name]) :]

    printed = {}
    for line in lines:
        hosts, ranks, command = re.fullmatch(r"(.+), (\d+) rank\(s\): (.+)", line).groups()
        printed[hosts] = int(ranks)
        words = shlex.split(command)
        assert words[-4:-2] == [str(TRAIN), MERGED_CONFIG_OPTION]
        assert decode_config(words[-2]).training.seed == 61
        assert words[-1] == "--fallback"
        if name != "pdsh":
            assert words[0] == {"openmpi": "mpirun", "slurm": "srun"}[name]
            continue
        assert "NCCL_IB_HCA=mlx5_0 %n" in words
        start_of_node = next(i for i, word in enumerate(words) if word.endswith("node.py"))
        index, nodes = words[start_of_node + 1 : start_of_node + 3]
        node = Node(**decode(nodes)[int(index)])
        assert (node.host, len(node.slots)) == (hosts, int(ranks))
        assert (node.master_addr, node.master_port) == ("node-1", 4711)
    assert printed == DRY_RUNS[name]


def test_a_dry_run_tries_a_step(start, tmp_path, capfd):
    """A method that fails in the dtype of the run is found before it starts."""
    write_dataset(tmp_path / "nowhere")
    (tmp_path / "own.py").write_text(
        "import torch\nfrom kerple.positional import Bias, register\n"
        "@register('test_wrong_dtype')\nclass Own(Bias):\n"
        "    def __init__(self, num_heads):\n        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.ones(num_heads, 1))\n"
        "    def bias(self, distance):\n        return self.w @ distance.double()[None]\n"
    )
    keys = ["pos-emb=test_wrong_dtype", f"pos_emb_module={tmp_path / 'own.py'}"]
    assert start("--dry-run", "--set", *keys) != 0
    assert "own.py" in capfd.readouterr().err


def test_dry_run_on_this_machine(start, tmp_path, capfd):
    assert start("--dry-run") == 2  # as without it
    assert "no data at" in capfd.readouterr().err
    write_dataset(tmp_path / "nowhere")
    assert start("--dry-run", "--set", "num_gpus=3", "train_batch_size=12") == 0
    last = capfd.readouterr().out.splitlines()[-1]
    hosts, command = last.split(", 3 rank(s): ")
    assert hosts == "this machine"
    assert shlex.split(command)[:3] == [sys.executable, "-u", str(TRAIN)]
    assert start("--dry-run", "--set", "num_gpus=3", "model-parallel-size=2") == 2
    assert "3 process(es)" in capfd.readouterr().err
