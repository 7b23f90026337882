"""tools/watch.py, called in-process."""

import csv
import json
import math
import os

import pytest
from rich.console import Console

from megatron.cli import watch
from megatron.cli.watch import main
from megatron.config import Config
from megatron.training.loop import train
from megatron.utils.errors import UserError
from tests.support.checkpoints import write_corpus
from tests.support.runs import metrics, training_settings


def line(iteration, last=100, **values):
    return json.dumps({"iteration": iteration, "last_iteration": last, **values}) + "\n"


def training(iteration, loss, tokens_per_second=1000.0):
    values = {"train/loss": loss, "train/tokens": 500.0 * iteration, "train/tokens_per_second": tokens_per_second}
    kernel = {"kernel/bias_p/min": loss, "kernel/bias_p/mean": loss + 1, "kernel/bias_p/max": loss + 2}
    return line(iteration, **values, **kernel)


@pytest.fixture
def run(tmp_path):
    """Writes metrics.jsonl as logs of a run, and returns the run's folder."""

    def write(*lines):
        (tmp_path / "logs").mkdir(exist_ok=True)
        path = tmp_path / "logs" / "metrics.jsonl"
        path.write_text("".join(lines))
        os.utime(path, (1000.0, 1000.0))
        return tmp_path

    return write


def test_a_finished_run(tmp_path, capsys):
    """What training wrote, as text and as CSV."""
    train(Config.from_flat(training_settings(tmp_path, write_corpus(tmp_path, documents=80))))
    capsys.readouterr()
    main([str(tmp_path)])
    text = capsys.readouterr().out
    assert "iteration 6 of 6 (100%), finished, written" in text
    assert f"{metrics(tmp_path)[6]:.4f}" in text
    assert f"{metrics(tmp_path, 'validation/loss')[3]:.4f}" in text
    assert f"{metrics(tmp_path, 'kernel/bias_a/max')[6]:.4f}" in text
    main([str(tmp_path / "logs"), "--csv", str(tmp_path / "out.csv")])
    with open(tmp_path / "out.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert {int(row["iteration"]): float(row["train/loss"]) for row in rows} == metrics(tmp_path)
    losses = {int(row["iteration"]): float(row["validation/loss"]) for row in rows if row["validation/loss"]}
    assert losses == metrics(tmp_path, "validation/loss")


def test_a_running_run(run, capsys, monkeypatch):
    """500 tokens per iteration at 250 tokens/s, 60 iterations to go. The last line is being written."""
    monkeypatch.setattr(watch.time, "time", lambda: 1042.0)
    main([str(run(training(20, 3.0), training(40, 2.0, 250.0), line(40, **{"validation/loss": 2.5}), '{"iterat'))])
    text = capsys.readouterr().out
    assert "iteration 40 of 100 (40%), 2m00s left, written 42s ago" in text
    assert [words.split() for words in text.splitlines() if words.startswith(" 40")] == [
        ["40", "2.0000", "2.5000", "250"]
    ]
    assert ["bias_p", "4.0000", "3.0000", "2.0000", "4.0000"] in [words.split() for words in text.splitlines()]


def test_repeated_steps_of_a_resumed_run_replace_the_earlier_ones(run, capsys):
    folder = run(training(10, 9.0), training(20, 8.0), training(30, 7.0), training(20, 6.0))
    main([str(folder), "--csv", "-"])
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [(row["iteration"], row["train/loss"]) for row in rows] == [("10", "9.0"), ("20", "6.0")]


def test_a_terminal_is_updated_until_the_run_has_finished(run, monkeypatch):
    console = Console(force_terminal=True, width=80, record=True)
    monkeypatch.setattr(watch, "standard_output", lambda: console)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        run(training(50, 3.0), *([training(100, 2.0)] if len(waits) == 2 else []))

    monkeypatch.setattr(watch.time, "sleep", sleep)
    main([str(run()), "--interval", "7"])
    assert waits == [7.0, 7.0]
    text = console.export_text()
    assert text.index("no metrics yet") < text.index("iteration 50 of 100") < text.index("iteration 100 of 100")
    main([str(run(training(50, 3.0))), "--once"])
    assert len(waits) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "must be a mapping"),
        ('{"train/loss": 1.0}', "iteration is missing or not an integer"),
        ('{"iteration": 2, "train/loss": "low"}', "train/loss"),
    ],
)
def test_files_that_are_not_metrics(run, content, message):
    with pytest.raises(UserError, match=rf"metrics.jsonl, line 2: .*{message}"):
        main([str(run(training(1, 3.0), content + "\n"))])


def test_values_that_cannot_be_shown(run, capsys):
    """A line that a killed run left incomplete, a loss of nan, and no speed."""
    values = {"train/loss": math.nan, "train/tokens": 1.0, "train/tokens_per_second": math.nan, "kernel/a/mean": None}
    main([str(run('{"iteration": 1, "tr{"iteration": 2}\n', line(3, **values)))])
    text = capsys.readouterr().out
    assert "iteration 3 of 100 (3%), written" in text
    assert ["3", "nan", "nan"] in [words.split() for words in text.splitlines()]


def test_a_folder_without_metrics(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl.*logs/metrics\.jsonl.*log-dir"):
        main([str(tmp_path)])
