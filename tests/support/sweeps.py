"""Small sweeps on the small corpus, as files that tools/sweep.py reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.checkpoints import write_corpus, write_yaml
from tests.support.runs import ROOT, environment, training_settings

# What a sweep or its axes set themselves.
LEFT_OUT = ("save", "load", "log_dir", "seed", "pos_emb")


def write_sweep(folder: Path, **keys: object) -> Path:
    """A sweep of two methods and one seed on a tiny model; `keys` replace those of its file."""
    configs = folder / "configs"
    configs.mkdir(exist_ok=True)
    settings = training_settings(folder, write_corpus(folder))
    write_yaml(configs / "tiny.yml", {key: value for key, value in settings.items() if key not in LEFT_OUT})
    for name in ("kerple_log", "alibi"):
        write_yaml(configs / f"{name}.yml", {"pos_emb": name})
    sweep = {
        "config-dir": str(configs),
        "output": str(folder / "out"),
        "base": ["tiny.yml"],
        "axes": {"pos_emb": ["kerple_log.yml", "alibi.yml"], "seed": [{"seed": 7}]},
        "evaluation": {"lengths": [32, 64], "tokens": 128},
        **keys,
    }
    return write_yaml(folder / "sweep.yml", sweep)


def start_sweep(path: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "tools" / "sweep.py"), str(path), *options]
    env = {**environment(), "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_sweep(path: Path, *options: str, status: int = 0, timeout: float = 900) -> str:
    process = start_sweep(path, *options)
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == status, output
    return output


def kill_all(process: subprocess.Popen) -> None:
    """SIGKILL for a process and all that it has started, wherever they are: nothing gets a chance to save."""
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in tree:
        one.suspend()
    for one in tree:
        one.kill()
    psutil.wait_procs(tree[1:], timeout=20)
    process.communicate()


def iterations_logged(run: Path) -> list[int]:
    """Every iteration that was logged, in the order of the log: one that comes twice was trained twice."""
    lines = (run / "logs" / "metrics.jsonl").read_text().splitlines()
    return [line["iteration"] for line in map(json.loads, lines) if "train/loss" in line]


def pid_exists(number: int) -> bool:
    return os.path.exists(f"/proc/{number}")
