"""Planning, resuming, failures and refusals, with stand-ins for the trainings; and one small sweep for real."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron.cli import sweep as command
from megatron.config import UserError
from megatron.sweep.processes import MARK, last_lines, left_over, start
from tests.support.runs import ROOT
from tests.support.sweeps import iterations_logged, pid_exists, run_sweep, write_sweep
from tests.unit.megatron.sweep.conftest import logged, outputs

SEEDS = {"pos_emb": ["kerple_log.yml", "alibi.yml"], "seed": [{"seed": 7}, {"seed": 13}]}


def test_everything_is_done_once(sweep):
    sweep.reports = True
    output = sweep()
    assert "2 runs, 0 of them finished before" in output
    assert "[2/2] alibi/7: finished" in output
    assert (sweep.report / "report.html").is_file()
    table = (sweep.report / "tables" / "kerple-3-32-non-overlapping.csv").read_text()
    assert table.splitlines()[1] == "text,32,no,2.770,2.770"
    before = {path: path.read_bytes() for path in sweep.runs.rglob("*") if path.is_file()}
    assert "2 of them finished before" in sweep()
    assert {path: path.read_bytes() for path in sweep.runs.rglob("*") if path.is_file()} == before


def test_a_failed_run_is_reported_and_the_rest_goes_on(sweep):
    output = sweep(axes=SEEDS, status=1)
    assert output.count("FAILED at training (exit status 3)") == 2
    assert "    the loss is not finite" in output
    assert f"failed: alibi/13 at training: {sweep.runs / 'alibi' / '13' / 'output.log'}" in output
    assert "[2/4, 2 failed] alibi/13" in output
    assert "report of 2 of 4 runs" in output
    assert [len(list((sweep.runs / name / "evaluation").glob("*.jsonl"))) for name in ("kerple_log/7", "alibi/7")] == [
        1,
        1,
    ]
    # They are tried again, the others are not.
    again = sweep(axes=SEEDS, status=1)
    assert "4 runs, 2 of them finished before" in again
    assert len(outputs(sweep.runs / "alibi" / "7")) == 2


def test_a_failed_evaluation_is_not_a_finished_run(sweep):
    axes = {"seed": [{"seed": 19, "pos-emb": "alibi", "name": "19"}]}
    assert "FAILED at evaluating (exit status 1)" in sweep(axes=axes, status=1)
    assert "19 at evaluating" in sweep(axes=axes, status=1)
    assert outputs(sweep.runs / "19").count("training from 0, GPU None") == 1, "trained once"
    assert "report of" not in sweep(axes=axes, status=1)


def test_a_run_goes_on_from_its_last_checkpoint(sweep):
    axes = {"seed": [{"seed": 17, "pos-emb": "alibi", "name": "17"}]}
    sweep(axes=axes, status=1)
    folder = sweep.runs / "17"
    plan = sweep("--dry-run", axes=axes)
    assert "to resume from 3" in plan
    assert "3 │         768" in plan, "3 steps of 8 x 32 tokens"
    assert "at 512 tokens/s each" in plan, "the rate that the run has logged"
    sweep(axes=axes)
    assert logged(folder) == [1, 2, 3, 4, 5, 6]
    assert any(line.startswith("training from 3") for line in outputs(folder))


def test_a_damaged_or_missing_last_checkpoint_is_no_finished_run(sweep):
    sweep()
    step = sweep.runs / "alibi" / "7" / "checkpoints" / "global_step6"
    record = {"size": 3, "crc32": "00000000"}
    manifest = {"format": 1, "iteration": 6, "checksum": "crc32", "files": {"gone.pt": record}}
    (step / "manifest.json").write_text(json.dumps(manifest))
    plan = sweep("--dry-run")
    assert plan.count("finished") == 1
    assert "to resume from 6" in plan


def test_other_evaluation_settings_evaluate_again_and_train_no_more(sweep):
    sweep()
    keys = {"evaluation": {"lengths": [32, 64], "tokens": 256}}
    assert sweep("--dry-run", **keys).count("to evaluate") == 2
    sweep(**keys)
    lines = outputs(sweep.runs / "alibi" / "7")
    assert [line.split()[0] for line in lines] == ["training", "evaluating", "evaluating"]
    assert lines[-1].endswith("--tokens 256")


def test_the_dry_run_does_nothing(sweep):
    output = sweep("--dry-run", "--rate", "256")
    assert "2 runs in" in output
    assert "about 12s of training at 256 tokens/s each" in output, "2 runs of 6 steps of 256 tokens"
    assert not (sweep.folder / "out").exists()
    (sweep.folder / "text_document.idx").unlink()
    assert "text_document.idx (prepare_data.py makes it)" in sweep("--dry-run", write=False)


def test_a_changed_configuration_is_refused_by_name(sweep):
    sweep()
    with pytest.raises(UserError, match=r"kerple_log/7: the run there has another .*train_iters: 6 there, 8 here"):
        sweep(set={"train-iters": 8})
    # Before anything is done, also for runs that are only now in the file.
    axes = {"pos_emb": ["alibi.yml"], "seed": [{"seed": 8}, {"seed": 7, "hidden-dropout": 0.1, "name": "7"}]}
    with pytest.raises(UserError, match=r"alibi/7: .*hidden_dropout: not set there, 0.1 here"):
        sweep(axes=axes)
    assert not (sweep.runs / "alibi" / "8").exists()
    (sweep.runs / "alibi" / "7" / "config.yml").unlink()
    with pytest.raises(UserError, match=r"alibi/7: holds checkpoints but no config\.yml"):
        sweep()


def test_refusals_before_anything_is_started(sweep, monkeypatch):
    with pytest.raises(UserError, match=r"evaluate\.py has no option depths"):
        sweep(evaluation={"lengths": [32], "depths": 3})
    with pytest.raises(UserError, match="inference mode 'windowed' is not known"):
        sweep(evaluation={"lengths": [32], "modes": "windowed"})
    with pytest.raises(UserError, match=r"there is no such GPU; visible: none"):
        sweep("--devices", "0")
    with pytest.raises(UserError, match="--jobs must be at least 1"):
        sweep("--jobs", "0")
    with pytest.raises(UserError, match=r"there is no nowhere\.idx"):
        sweep(set={"data-path": "nowhere"})
    monkeypatch.setattr(command, "_visible_gpus", lambda: ["0", "1"])
    with pytest.raises(UserError, match=r"run kerple_log/7 takes 4 GPUs .*there are 2"):
        sweep(set={"num-gpus": 4, "train-batch-size": 8, "train_micro_batch_size_per_gpu": 2})
    with pytest.raises(UserError, match="--jobs is for the CPU"):
        sweep("--jobs", "2")
    assert not sweep.runs.exists()


def test_a_pool_of_gpus_gives_each_run_its_own(sweep, monkeypatch):
    monkeypatch.setattr(command, "_visible_gpus", lambda: ["0", "2", "5"])
    axes = {"pos_emb": ["alibi.yml"], "seed": [{"seed": seed} for seed in range(4)]}
    sweep("--devices", "2", "5", axes=axes)
    used = [outputs(sweep.runs / "alibi" / str(seed))[0].rpartition(" ")[2] for seed in range(4)]
    assert set(used) == {"2", "5"}
    assert used[:2] == ["2", "5"]


def test_two_sweeps_in_one_folder(sweep):
    (sweep.folder / "out").mkdir()
    with open(sweep.folder / "out" / ".lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another sweep is at work there"):
            sweep()


def test_processes_of_a_killed_sweep_are_found_and_waited_for(sweep):
    sweep()
    folder = sweep.runs / "alibi" / "7"
    (folder / "evaluation" / "evaluated.json").unlink()
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1.5)"], env={**os.environ, MARK: str(folder)}
    )
    assert left_over(folder) == [sleeper.pid]
    begun = time.monotonic()
    output = sweep()
    assert f"still work on it ({sleeper.pid})" in output
    assert time.monotonic() - begun > 1.0
    assert sleeper.wait() == 0
    assert left_over(folder) == []


def test_a_run_s_processes_are_asked_to_end_when_the_sweep_dies(tmp_path):
    """The parent starts a child as the runner does, and is killed."""
    child = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('asked', flush=True))); "
    child += "print('up', flush=True); time.sleep(60)"
    parent = (
        "import pathlib, os, sys, time; from megatron.sweep.processes import start; "
        f"p = start([sys.executable, '-c', {child!r}], pathlib.Path({str(tmp_path)!r}), os.environ, "
        f"pathlib.Path({str(tmp_path / 'log')!r})); print(p.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    number = int(process.stdout.readline())
    log = tmp_path / "log"
    wait_for(lambda: log.read_text() == "up\n")
    process.kill()
    process.communicate()
    wait_for(lambda: log.read_text() == "up\nasked\n")
    wait_for(lambda: not pid_exists(number))


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_signal_stops_the_sweep_and_its_runs(sweep, tmp_path):
    script = tmp_path / "stand-ins" / "deepy.py"
    script.write_text("import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)")
    assert "the same command goes on from here" in sweep(status=128 + signal.SIGTERM)
    assert not (sweep.runs / "alibi").exists(), "nothing new is started"


def test_output_of_a_run(tmp_path):
    process = start([sys.executable, "-c", "print(1, end='\\r'); print(2)"], tmp_path, os.environ, tmp_path / "log")
    assert process.wait() == 0
    assert last_lines(tmp_path / "log") == ["2"]
    assert last_lines(tmp_path / "none") == []


def test_a_small_sweep_for_real(tmp_path):
    """Six steps, trained, evaluated and reported through the real entry points."""
    path = write_sweep(tmp_path, axes={"pos_emb": ["kerple_log.yml"], "seed": [{"seed": 7}]})
    output = run_sweep(path)
    assert "[1/1] kerple_log/7: finished" in output
    assert iterations_logged(tmp_path / "out" / "runs" / "kerple_log" / "7") == [1, 2, 3, 4, 5, 6]
    tables = tmp_path / "out" / "report" / "tables"
    rows = (tables / "kerple-3-2x32-32-non-overlapping.csv").read_text().splitlines()
    assert rows[0] == "section,Extrp.,published,KERPLE (log)"
    assert [row.split(",")[1] for row in rows[1:]] == ["32", "64"]
    assert all(1 < float(value) < 1000 for row in rows[1:] for value in row.split(",")[3:])
    assert any(path.name.startswith("kerple-4") for path in tables.iterdir())
    assert (tmp_path / "out" / "report" / "figures" / "kernels-text-2x32-32-kerple_log-bias.png").is_file()
