"""Nothing keeps running after kill -9 of deepy.py, train.py or a sweep.

test_multi_host.py (slow) covers other hosts, test_preprocessing.py the workers of preprocessing.
"""

import subprocess
import sys

import psutil
import pytest

from megatron.checkpoint.directory import saved_iterations
from tests.integration.test_launch import start_deepy
from tests.support.checkpoints import write_yaml
from tests.support.processes import wait_for
from tests.support.runs import ROOT, environment, training_settings
from tests.support.sweeps import start_sweep, write_sweep

# A rank of the script below saves on SIGTERM, or never reacts to it and has a process of its own.
SCRIPT = f"""
import os, signal, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from megatron.launcher import rank
from megatron.launcher.script_arguments import parse_arguments
open("started" + os.environ["RANK"], "w").close()
time.sleep({{delay}})
rank._SECONDS_TO_SAVE = 2
parse_arguments("a script")
def save(*_):
    open("saved" + os.environ["RANK"], "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, {{handler}})
subprocess.Popen(["sleep", "60"]) if {{handler}} != save else None
open("ready" + os.environ["RANK"], "w").close()
while True:
    time.sleep(0.1)
"""


def kill_and_wait(process: subprocess.Popen, seconds: float = 20) -> None:
    """kill -9 a process, and wait until all its descendants have ended."""
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert descendants
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(descendants, timeout=seconds)
    for each in alive:
        each.kill()
    assert not alive


@pytest.mark.parametrize(
    ("delay", "handler", "sign", "saved"),
    [
        (0, "save", "ready", True),
        # As in a collective that never returns.
        pytest.param(0, "signal.SIG_IGN", "ready", False, marks=pytest.mark.ci),
        # While the ranks import modules.
        pytest.param(4, "save", "started", False, marks=pytest.mark.ci),
    ],
    ids=["saves", "hangs", "starts"],
)
def test_deepy(delay, handler, sign, saved, tmp_path, forked_scripts):
    (tmp_path / "script.py").write_text(SCRIPT.format(delay=delay, handler=handler))
    process = start_deepy(tmp_path, "script.py", "model", "--set", "num_gpus=2")
    wait_for(lambda: len(list(tmp_path.glob(f"{sign}?"))) == 2)
    kill_and_wait(process)
    assert [(tmp_path / f"saved{rank}").exists() for rank in (0, 1)] == [saved] * 2


def test_data_workers(tmp_path, data_path, forked_scripts):
    """train.py without deepy.py, and its two data workers."""
    keys = {"train_iters": 100_000, "num_workers": 2, "eval_iters": 0, "save_interval": None}
    write_yaml(tmp_path / "config.yml", training_settings(tmp_path, data_path, **keys))
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "config.yml"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: len(psutil.Process(process.pid).children()) >= 2)
    kill_and_wait(process, seconds=4)  # PyTorch's own check is made every five seconds


@pytest.mark.ci
def test_sweep(tmp_path, forked_scripts):
    """`kerple sweep`, its `kerple train`, and the rank, which saves."""
    path = write_sweep(
        tmp_path, axes={"pos_emb": ["kerple_log.yml"]}, set={"train-iters": 100_000, "seed": 7}
    )
    process = start_sweep(path)
    run = tmp_path / "out" / "runs" / "kerple_log"
    log = run / "logs" / "metrics.jsonl"
    wait_for(lambda: log.is_file() and log.stat().st_size)
    kill_and_wait(process)
    assert saved_iterations(run / "checkpoints")
