"""deepy.py's command line, and errors that it reports before it starts anything."""

import re
from pathlib import Path

import pytest

from megatron.launcher.main import main, parse_command_line
from megatron.utils.command_line import run_main
from tests.support.checkpoints import write_yaml
from tests.support.configs import MINIMAL
from tests.support.errors import assert_rejected


def test_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("")
    words = [
        "mine.py",
        "-d",
        "configs",
        "a.yml",
        "--set",
        "x=1",
        "b",
        "--lengths",
        "8",
        "c",
        "--set",
        "y=2",
        "-d",
        "z",
    ]
    arguments = parse_command_line(words)
    assert arguments.program == [str(tmp_path / "mine.py")]
    assert (arguments.files, arguments.config_dir) == (["a.yml", "b"], "configs")
    assert arguments.overrides == ["x=1", "y=2"]
    assert arguments.script_options == ["--lengths", "8", "c", "-d", "z"]
    assert not arguments.dry_run
    words = [
        "mine.py",
        "a",
        "--wandb_group",
        "12",
        "--wandb-team=t",
        "-H",
        "hosts",
        "b",
        "--eval_tasks",
        "piqa",
    ]
    arguments_of_neox = parse_command_line(words)
    assert arguments_of_neox.overrides == ['wandb_group="12"', 'wandb_team="t"', 'hostfile="hosts"']
    assert (arguments_of_neox.files, arguments_of_neox.script_options) == (
        ["a", "b"],
        ["--eval_tasks", "piqa"],
    )
    assert parse_command_line([]) is None
    assert parse_command_line(["--help"]) is None
    assert parse_command_line(["mine.py", "--help"]) is None
    assert_rejected("-d is the last word", parse_command_line, ["mine.py", "-d"])


@pytest.mark.parametrize(
    "words",
    [
        ["-d", "configs"],
        ["--conf-dir", "configs"],
        ["--conf_dir=configs"],
        ["-dconfigs"],
        ["-d=configs"],
    ],
)
def test_folder_of_the_configuration_files(words):
    arguments = parse_command_line(["train.py", *words, "demo.yml", "--fallback"])
    assert (arguments.config_dir, arguments.files) == ("configs", ["demo.yml"])
    assert arguments.script_options == ["--fallback"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py", "model"], "nowhere.py: no such script"),
        (["script.py"], "no configuration files were given for script.py"),
        (["script.py", "modell"], r"modell: no such file; nearest: model\.yml"),
        (
            ["script.py", "model", "--set", "num-layer=3"],
            r'--set: "num-layer" is not a known key; nearest: num_layers',
        ),
        (
            [
                "script.py",
                "model",
                "--set",
                "hostfile=nowhere",
                "num_nodes=2",
                "deepspeed_mpi=true",
            ],
            "hostfile nowhere: No such file",
        ),
        (["script.py", "model", "--set", "deepspeed_slurm=true"], "srun has started 2 processes"),
        (["script.py", "model", "--set", "launcher=slurm"], "srun has started 2 processes"),
    ],
)
def test_errors_come_before_anything_is_started(tmp_path, monkeypatch, capsys, words, message):
    (tmp_path / "script.py").write_text("")
    write_yaml(tmp_path / "model.yml", MINIMAL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name, value in {"PROCID": "1", "LOCALID": "1", "STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "SIZE": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setattr(
        "megatron.launcher.main.run_node", lambda *_: pytest.fail("something was started")
    )
    assert run_main(lambda: main(words)) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(f"error: .*{message}.*\n", errors)
