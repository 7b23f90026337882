"""Small training runs: their settings, their output files, and launches through deepy.py."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from megatron.config import Config
from megatron.training.loop import train
from tests.support.checkpoints import settings_of, write_yaml

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """The environment for a process: one thread, and not a rank of an outer run."""
    unset = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {
        **{k: v for k, v in os.environ.items() if k not in unset},
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
    }


def training_settings(folder: Path, data_path: str, **keys: object) -> dict[str, object]:
    """Settings of a small model that trains for 6 iterations and saves and logs in `folder`.

    `keys` replace settings; the value None removes one.
    """
    defaults = {
        "train_iters": 6,
        "lr_decay_iters": 20,
        "lr_decay_style": "cosine",
        "warmup": 0.1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.005}},
        "weight_decay": 0.0,
        "split": "8,1,1",
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": None,
        "num_workers": 0,
        "log_interval": 1,
        "eval_interval": 3,
        "eval_iters": 1,
        "save": str(folder / "checkpoints"),
        "load": str(folder / "checkpoints"),
        "save_interval": 3,
        "log_dir": str(folder / "logs"),
    }
    merged = {**settings_of("kerple_log", data_path), **defaults, **keys}
    return {key: value for key, value in merged.items() if value is not None}


def trained(folder: Path, data_path: str, **keys: object) -> Path:
    """Train in this process with `training_settings`; returns the folder."""
    train(Config.from_flat(training_settings(folder, data_path, **keys)))
    return folder


def start(
    folder: Path, settings: dict[str, object], *arguments: str, script: str = "train.py"
) -> subprocess.Popen:
    """Start `python deepy.py SCRIPT config.yml ARGUMENTS` with its output in a pipe."""
    folder.mkdir(parents=True, exist_ok=True)
    config = write_yaml(folder / "config.yml", settings)
    command = [sys.executable, str(ROOT / "deepy.py"), script, str(config), *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(
    folder: Path,
    settings: dict[str, object],
    *arguments: str,
    script: str = "train.py",
    status: int = 0,
) -> str:
    """Run `start` to the end and return its output, `unwrapped`. Fails with the output if the exit
    status is not `status`.
    """
    process = start(folder, settings, *arguments, script=script)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == status, output
    return unwrapped(output)


def unwrapped(output: str) -> str:
    """The output of a training run with its long lines in one."""
    return re.sub(r"\n  (?=\S)", " ", output)


def metrics(folder: Path, name: str = "train/loss") -> dict[int, float]:
    """Iteration -> value of a metric, from the metrics file of a run."""
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    return {
        values["iteration"]: values[name] for values in map(json.loads, lines) if name in values
    }


def weights(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """FILE/NAME -> tensor, of all layer files of a checkpoint."""
    step = folder / "checkpoints" / f"global_step{iteration}"
    return {
        f"{path.name}/{name}": tensor
        for path in sorted(step.glob("layer_*.pt"))
        for name, tensor in torch.load(path, weights_only=True).items()
    }


def copy_checkpoint(source: Path, target: Path, iteration: int) -> None:
    """Copy one checkpoint of the run in `source` to `target`, as if the run had stopped there."""
    source, target = source / "checkpoints", target / "checkpoints"
    target.mkdir(parents=True)
    shutil.copytree(source / f"global_step{iteration}", target / f"global_step{iteration}")
    (target / "latest").write_text(f"global_step{iteration}")
