"""The code, machine and libraries that produced a result."""

import os
import platform
import re
import subprocess
from functools import cache
from pathlib import Path

import torch

from megatron.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CPU_INFO = Path("/proc/cpuinfo")
# Set in the Dockerfile: the image contains no git repository.
COMMIT_VARIABLE = "KERPLE_COMMIT"


@cache
def commit() -> str | None:
    """The commit of this project's working tree, followed by -dirty if files were changed. Without a git working tree,
    for example in a container, the value of the environment variable KERPLE_COMMIT; None if it is not set.

    Raises UserError if KERPLE_COMMIT is not the hash of a commit.
    """
    # git also searches the parent folders, which may be a working tree of another project.
    if not (ROOT / ".git").exists():
        value = os.environ.get(COMMIT_VARIABLE, "")
        if value and not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", value):
            raise UserError(
                f"{COMMIT_VARIABLE}={value!r} is not a commit; set it to the output of `git rev-parse HEAD`"
            )
        return value or None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def machine() -> str:
    """The GPU that torch uses by default; otherwise the processor, the vector instructions that torch uses on it, and
    the number of cores this process may use.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    instructions = torch.backends.cpu.get_cpu_capability() + (" with bfloat16" if has_bf16_instructions() else "")
    return f"{processor()}, {instructions}, {cores} core{'s' if cores > 1 else ''}"


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


def slow_dtype_notice(device: torch.device, dtype: torch.dtype) -> str | None:
    """A line for the log if torch has no fast matrix products of this dtype on this CPU; otherwise None."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if device.type != "cpu" or dtype not in names:
        return None
    name = names[dtype]
    if torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")():
        return None
    return f"notice: torch has no fast matrix products in {name} on this processor; precision fp32 is faster"


def has_bf16_instructions() -> bool:
    """Whether the processor multiplies matrices in bfloat16 (AVX512-BF16, AMX or Arm's BF16). False outside Linux."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return False
    flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
