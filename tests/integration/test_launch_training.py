"""Training as a user starts it: `python deepy.py train.py config.yml` on two ranks."""

import os
import pty
import re
import signal
import subprocess
import sys

import psutil
import pytest

from megatron.checkpoint.directory import saved_iterations
from tests.support.checkpoints import write_yaml
from tests.support.runs import ROOT, environment, metrics, run, start, trained, training_settings


def test_sigterm_saves_a_checkpoint_and_exits(tmp_path, data_path, forked_scripts):
    """Slurm sends SIGTERM before it ends a job."""
    keys = {"save_interval": None, "eval_iters": 0}
    process = start(
        tmp_path, training_settings(tmp_path, data_path, train_iters=100_000, num_gpus=2, **keys)
    )
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
    trained(tmp_path / "one", data_path, train_iters=5, load=None, save=None, **keys)
    losses = metrics(tmp_path)
    assert {step: losses[step] for step in range(1, 6)} == pytest.approx(
        metrics(tmp_path / "one"), abs=1e-4
    )


@pytest.mark.ci
def test_a_second_run_in_the_same_folder(tmp_path, data_path, forked_scripts):
    """It stops on all ranks with one message, and the first run is not affected. After kill -9, the
    folder is free.
    """
    checkpoints = str(tmp_path / "checkpoints")
    keys = {"eval_iters": 0, "num_gpus": 2, "save": checkpoints, "load": checkpoints}
    first = start(
        tmp_path,
        training_settings(tmp_path, data_path, train_iters=100_000, save_interval=None, **keys),
    )
    for line in first.stdout:
        if "iteration 1/" in line:
            break
    ranks = psutil.Process(first.pid).children(recursive=True)
    second = training_settings(tmp_path / "second", data_path, train_iters=4, **keys)
    output = run(tmp_path / "second", second, status=2)
    holder = re.search(r"error: save: another run saves to .* \(held by process (\d+) on ", output)
    assert holder is not None, output
    assert int(holder[1]) in [rank.pid for rank in ranks]
    assert output.count("another run saves") == 1, output
    assert first.poll() is None
    for process in (first, *ranks):
        process.kill()
    psutil.wait_procs(ranks)
    first.communicate()
    assert (tmp_path / "checkpoints" / "run.lock").exists()
    run(tmp_path / "second", second)
    assert not (tmp_path / "checkpoints" / "run.lock").exists()

    # A damaged checkpoint, too, is reported by one rank.
    (tmp_path / "checkpoints" / "global_step4" / "manifest.json").unlink()
    output = run(tmp_path / "second", {**second, "train_iters": 6}, status=2)
    assert output.count("manifest.json") == 1, output


@pytest.mark.ci
def test_sigterm_to_all_processes_saves_a_checkpoint(tmp_path, data_path, forked_scripts):
    """`timeout` sends it to the process group, but the run needs its data worker for the rest of
    the iteration.
    """
    keys = {"save_interval": None, "eval_iters": 0, "num_workers": 1, "train_iters": 100_000}
    settings = training_settings(tmp_path, data_path, gradient_accumulation_steps=8, **keys)
    config = write_yaml(tmp_path / "config.yml", settings)
    process = subprocess.Popen(
        [sys.executable, "train.py", str(config)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    for line in process.stdout:
        if "iteration 5/" in line:
            os.killpg(process.pid, signal.SIGTERM)
            break
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert len(saved_iterations(tmp_path / "checkpoints")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("words", [["train.py"], ["deepy.py", "train.py"]])
def test_a_closed_terminal_saves_a_checkpoint(words, tmp_path, data_path):
    """The kernel sends SIGHUP to train.py and its data worker, or to deepy.py. Later output to the
    terminal fails.
    """
    keys = {"save_interval": None, "eval_iters": 0, "num_workers": 1, "train_iters": 100_000}
    config = write_yaml(tmp_path / "config.yml", training_settings(tmp_path, data_path, **keys))
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup of the test run ignores it
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, *words, str(config)], environment())
    output = b""
    while b"iteration 5/" not in output:
        output += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    log = (tmp_path / "logs" / "train.log").read_text()
    (iteration,) = saved_iterations(tmp_path / "checkpoints")
    assert (
        f"exiting after iteration {iteration}: received a signal to stop; checkpoint saved" in log
    )
