"""train.py: a run in this process, and errors as one line."""

import pytest

from megatron.checkpoint.directory import saved_iterations
from megatron.cli.train import main
from megatron.utils.command_line import run_main
from tests.support.checkpoints import write_yaml
from tests.support.runs import training_settings


@pytest.fixture
def config(tmp_path, data_path):
    """config(**keys): the path of a configuration file."""
    return lambda **keys: str(
        write_yaml(tmp_path / "config.yml", training_settings(tmp_path, data_path, **keys))
    )


def test_train(config, tmp_path, capsys):
    assert run_main(lambda: main([config(), "--set", "train-iters=2"])) == 0
    assert "iteration 2/2 | lm loss" in capsys.readouterr().out
    assert saved_iterations(tmp_path / "checkpoints") == [2]


def test_an_unknown_key_is_an_error_of_one_line(config, tmp_path, capsys):
    assert run_main(lambda: main([config(num_layer=3)])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "num_layer" in line
    assert "num_layers" in line or "num-layers" in line
    assert not (tmp_path / "checkpoints").exists()
