"""Sweeps with real processes: a small one from start to end, and what happens when a sweep is
killed.
"""

import os
import random
import re
import subprocess
import sys
import time

import pytest

from megatron.checkpoint.directory import find_step
from megatron.checkpoint.manifest import find_damage
from megatron.evaluation.records import read_results
from megatron.sweep.runner import CLAIM, RUN_VARIABLE, find_processes, last_lines, start_process
from tests.support.processes import wait_for
from tests.support.runs import ROOT
from tests.support.sweeps import kill_all, logged_iterations, run_sweep, start_sweep, write_sweep


@pytest.mark.ci
def test_a_small_sweep_from_start_to_end(tmp_path, forked_scripts):
    """Six iterations, trained, evaluated and reported through the real entry points."""
    path = write_sweep(tmp_path, axes={"pos_emb": ["kerple_log.yml"], "seed": [{"seed": 7}]})
    first = start_sweep(path)
    claim = tmp_path / "out" / "runs" / "kerple_log" / "7" / CLAIM
    wait_for(claim.exists)
    assert (
        f"kerple_log/7: another sweep process is working on it (held by process {first.pid} on"
        in run_sweep(path)
    )
    output, _ = first.communicate(timeout=900)
    assert first.returncode == 0, output
    assert "[1/1] kerple_log/7: finished" in output
    assert not claim.exists()
    assert logged_iterations(tmp_path / "out" / "runs" / "kerple_log" / "7") == [1, 2, 3, 4, 5, 6]
    tables = tmp_path / "out" / "report" / "tables"
    rows = (tables / "kerple-3-2x32-32-non-overlapping.md").read_text()
    assert "| Length | KERPLE (log) |\n" in rows
    perplexities = re.findall(r"^\| (\d+) \| \**([\d.]+)\** \|$", rows, re.MULTILINE)
    assert [length for length, _ in perplexities] == ["32", "64"]
    assert all(1 < float(value) < 1000 for _, value in perplexities)
    assert any(path.name.startswith("kerple-4") for path in tables.iterdir())
    assert (
        tmp_path / "out" / "report" / "figures" / "kernels-text-2x32-32-kerple_log-bias.png"
    ).is_file()


def test_processes_of_a_run(tmp_path):
    """They are found by the folder of the run, and their output is in its log."""
    folder, log = tmp_path / "run", tmp_path / "log"
    folder.mkdir()
    script = "import sys; print(1, end='\\r'); print(2, flush=True); sys.stdin.read()"
    process = start_process([sys.executable, "-c", script], folder, os.environ, log)
    assert process.wait() == 0
    assert last_lines(log) == ["2"]
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        env={**os.environ, RUN_VARIABLE: str(folder)},
        stdin=subprocess.PIPE,
    )
    assert find_processes(folder) == [sleeper.pid]
    sleeper.communicate(b"\n")
    assert find_processes(folder) == []


@pytest.mark.ci
def test_the_processes_of_a_run_receive_sigterm_when_the_sweep_dies(tmp_path):
    """A parent starts a child as the runner does, and is killed."""
    log = tmp_path / "log"
    child = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: "
        "sys.exit(print('SIGTERM', flush=True))); print('started', flush=True); time.sleep(60)"
    )
    parent = (
        "import pathlib, os, sys, time; from megatron.sweep.runner import start_process; "
        f"start_process([sys.executable, '-c', {child!r}], pathlib.Path({str(tmp_path)!r}), "
        f"os.environ, pathlib.Path({str(log)!r})); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT)
    wait_for(lambda: log.is_file() and log.read_text() == "started\n")
    process.kill()
    process.wait()
    wait_for(lambda: log.read_text() == "started\nSIGTERM\n")
    wait_for(lambda: not find_processes(tmp_path))


@pytest.mark.slow
def test_four_sweep_processes_that_are_killed_at_random(tmp_path, forked_scripts):
    """Together they end with the same weights and results as one process that nobody kills."""
    generator = random.Random(5)
    axes = {
        "pos_emb": ["kerple_log.yml", "alibi.yml"],
        "seed": [{"seed": seed} for seed in (1, 2, 3)],
    }
    path = write_sweep(tmp_path, axes=axes)
    processes, kills = (
        {start_sweep(path): time.monotonic() + generator.uniform(0.5, 4) for _ in range(4)},
        0,
    )
    deadline = time.monotonic() + 1500
    while processes:
        assert time.monotonic() < deadline
        for process, kill_at in list(processes.items()):
            if process.poll() is not None:
                assert process.returncode == 0, process.communicate()[0]
                del processes[process]
            elif time.monotonic() > kill_at and kills < 12:
                kill_all(process)
                kills += 1
                del processes[process]
                processes[start_sweep(path)] = time.monotonic() + generator.uniform(0.5, 4)
        time.sleep(0.1)
    assert kills >= 4
    run_sweep(path)  # runs that were claimed by a process that was killed last
    shared = tmp_path / "out"
    shared.rename(tmp_path / "shared")
    run_sweep(path)
    for name in (f"{method}/{seed}" for method in ("kerple_log", "alibi") for seed in (1, 2, 3)):
        run, expected = tmp_path / "shared" / "runs" / name, shared / "runs" / name
        assert find_damage(find_step(run / "checkpoints", 6)) is None
        layers = sorted(expected.glob("checkpoints/global_step6/layer_*"))
        assert layers
        assert all(
            (run / layer.relative_to(expected)).read_bytes() == layer.read_bytes()
            for layer in layers
        )
        # The text is the same, but in another folder.
        losses = [
            [(record["length"], record["loss"]) for record in read_results(folder / "evaluation")]
            for folder in (run, expected)
        ]
        assert losses[0] == losses[1]
    assert not list((tmp_path / "shared").rglob("*.unfinished"))
