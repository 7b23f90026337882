"""Training that is killed with SIGKILL at random moments and saves at every iteration loses nothing."""

import json
import subprocess
import sys

import pytest

from megatron.config import Config
from megatron.training.loop import train
from tests.support.runs import ROOT, environment, metrics, training_settings


@pytest.mark.parametrize(
    ("kills", "iterations", "async_save"),
    [(6, 110, False), (6, 110, True), pytest.param(50, 700, False, marks=pytest.mark.slow)],
    ids=["sync", "async", "fifty"],
)
def test_a_killed_run_resumes_exactly(kills, iterations, async_save, tmp_path, data_path):
    keys = {"train_iters": iterations, "lr_decay_iters": iterations, "eval_iters": 0, "hidden_dropout": 0.1}
    killed = tmp_path / "killed"
    killed.mkdir()
    settings = training_settings(
        killed, data_path, **keys, save_interval=1, keep_last_n_checkpoints=2, async_save=async_save
    )
    (killed / "config.json").write_text(json.dumps(settings))
    completed = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/kills.py"), str(killed), str(kills), "17"],
        cwd=ROOT,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert json.loads(completed.stdout.splitlines()[-1])["during_save"] >= kills // 4

    train(Config.from_flat(training_settings(tmp_path / "uninterrupted", data_path, **keys, save=None, load=None)))
    # Every logged loss is compared, including those of iterations that were repeated.
    expected = metrics(tmp_path / "uninterrupted")
    lines = (killed / "logs" / "metrics.jsonl").read_text().splitlines()
    losses = [
        (values["iteration"], values["train/loss"]) for values in map(json.loads, lines) if "train/loss" in values
    ]
    assert {iteration for iteration, _ in losses} == set(range(1, iterations + 1))
    assert all(loss == expected[iteration] for iteration, loss in losses)
    assert list((killed / "checkpoints").glob("*unfinished*")) == []
