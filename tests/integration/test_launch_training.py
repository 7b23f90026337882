"""Training as a user starts it: `python deepy.py train.py config.yml` on two ranks."""

import signal

import pytest

from megatron.checkpoint.directory import saved_iterations
from megatron.config import Config
from megatron.training.loop import train
from tests.support.runs import metrics, start, training_settings


def test_sigterm_saves_a_checkpoint_and_exits(tmp_path, data_path):
    """Slurm sends SIGTERM before it ends a job."""
    keys = {"save_interval": None, "eval_iters": 0}
    process = start(tmp_path, training_settings(tmp_path, data_path, train_iters=100_000, num_gpus=2, **keys))
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "iteration 5/" in line:
            process.send_signal(signal.SIGTERM)
            break
    output = "".join(lines) + process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "2 ranks on cpu" in output
    assert "received a signal to stop" in output
    (iteration,) = saved_iterations(tmp_path / "checkpoints")
    assert 5 <= iteration < 100_000

    # The losses are those of one rank.
    train(Config.from_flat(training_settings(tmp_path / "one", data_path, train_iters=5, load=None, save=None, **keys)))
    losses = metrics(tmp_path)
    assert {step: losses[step] for step in range(1, 6)} == pytest.approx(metrics(tmp_path / "one"), abs=1e-4)
