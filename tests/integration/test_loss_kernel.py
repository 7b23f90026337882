"""The machine code of the loss kernel for every GPU architecture. It is compiled, not run: no GPU needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.ci
@pytest.mark.parametrize(("options", "binaries"), [(["--quick"], 2), pytest.param([], 72, marks=pytest.mark.slow)])
def test_no_architecture_spills_registers(options, binaries, tmp_path):
    """Two programs of 512 threads fit on a multiprocessor, and logits are loaded and stored 16 bytes at a time."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.compiled_loss", *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == binaries
    for row in rows:
        assert row["stack"] == 0, row
        assert row["shared"] <= 1024, row
        assert row["registers"] <= 64, row
        assert row["wide"] >= 2, row
