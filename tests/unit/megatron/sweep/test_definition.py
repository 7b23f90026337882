"""A sweep's file: what it stands for, and what is wrong with it."""

import pytest

from megatron.config import UserError
from megatron.sweep.definition import read_sweep, run_name
from megatron.sweep.planning import plan
from tests.support.runs import ROOT
from tests.support.sweeps import write_sweep


def test_runs_are_all_combinations_in_order(tmp_path):
    axes = {
        "pos_emb": ["kerple_log.yml", {"name": "slopes", "files": ["alibi.yml"], "hidden-dropout": 0.1}],
        "length": [{"seq-length": 32, "name": "short"}, {"seq-length": 16, "name": "shorter"}],
        "seed": [{"seed": 1}, {"seed": 2}],
    }
    sweep = read_sweep(write_sweep(tmp_path, axes=axes, set={"optimizer.params.lr": 0.5, "train-iters": 3}))
    names = [run_name(choices) for choices in sweep.combinations()]
    assert len(names) == 8
    assert names[:3] == ["kerple_log/short/1", "kerple_log/short/2", "kerple_log/shorter/1"]
    run = plan(sweep)[-1]
    config = run.config
    assert run.name == "slopes/shorter/2"
    assert (config.model.pos_emb, config.model.seq_length, config.training.seed) == ("alibi", 16, 2)
    assert (config.model.hidden_dropout, config.optimizer.lr, run.steps) == (0.1, 0.5, 3)
    folder = tmp_path / "out" / "runs" / "slopes" / "shorter" / "2"
    assert config.checkpoint.save == config.checkpoint.load == str(folder / "checkpoints")
    assert config.logging.log_dir == str(folder / "logs")
    assert run.tokens_per_step == 8 * 16
    assert sweep.evaluation == ("--lengths", "32", "64", "--tokens", "128")


def test_runs_of_one_method_and_seed_are_told_apart_in_the_tables(tmp_path):
    methods = ["kerple_log.yml", "alibi.yml"]
    rates = [{"optimizer.params.lr": 0.1}, {"optimizer.params.lr": 0.2, "name": "fast"}]
    seeds = [{"seed": 1}, {"seed": 2}]
    runs = plan(read_sweep(write_sweep(tmp_path, axes={"pos_emb": methods, "lr": rates, "seed": seeds})))
    assert [run.evaluation[-2:] for run in runs[:4]] == [
        ("--label", "0.1"),
        ("--label", "0.1"),
        ("--label", "fast"),
        ("--label", "fast"),
    ]
    for axes in ({"pos_emb": methods, "seed": seeds}, {"length": [{"seq-length": 16}, {"seq-length": 32}]}):
        runs = plan(read_sweep(write_sweep(tmp_path, axes=axes, set={"pos-emb": "alibi"} if len(axes) == 1 else {})))
        assert not any("--label" in run.evaluation for run in runs)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"axis": {}}, r"sweep\.yml:1: key .axis. is not known"),
        ({"axes": {}}, "axes must name at least one axis"),
        ({"axes": {"seed": 5}}, "axis seed must be a list"),
        ({"axes": {"seed": []}}, "axis seed must be a list"),
        ({"axes": {"seed": [{"seed": 1}, {"seed": 1}]}}, "axis seed has two choices called 1"),
        ({"axes": {"pos_emb": ["alibbi.yml"]}}, r"alibbi\.yml: no such file; nearest: alibi\.yml"),
        ({"axes": {"data": [{"data-path": "a/b"}]}}, "'a/b' cannot be a folder's name"),
        ({"axes": {"betas": [{"betas": [1, 2]}]}}, "has no short name"),
        ({"axes": {"seed": [3]}}, "must be a file or a list of files, not 3"),
        ({"evaluation": [1]}, "evaluation must be a mapping"),
        ({"evaluation": {"lengths": {"a": 1}}}, "lengths must be a value or a list"),
        ({"output": 3}, "output must be text"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        read_sweep(write_sweep(tmp_path, **keys))


def test_what_is_wrong_with_a_run_is_said_of_the_run(tmp_path):
    sweep = read_sweep(write_sweep(tmp_path, axes={"heads": [{"num-attention-heads": 4}, {"num-attention-heads": 5}]}))
    with pytest.raises(UserError, match=r"sweep\.yml: run 5: .*num_attention_heads"):
        plan(sweep)
    sweep = read_sweep(write_sweep(tmp_path, set={"train-itters": 5}))
    with pytest.raises(UserError, match=r"run kerple_log/7: .*train-itters"):
        plan(sweep)


def test_missing_keys(tmp_path):
    (tmp_path / "sweep.yml").write_text('{"output": "x", "base": [], "axes": {"a": [{"seed": 1}]}}')
    with pytest.raises(UserError, match="key 'evaluation' is missing"):
        read_sweep(tmp_path / "sweep.yml")


def test_kerple_s_experiment(monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = read_sweep("configs/sweeps/kerple.yml")
    runs = plan(sweep)
    assert len(runs) == len({run.folder for run in runs}) == 8 * 3 * 5
    assert {run.config.training.seed for run in runs} == set(range(1235, 1240))
    assert len({run.config.model.pos_emb for run in runs}) == 8
    assert len({run.config.data.data_path for run in runs}) == 3
    assert {run.steps for run in runs} == {50_000}
    assert {run.tokens_per_step for run in runs} == {32 * 512}
    words = " ".join(sweep.evaluation)
    assert "--lengths 512 1024 2048 4096 8192 16384" in words
    assert "--modes full window@512" in words
    assert words.endswith("--by-position"), "Figures 5 and 7"


def test_the_small_experiment(monkeypatch):
    monkeypatch.chdir(ROOT)
    runs = plan(read_sweep("configs/sweeps/python_stdlib.yml"))
    assert len(runs) == 6
    assert {run.config.data.data_path for run in runs} == {"data/python_stdlib/python_stdlib_text_document"}
