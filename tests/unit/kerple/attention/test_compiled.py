"""The Triton kernels as a GPU would run them: compiled for Hopper, which needs none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[4]


def test_no_kernel_spills_registers_or_waits_for_every_product(tmp_path):
    """By the machine code, for no position, a bias, bias and weight, with gradients along directions."""
    rows = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/kernel_counts.py", "--check", "--json", str(rows)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {(row["variant"], row["kernel"]): row for row in json.loads(rows.read_text())}
    assert len(found) == 13
    # Pairs at one distance share a load: 18 for 32 pairs.
    assert found["bias", "query"]["LDG"] == 8192 * 18 // 32 // 32
    # Two directions cost far less than recomputing every score in a kernel of their own.
    log, bias = found["bias, 2 directions", "query"], found["bias", "query"]
    assert (
        log["instructions"] - bias["instructions"] < found["bias, any table's gradient", "tables"]["instructions"] / 2
    )
