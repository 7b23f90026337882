"""tools/report.py as a process."""

import json
import subprocess
import sys

from tests.support.runs import ROOT, environment


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )


def test_report(tmp_path):
    rows = [{"name": "alibi", "median": 0.5, "ratio": 1.0}]
    benchmark = tmp_path / "train_step.json"
    benchmark.write_text(json.dumps({"hardware": {"processor": "A processor"}, "tables": {"a step": rows}}))
    command = [sys.executable, str(ROOT / "tools" / "report.py"), "--benchmark", str(benchmark)]
    command += ["--output", str(tmp_path / "out")]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tmp_path / 'out' / 'report.html'}\n"
    assert (tmp_path / "out" / "tables" / "train_step-1.md").is_file()
