"""Short runs of the soak test. docs/reliability.md has the counts of a long one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.cases import Outcome
from tests.soak.kills import Kills
from tests.support.runs import ROOT


def soak(output, *words):
    command = [sys.executable, "-m", "tests.soak", *words, "--output", str(output)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    trials = [json.loads(line) for line in (output / "trials.jsonl").read_text().splitlines()]
    return completed, trials


@pytest.mark.slow
@pytest.mark.parametrize("part", ["configs", "files"])
def test_no_input_fails(tmp_path, part):
    completed, trials = soak(tmp_path, part, "--count", "5")
    assert completed.returncode == 0, completed.stdout
    assert [trial["index"] for trial in trials] == list(range(5))
    assert f"| **{part}** | **5** | **5** | **0** | **0** | **0** | **0** |" in completed.stdout


@pytest.mark.slow
@pytest.mark.parametrize("only", ["training, workers, validation", "ZeRO 3", "training, async save"])
def test_no_kill_loses_anything(tmp_path, only):
    completed, trials = soak(tmp_path, "kills", "--count", "4", "--only", only)
    assert completed.returncode == 0, completed.stdout
    assert sum(trial["count"] for trial in trials) == 4
    assert all(only in trial["group"] for trial in trials)


def test_kills_cover_workers_validation_and_every_zero_stage(tmp_path):
    settings = {}
    for name, (_, make) in Kills(tmp_path, "training, ").commands.items():
        folder = tmp_path / name
        folder.mkdir()
        settings[name] = json.loads(Path(make(folder).prepare()[-1]).read_text())
    chosen = [keys for keys in settings.values() if keys["num_workers"] and keys["eval_iters"]]
    assert all(keys["log_interval"] > 1 and keys["save_interval"] <= keys["eval_interval"] for keys in chosen)
    assert {keys.get("zero_optimization", {}).get("stage") for keys in chosen} == {None, 0, 1, 2, 3}


def test_outcomes():
    assert Outcome("group", memory_ratio=1.0).is_good
    for bad in ({"tracebacks": 1}, {"losses": ["a"]}, {"orphans": 1}, {"failures": ["a"]}, {"memory_ratio": 1.1}):
        assert not Outcome("group", **bad).is_good
