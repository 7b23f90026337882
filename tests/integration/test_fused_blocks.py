"""The machine code that Triton compiles for the kernels of fused blocks, which needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# Hidden size -> bytes of spilled registers per thread. 8192 is the largest that fused blocks support.
MAX_STACK = {768: 0, 8192: 64}


@pytest.mark.slow
@pytest.mark.parametrize("hidden_size", [768, 8192])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_and_shared_memory(architecture, dtype, hidden_size, tmp_path):
    command = [sys.executable, "-m", "tests.support.block_binaries", str(architecture), dtype, str(hidden_size)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    for kernel, (_, stack, shared) in json.loads(result.stdout).items():
        assert stack <= MAX_STACK[hidden_size], kernel
        assert shared <= 48 * 1024, kernel
