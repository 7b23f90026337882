"""The command line of a script: files, overrides, own options, and the form that deepy.py hands over."""

import os
from pathlib import Path

import pytest

from megatron.config import Config, UserError
from megatron.config.arguments import parse, run_main
from megatron.config.command_line import decode, encode, take_overrides
from megatron.launcher.ranks import adopt_ranks


@pytest.fixture
def folder(write, monkeypatch) -> Path:
    path = write(
        "configs/model.yml",
        '{"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 16, "pos-emb": "none",'
        ' "rope-fusion": true}',
    )
    write("configs/seed.yml", '{"seed": 7}')
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return path.parent


def own_options(parser):
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("-i", "--input")


def test_files_overrides_and_own_options(folder, capsys):
    words = ["-d", str(folder), "model", "seed.yml", "--set", "train-iters=3", "--lengths", "8", "16", "-i", "p.txt"]
    config, options = parse("a test", [*words, "--set", "save=x", "load=y"], extra=own_options)
    assert (config.training.seed, config.schedule.train_iters) == (7, 3)
    assert (config.checkpoint.save, config.checkpoint.load) == ("x", "y")
    assert (options.lengths, options.input) == ([8, 16], "p.txt")
    assert capsys.readouterr().out.count('"rope-fusion" has no effect here') == 1


def test_files_may_follow_overrides_and_options(folder):
    words = ["--set", "train-iters=3", str(folder / "model.yml"), "-i", "p.txt", str(folder / "seed")]
    config, options = parse("a test", words, extra=own_options)
    assert (config.training.seed, config.schedule.train_iters, options.input) == (7, 3, "p.txt")


def test_notices_come_from_rank_0_only(folder, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    parse("a test", ["-d", str(folder), "model"])
    assert capsys.readouterr().out == ""


def test_the_form_that_deepy_hands_over(folder, capsys):
    config, _ = parse("a test", ["-d", str(folder), "model", "seed"])
    capsys.readouterr()
    words = ["--local_rank=1", "--neox-config", encode(config), "--lengths", "8"]
    again, options = parse("a test", words, extra=own_options)
    assert again.model_dump() == config.model_dump()
    assert again.to_flat() == config.to_flat()
    assert options.lengths == [8]
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="holds the whole configuration"):
        parse("a test", [*words, "--set", "seed=3"], extra=own_options)


def test_the_word_is_safe_for_shells(flat):
    word = encode(Config.from_flat({**flat, "prompt_end": "é\"' \n$`", "save": "a b"}))
    assert set(word) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")
    assert decode(word).generation.prompt_end == "é\"' \n$`"


@pytest.mark.parametrize("word", ["", "abc", "!!!!", "eJwrSS0uAQAEXQHB", "é"])
def test_other_words_are_refused(word):
    with pytest.raises(UserError, match=r"is not what deepy\.py makes"):
        decode(word)


def test_no_files_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("a test", [])
    assert caught.value.code == 2
    assert "no configuration files were given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set"], "is the last word"),
        (["--set", "-d", "x"], "followed by '-d'"),
        (["--set", "a.yml"], "followed by 'a.yml'"),
    ],
)
def test_set_needs_pairs(words, message):
    with pytest.raises(UserError, match=message):
        take_overrides(words)


def test_take_overrides():
    words = ["a", "--set", "x=1", "y=2", "b", "--lengths", "3", "--set", "z=-1", "--more"]
    assert take_overrides(words) == (["x=1", "y=2", "z=-1"], ["a", "b", "--lengths", "3", "--more"])


def test_user_errors_are_one_line_and_status_2(capsys):
    def fail():
        raise UserError("what is wrong")

    assert run_main(fail) == 2
    assert capsys.readouterr().err == "error: what is wrong\n"
    assert run_main(lambda: None) == 0
    assert run_main(lambda: 3) == 3


SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("keys", "variables"),
    [
        ({"launcher": "slurm"}, SLURM),
        ({"deepspeed_slurm": True}, SLURM),
        ({"launcher": "OpenMPI"}, OPEN_MPI),
        ({"deepspeed_mpi": True}, OPEN_MPI),
    ],
)
def test_ranks_of_slurm_and_mpi(flat, keys, variables):
    config = Config.from_flat({**flat, **keys, "master_addr": "node-1"})
    environment = dict(variables)
    adopt_ranks(config, environment)
    wanted = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}
    assert environment == {**variables, **wanted}


def test_ranks_are_left_alone(flat):
    environment = dict(SLURM)
    adopt_ranks(Config.from_flat(flat), environment)
    assert environment == SLURM
    environment = {**SLURM, "RANK": "0"}
    adopt_ranks(Config.from_flat({**flat, "launcher": "slurm"}), environment)
    assert environment == {**SLURM, "RANK": "0"}


def test_several_processes_need_an_address(flat):
    config = Config.from_flat({**flat, "launcher": "slurm"})
    with pytest.raises(UserError, match="8 processes, but no address to meet at; set master_addr"):
        adopt_ranks(config, dict(SLURM))
    environment = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    adopt_ranks(config, environment)
    assert environment["MASTER_ADDR"] == "127.0.0.1"


def test_slurm_ranks_come_with_the_configuration(folder, monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    parse("a test", ["-d", str(folder), "model", "--set", "launcher=slurm", "master_addr=n1", "master_port=1234"])
    assert (os.environ["RANK"], os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("5", "n1", "1234")
