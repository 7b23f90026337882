"""The sweep file: its evaluations and overrides, and error messages for invalid files."""

import pytest

from megatron.sweep.definition import read_sweep
from tests.support.errors import assert_rejected
from tests.support.sweeps import write_sweep


def test_evaluations_are_command_lines(tmp_path):
    sweep = read_sweep(write_sweep(tmp_path))
    assert sweep.evaluation == (("--lengths", "32", "64", "--tokens", "128"),)
    evaluation = [
        {"lengths": [32], "by-position": True},
        {"lengths": [64], "modes": ["full"], "resolution": False},
    ]
    sweep = read_sweep(write_sweep(tmp_path, evaluation=evaluation))
    assert sweep.evaluation == (
        ("--lengths", "32", "--by-position"),
        ("--lengths", "64", "--modes", "full"),
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"axis": {}}, r"sweep\.yml:1"),
        ({"axes": {}}, "axes"),
        ({"axes": {"seed": 5}}, "seed"),
        ({"axes": {"seed": [{"seed": 1}, {"seed": 1}]}}, "seed.*1"),
        ({"axes": {"pos_emb": ["alibbi.yml"]}}, r"alibbi\.yml.*alibi\.yml"),
        ({"axes": {"data": [{"data-path": "a/b"}]}}, "'a/b'"),
        ({"axes": {"betas": [{"betas": [1, 2]}]}}, r"cannot derive a name from \[1, 2\]"),
        ({"evaluation": [1]}, "evaluation"),
        ({"evaluation": {"lengths": {"a": 1}}}, "lengths"),
        ({"output": 3}, "output"),
        ({"config_dir": "b"}, "config_dir.*config-dir"),
        (
            {"axes": {"length": [{"seq-length": 16, "seq_length": 32}]}},
            "length.*seq_length.*seq-length",
        ),
        ({"set": {"seq-length": 16, "seq_length": 32}}, "set.*seq_length.*seq-length"),
        (None, "'evaluation'"),
    ],
)
def test_errors_name_the_place(tmp_path, keys, message):
    if keys is None:
        path = tmp_path / "sweep.yml"
        path.write_text('{"output": "x", "base": [], "axes": {"a": [{"seed": 1}]}}')
    else:
        path = write_sweep(tmp_path, **keys)
    assert_rejected(message, read_sweep, path)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"seed": 1}, {"seed": 2}),
        ({"seq-length": 16}, {"seq_length": 32}),
        (
            {"optimizer.params.lr": 0.1},
            {"optimizer": {"type": "Adam", "params": {"lr": 0.2}}, "name": "adam"},
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 0.2}}, "name": "adam"},
            {"optimizer.params.lr": 0.1},
        ),
    ],
)
def test_axes_that_set_the_same_key_are_an_error(first, second, tmp_path):
    sweep = read_sweep(
        write_sweep(tmp_path, axes={"a": [first], "b": [second]}, set={"pos-emb": "alibi"})
    )
    (choices,) = sweep.combinations()
    assert_rejected("axis a .* axis b ", sweep.configuration, choices)


@pytest.mark.parametrize("name", ["😀", "1e-3", "0123", 'a "quoted" line\nand another'])
def test_strings_remain_strings(name, tmp_path):
    axes = {"name": [{"wandb-run-name": name, "name": "any"}]}
    sweep = read_sweep(write_sweep(tmp_path, axes=axes, set={"pos-emb": "alibi"}))
    (choices,) = sweep.combinations()
    assert sweep.configuration(choices).to_flat()["wandb_run_name"] == name


def test_choices_override_set_as_a_whole(tmp_path):
    keys = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "optimizer.params.lr": 0.2,
        "gradient_clipping": 2.5,
    }
    choice = {"name": "any", "optimizer": {"type": "Adam", "params": {"lr": 0.3}}}
    path = write_sweep(tmp_path, axes={"a": [choice]}, set={"pos-emb": "alibi", **keys})
    (choices,) = read_sweep(path).combinations()
    assert read_sweep(path).configuration(choices).optimizer.lr == 0.3
    path.write_text(path.read_text().replace("2.5", ".inf"))
    assert_rejected("gradient_clipping.*inf", read_sweep(path).configuration, choices)
