"""Small sweeps on a small corpus: sweep files, and fake trainings and evaluations that run in this
process.
"""

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from megatron.checkpoint.directory import layer_file
from megatron.cli import sweep as command
from megatron.reporting import report as reporting
from tests.support.checkpoints import write_corpus, write_yaml
from tests.support.records import stored_record
from tests.support.runs import ROOT, environment, training_settings

# Keys that a sweep or its axes set.
SWEEP_KEYS = ("save", "load", "log_dir", "seed", "pos_emb")


def write_sweep(folder: Path, **keys: object) -> Path:
    """Write a sweep of two methods and one seed with a tiny model; `keys` replace keys
    of the file.
    """
    configs = folder / "configs"
    configs.mkdir(exist_ok=True)
    settings = training_settings(folder, write_corpus(folder))
    write_yaml(
        configs / "tiny.yml",
        {key: value for key, value in settings.items() if key not in SWEEP_KEYS},
    )
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


class FakeProcess:
    """A process that has already exited."""

    def __init__(self, exit_status: int):
        self.exit_status = exit_status

    def poll(self) -> int:
        return self.exit_status


def fake_start_process(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
) -> FakeProcess:
    """Replaces `megatron.sweep.runner.start_process`: writes the files of a training or an
    evaluation.

    By seed: the training of 13 fails, the first training of 17 fails half-way, the evaluation of 19
    fails.
    """
    fake = fake_evaluation if command[2] == "evaluate" else fake_training
    with open(log, "a") as stream:
        config = json.loads(
            Path(next(word for word in command if word.endswith("config.yml"))).read_text()
        )
        return FakeProcess(fake(config, command, environment.get("CUDA_VISIBLE_DEVICES"), stream))


def fake_training(config, command, gpus, log) -> int:
    assert [Path(command[1]).name, command[2]] == ["kerple_command.py", "train"]
    folder, logs = Path(config["save"]), Path(config["log_dir"])
    start = int((folder / "latest").read_text()[11:]) if (folder / "latest").is_file() else 0
    print(f"training from {start}, GPU {gpus}", file=log)
    logs.mkdir(parents=True, exist_ok=True)
    if config["seed"] == 13:
        print("a first line\nthe loss is not finite", file=log)
        return 3
    steps = config["train_iters"]
    end = steps // 2 if config["seed"] == 17 and start == 0 else steps
    with open(logs / "metrics.jsonl", "a") as metrics:
        for step in range(start + 1, end + 1):
            values = {
                "iteration": step,
                "train/tokens": step * 256.0,
                "train/tokens_per_second": 512.0,
            }
            values["train/seconds_per_step"] = 0.5
            metrics.write(json.dumps(values) + "\n")
    (folder / f"global_step{end}" / "configs").mkdir(parents=True)
    (folder / f"global_step{end}" / "configs" / "config.yml").write_text(json.dumps(config))
    state = {"iteration": end, "precision": "fp32"}
    torch.save(state, folder / f"global_step{end}" / "mp_rank_00_model_states.pt")
    layer_file(folder / f"global_step{end}", 0, 0).write_text(
        f"weights {log.tell()}"
    )  # others in each training
    (folder / "latest").write_text(f"global_step{end}")
    return 0 if end == steps else 9


def fake_evaluation(config, command, gpus, log) -> int:
    arguments = command[3:]
    print("evaluating", *arguments, file=log)
    if config["seed"] == 19:
        print("no such text", file=log)
        return 1
    options = {
        word: arguments[index + 1 :]
        for index, word in enumerate(arguments)
        if word.startswith("--")
    }
    lengths = [int(word) for word in itertools.takewhile(str.isdigit, options["--lengths"])]
    label = f" ({options['--label'][0]})" if "--label" in options else ""
    values = {"pos_emb": config["pos_emb"] + label, "seed": config["seed"], "train_length": 32}
    output = Path(options["--output"][0])
    output.mkdir(parents=True, exist_ok=True)
    with open(output / "results.jsonl", "a") as results:
        for length in lengths:
            loss = math.log(2.7 + config["seed"] / 100)
            record = stored_record(
                length, fingerprint=f"{config['pos_emb']}{config['seed']}", loss=loss
            )
            record["checkpoint"] |= {"path": config["save"], "iteration": config["train_iters"]}
            results.write(json.dumps({**record, **values}) + "\n")
    return 0


class FakeSweep:
    """Runs sweeps.py's main() with fake processes. The report, which takes a second, is written on
    request.
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        self.folder = folder
        self.runs = folder / "out" / "runs"
        self.report = folder / "out" / "report"
        self.write_reports = False
        self._capsys = capsys

    def __call__(self, *options: str, status: int = 0, write: bool = True, **keys: object) -> str:
        """Write the sweep file with `keys` and run it; returns the output."""
        path = write_sweep(self.folder, **keys) if write else self.folder / "sweep.yml"
        assert command.main([str(path), *options]) == status
        return self._capsys.readouterr().out

    def output_lines(self, run: str) -> list[str]:
        """The output of all processes of a run."""
        return (self.runs / run / "output.log").read_text().splitlines()


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys) -> FakeSweep:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("megatron.sweep.runner.POLL_INTERVAL", 0.0)
    monkeypatch.setattr("megatron.sweep.runner.start_process", fake_start_process)
    fake, write_report = FakeSweep(tmp_path, capsys), reporting.write_report

    def report(sources, output, title):
        return write_report(sources, output, title) if fake.write_reports else output / "left out"

    monkeypatch.setattr(reporting, "write_report", report)
    return fake


def start_sweep(path: Path, *options: str) -> subprocess.Popen:
    """`kerple sweep PATH OPTIONS`"""
    command = [sys.executable, str(ROOT / "kerple_command.py"), "sweep", str(path), *options]
    env = {**environment(), "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run_sweep(path: Path, *options: str, status: int = 0, timeout: float = 900) -> str:
    process = start_sweep(path, *options)
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == status, output
    return output


def kill_all(process: subprocess.Popen) -> None:
    """SIGKILL to a process and all its descendants, suspended first so that none of
    them can save.
    """
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in tree:
        member.suspend()
    for member in tree:
        member.kill()
    psutil.wait_procs(tree[1:], timeout=20)
    process.communicate()


def logged_iterations(run: Path) -> list[int]:
    """All iterations in the metrics file, in order. An iteration that occurs twice was trained
    twice.
    """
    lines = (run / "logs" / "metrics.jsonl").read_text().splitlines()
    return [values["iteration"] for values in map(json.loads, lines) if "train/tokens" in values]
