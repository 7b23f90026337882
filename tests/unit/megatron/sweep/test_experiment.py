"""The small experiment of configs/sweeps on the embedded corpus: killed half-way, resumed, reported."""

import json
import time

import pytest
import yaml

from megatron.checkpoint.directory import find_damage, find_step
from megatron.data.prepare import PrepareOptions, prepare
from tests.support.runs import ROOT
from tests.support.sweeps import iterations_logged, kill_all, run_sweep, start_sweep

STEPS, SAVED_EVERY = 60, 20


@pytest.mark.slow
def test_killed_half_way_and_resumed(tmp_path):
    prepare(PrepareOptions(dataset="python_stdlib", directory=tmp_path, workers=1))
    sweep = yaml.safe_load((ROOT / "configs" / "sweeps" / "python_stdlib.yml").read_text())
    sweep["output"] = str(tmp_path / "out")
    sweep["set"] = {
        "train-iters": STEPS,
        "lr-decay-iters": STEPS,
        "save-interval": SAVED_EVERY,
        "log-interval": 5,
        "eval-interval": STEPS,
        "data-path": str(tmp_path / "python_stdlib" / "python_stdlib_text_document"),
        "vocab-file": str(tmp_path / "python_stdlib" / "tokenizer.json"),
    }
    sweep["evaluation"]["tokens"] = 8192
    path = tmp_path / "sweep.yml"
    path.write_text(json.dumps(sweep))
    runs = tmp_path / "out" / "runs"
    names = [f"{method}/{seed}" for method in ("kerple_log", "alibi", "rotary") for seed in (1235, 1236)]
    first, half, last = names[0], names[2], names[5]

    # Half of the runs later, in the middle of a training that has saved once.
    process = start_sweep(path)
    end = time.monotonic() + 1500
    while not (runs / half / "checkpoints" / "latest").is_file():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)
    kill_all(process)
    finished = {p: p.read_bytes() for p in (runs / first).rglob("*") if p.is_file()}
    assert not (runs / last).exists()
    assert STEPS not in iterations_logged(runs / half)

    output = run_sweep(path, timeout=1500)
    assert "6 runs, 2 of them finished before" in output
    assert {p: p.read_bytes() for p in (runs / first).rglob("*") if p.is_file()} == finished
    for name in names:
        assert find_damage(find_step(runs / name / "checkpoints", STEPS)) is None
    logged = iterations_logged(runs / half)
    assert logged[-1] == STEPS
    assert logged.count(SAVED_EVERY) == 1, "it began anew"

    table = (tmp_path / "out" / "report" / "tables" / "kerple-3-4x128-128-non-overlapping.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith(("| 128 ", "| 256 ", "| 512 ", "| 1024 "))]
    assert len(rows) == 4
    assert all(row.count("±") == 6 for row in rows), "3 methods in 2 modes, over 2 seeds"
    assert "6 of them finished before" in run_sweep(path)
