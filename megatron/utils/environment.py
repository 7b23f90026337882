"""The code, machine and libraries that produced a result."""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
CPU_INFO = Path("/proc/cpuinfo")


@cache
def commit() -> str | None:
    """The commit of this project's working tree, followed by -dirty if files were changed; None if it is not a git
    working tree.
    """
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # git also searches the parent folders, which may be a working tree of another project.
    return result.stdout.strip() if result.returncode == 0 and (ROOT / ".git").exists() else None


def machine() -> str:
    """The GPU that torch uses by default; otherwise the processor and the number of cores this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{processor()}, {cores} core{'s' if cores > 1 else ''}"


def versions() -> str:
    """The versions of Python and torch."""
    return f"Python {platform.python_version()}, torch {torch.__version__}"


def processor() -> str:
    """The model name of the processor."""
    try:
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def has_bf16_instructions() -> bool:
    """Whether the processor multiplies matrices in bfloat16 (AVX512-BF16, AMX or Arm's BF16). False outside Linux."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return False
    flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
