"""tools/chomsky.py as a process."""

import subprocess
import sys

from tests.support.runs import ROOT, environment


def test_an_error_is_one_line(tmp_path):
    command = [sys.executable, "tools/chomsky.py", "--methods", "kerple_lgo", "--output", str(tmp_path / "results")]
    process = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert process.returncode == 2
    assert "did you mean kerple_log" in " ".join(process.stderr.split())
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "results").exists()
