"""kill -9 at random moments of training with a save at every step: resumed each time, nothing is lost, and every loss
is that of the run that was not killed.
"""

import json
import subprocess
import sys

import pytest

from megatron.config import Config
from megatron.training.loop import train
from tests.support.runs import ROOT, environment, metrics, training_settings

STEPS = {8: 150, 50: 700}


@pytest.mark.parametrize(
    ("kills", "asynchronous"),
    [(8, False), (8, True), pytest.param(50, False, marks=pytest.mark.slow)],
    ids=["sync", "async", "fifty"],
)
def test_killed_runs_end_as_the_unbroken_one(kills, asynchronous, tmp_path, data_path):
    common = {"train_iters": STEPS[kills], "lr_decay_iters": STEPS[kills], "eval_iters": 0, "hidden_dropout": 0.1}
    killed = training_settings(
        tmp_path / "killed", data_path, **common, save_interval=1, keep_last_n_checkpoints=2, async_save=asynchronous
    )
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "config.json").write_text(json.dumps(killed))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/kills.py"), str(tmp_path / "killed"), str(kills), "17"],
        cwd=ROOT,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["caught"] >= kills // 4

    train(Config.from_flat(training_settings(tmp_path / "whole", data_path, **common, save=None, load=None)))
    # Every line of every run, also of those steps that were done again.
    expected = metrics(tmp_path / "whole")
    lines = (tmp_path / "killed" / "logs" / "metrics.jsonl").read_text().splitlines()
    seen = [(line["iteration"], line["train/loss"]) for line in map(json.loads, lines) if "train/loss" in line]
    assert {iteration for iteration, _ in seen} == set(range(1, STEPS[kills] + 1))
    assert all(loss == expected[iteration] for iteration, loss in seen)
    assert sorted(path.name for path in (tmp_path / "killed" / "checkpoints").glob("*unfinished*")) == []
