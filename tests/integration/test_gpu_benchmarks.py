"""benchmarks/gpu.sh: which commands it runs, with a stub in place of Python."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.gpu import Bench

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = [f"benchmarks/{name}_gpu.py --check" for name in ("attention", "train_step", "evaluation")]


def run(folder: Path, failing: str, *options: str) -> tuple[int, list[str], str]:
    """(exit status, commands, output); commands that contain `failing` fail."""
    stub, log = folder / "python", folder / "commands"
    stub.write_text(f'#!/bin/sh\necho "$*" >> {log}\ncase "$*" in *{failing}*) exit 1;; esac\n')
    stub.chmod(0o755)
    script = folder / "benchmarks" / "gpu.sh"
    script.parent.mkdir(exist_ok=True)
    script.write_text((ROOT / "benchmarks/gpu.sh").read_text())
    command = ["bash", str(script), *options]
    result = subprocess.run(command, env={"PYTHON": str(stub), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    return result.returncode, log.read_text().splitlines(), result.stdout


@pytest.mark.parametrize(
    ("failing", "options", "status", "benchmarks"),
    [
        ("nothing", [], 0, True),
        ("nothing", ["--dry-run"], 0, True),
        ("doctor", ["--dry-run"], 1, False),
        ("doctor", ["--ignore-doctor", "--dry-run"], 1, True),
        ("train_step", [], 1, True),
    ],
)
def test_the_doctor_comes_first(tmp_path, failing, options, status, benchmarks):
    actual, commands, output = run(tmp_path, failing, *options)
    assert actual == status
    assert commands[0] == "-m kerple.doctor --json runs/bench/doctor.json"
    assert len(commands) == (4 if benchmarks else 1)
    for command, start in zip(commands[1:], BENCHMARKS, strict=False):
        assert command.startswith(start)
        assert command.endswith("--dry-run") == ("--dry-run" in options)
        assert "--ignore-doctor" not in command
    assert ("--ignore-doctor runs them anyway" in output) == (not benchmarks)


def test_they_need_only_pytorch_and_triton():
    """A GPU machine that is set up for a short time has no other packages."""
    blocked = ("pydantic", "rich", "psutil", "yaml", "deepspeed", "megatron.core")
    modules = "benchmarks.attention_gpu, benchmarks.train_step_gpu, benchmarks.evaluation_gpu"
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import {modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_time_limit_begins_after_the_check(tmp_path, monkeypatch):
    words = ["gpu.py", "--dry-run", "--check", "--seconds", "0", "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    bench = Bench("", "rows.json")
    assert not bench.expired
    bench.record_check(True)
    assert bench.expired
