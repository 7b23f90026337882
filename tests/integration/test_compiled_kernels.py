"""The machine code that Triton compiles for the kernels of fused blocks and of the loss, which
needs no GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
# Hidden size -> bytes of spilled registers per thread. 8192 is the largest that fused blocks
# support.
MAX_STACK = {768: 0, 8192: 64}


def compiled(cache: Path, *words: str) -> list[dict[str, Any]]:
    """The rows that tests/support/compiled_kernels.py prints."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.compiled_kernels", *words]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("hidden_size", MAX_STACK)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("architecture", ["80", "86", "89", "90", "100", "120"])
def test_blocks(architecture, dtype, hidden_size, tmp_path):
    for row in compiled(tmp_path, "blocks", architecture, dtype, str(hidden_size)):
        assert row["stack"] <= MAX_STACK[hidden_size], row
        assert row["shared"] <= 48 * 1024, row


@pytest.mark.ci
@pytest.mark.parametrize(
    ("options", "binaries"), [(["--quick"], 2), pytest.param([], 72, marks=pytest.mark.slow)]
)
def test_loss(options, binaries, tmp_path):
    """Two programs of 512 threads fit on a multiprocessor, and logits are loaded and stored 16
    bytes at a time.
    """
    rows = compiled(tmp_path, "loss", *options)
    assert len(rows) == binaries
    for row in rows:
        assert row["stack"] == 0, row
        assert row["shared"] <= 1024, row
        assert row["registers"] <= 64, row
        assert row["wide"] >= 2, row
