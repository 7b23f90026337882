"""Runs `tests/gpu` in a process with a simulated CUDA device."""

import subprocess
import sys

import pytest

from tests.support.simulated_cuda import ROOT, environment


@pytest.mark.ci
def test_everything_on_a_simulated_gpu():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "tests/gpu",
    ]
    result = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-20_000:]
