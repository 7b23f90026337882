import os
from pathlib import Path

import pytest

from megatron.cli import evaluate, generate
from megatron.config import UserError
from megatron.launcher.node import encode
from megatron.launcher.script_arguments import decode_config, parse_arguments
from tests.support.checkpoints import write_yaml
from tests.support.configs import MINIMAL, make_config
from tests.support.errors import assert_rejected

SLURM = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("megatron.launcher.script_arguments.follow_launcher", lambda: None)
    write_yaml(tmp_path / "model.yml", {**MINIMAL, "rope-fusion": True})
    (tmp_path / "seed.yml").write_text('{"seed": 7}')
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    return tmp_path


def add_own_options(parser):
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("-i", "--input")


def test_files_overrides_and_own_options(folder, capsys):
    words = [
        "-d",
        str(folder),
        "model",
        "seed.yml",
        "--set",
        "train-iters=3",
        "--lengths",
        "8",
        "16",
        "-i",
        "p.txt",
    ]
    config, options = parse_arguments(
        "a test", [*words, "--set", "save=x", "load=y"], add_options=add_own_options
    )
    assert (config.training.seed, config.schedule.train_iters) == (7, 3)
    assert (config.checkpoint.save, config.checkpoint.load) == ("x", "y")
    assert (options.lengths, options.input) == ([8, 16], "p.txt")
    assert capsys.readouterr().out.count('"rope-fusion" is ignored') == 1


def test_paths_on_the_command_line_are_expanded(folder, monkeypatch):
    """The shell does not expand ~ after an equals sign."""
    monkeypatch.setenv("HOME", str(folder))
    words = [
        "--conf-dir=~",
        "model",
        "--hostfile=~/hosts",
        "--input=~/p",
        "--output=$HOME/t",
        "--set",
        "save=~/run",
    ]
    config, options = parse_arguments("a test", words, generate._add_options)
    assert (config.launcher.hostfile, config.checkpoint.save) == (
        f"{folder}/hosts",
        f"{folder}/run",
    )
    assert (options.input, options.output) == (f"{folder}/p", f"{folder}/t")
    words = ["--conf-dir=~", "model", "--output=~/r", "--include-path=~/tasks"]
    _, options = parse_arguments("a test", words, evaluate.add_options)
    assert (options.output, options.include_path) == (f"{folder}/r", [f"{folder}/tasks"])
    with pytest.raises(SystemExit):
        parse_arguments("a test", ["--conf-dir=$NOWHERE_AT_ALL", "model"])


def test_files_may_follow_overrides_and_options(folder):
    words = [
        "--set",
        "train-iters=3",
        str(folder / "model.yml"),
        "-i",
        "p.txt",
        str(folder / "seed"),
    ]
    config, options = parse_arguments("a test", words, add_options=add_own_options)
    assert (config.training.seed, config.schedule.train_iters, options.input) == (7, 3, "p.txt")


@pytest.mark.parametrize("variables", [{"RANK": "1"}, SLURM])
def test_notices_come_from_rank_0_only(folder, capsys, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    parse_arguments(
        "a test",
        ["-d", str(folder), "model", "--set", "deepspeed_slurm=true", "master_addr=node-1"],
    )
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "variables",
    [
        {},
        # The shells of sbatch, and of salloc on the first node.
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
    ],
)
def test_a_process_that_srun_has_not_started(folder, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for keys in (["deepspeed_slurm=true"], ["deepspeed_slurm=true", "launcher=slurm"]):
        words = ["-d", str(folder), "model", "--set", *keys]
        assert_rejected("deepspeed_slurm.*srun.*launcher: slurm", parse_arguments, "a test", words)
    words = ["-d", str(folder), "model", "--set", "deepspeed_mpi=true"]
    assert_rejected("deepspeed_mpi.*mpirun.*launcher: openmpi", parse_arguments, "a test", words)
    assert "RANK" not in os.environ


def test_command_line_from_deepy(folder, capsys):
    config, _ = parse_arguments("a test", ["-d", str(folder), "model", "seed"])
    capsys.readouterr()
    words = ["--local_rank=1", "--neox-config", encode(config.to_flat()), "--lengths", "8"]
    decoded, options = parse_arguments("a test", words, add_options=add_own_options)
    assert decoded.model_dump() == config.model_dump()
    assert decoded.to_flat() == config.to_flat()
    assert options.lengths == [8]
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="is a complete configuration"):
        parse_arguments("a test", [*words, "--set", "seed=3"], add_options=add_own_options)
    with pytest.raises(UserError, match="-d comes directly after the script"):
        parse_arguments("a test", [*words, "-d", "other"], add_options=add_own_options)


def test_encoded_configuration_is_safe_in_shells():
    word = encode(make_config(prompt_end="é\"' \n$`", save="a b").to_flat())
    assert set(word) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")
    assert decode_config(word).generation.prompt_end == "é\"' \n$`"


@pytest.mark.parametrize("word", ["abc", "eJwrSS0uAQAEXQHB", "é"])
def test_other_words_are_rejected(word):
    assert_rejected(r"deepy\.py", decode_config, word)


def test_no_files_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments("a test", [])
    assert caught.value.code == 2
    assert "no configuration files were given" in capsys.readouterr().err
