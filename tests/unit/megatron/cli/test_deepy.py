"""What deepy.py reports before it starts a rank of train.py."""

import json
import re
import sys

import pytest

from megatron.cli.deepy import TRAIN, TRAIN_COMMAND, check_script, main, train
from megatron.config import Config
from megatron.data.indexed_dataset import bin_path, idx_path
from megatron.launcher import main as launcher
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
    monkeypatch.setattr(launcher, "check_launcher", lambda *_: None)
    asked = []

    def check_hosts(hosts, folder, files, environment):
        asked.extend(files)
        return "10.0.0.1"

    monkeypatch.setattr(launcher, "check_hosts", check_hosts)
    monkeypatch.setattr(launcher, "run_pdsh", lambda *_: 0)
    assert start("--set", "hostfile=hostfile", "num_gpus=1", "data-path=nowhere") == 0
    assert asked[-2:] == [str(path(str(tmp_path / "nowhere"))) for path in (bin_path, idx_path)]
