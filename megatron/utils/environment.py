"""This machine (processor, GPUs), and the code and libraries that produce a result, with their
checks.

The checks are of the interfaces that this project overrides or calls although other packages may
change them at any time. Without a check, a renamed method or attribute would not fail: the override
would not be called. docs/versions.md lists the places.
"""

import importlib.metadata
import inspect
import os
import platform
import shutil
import socket
import subprocess
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron.utils.errors import UserError, first_line
from megatron.utils.processes import available_cores

ROOT = Path(__file__).resolve().parents[2]
CPU_INFO = Path("/proc/cpuinfo")
# Set in the Dockerfile: the image contains no git repository.
COMMIT_VARIABLE = "KERPLE_COMMIT"


@cache
def commit() -> str | None:
    """The commit of this project's working tree, followed by -dirty if files were changed. Without
    a git working tree, for example in a container, the value of the environment variable
    KERPLE_COMMIT; None if it is not set.
    """
    # git also searches the parent folders, which may be a working tree of another project.
    if not (ROOT / ".git").exists():
        return os.environ.get(COMMIT_VARIABLE) or None
    command = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode != 0:
        return None
    return result.stdout.strip()


def machine() -> str:
    """The GPU that torch uses by default; otherwise the processor, the vector instructions that
    torch uses on it, and the number of cores this process may use.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cores, instructions = available_cores(), torch.backends.cpu.get_cpu_capability()
    if has_bf16_instructions():
        instructions += " with bfloat16"
    return f"{processor()}, {instructions}, {cores} core{'s' * (cores > 1)}"


def versions() -> str:
    """The versions of Python and torch."""
    return f"Python {platform.python_version()}, torch {torch.__version__}"


def processor() -> str:
    """The model name of the processor."""
    for line in _cpu_info():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_info() -> list[str]:
    """The lines of Linux's description of the processors; none elsewhere."""
    try:
        return CPU_INFO.read_text().splitlines()
    except OSError:
        return []


def slow_dtype_notice(device: torch.device, dtype: torch.dtype) -> str | None:
    """A line for the log if torch has no fast matrix products of this dtype on this CPU."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if device.type != "cpu" or dtype not in names:
        return None
    name = names[dtype]
    has_mkldnn = torch.backends.mkldnn.is_available()
    if has_mkldnn and getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")():
        return None
    return (
        f"notice: torch has no fast matrix products in {name} on this processor; precision fp32 is "
        "faster"
    )


def has_bf16_instructions() -> bool:
    """Whether the processor multiplies matrices in bfloat16 (AVX512-BF16, AMX or Arm's BF16). False
    outside Linux.
    """
    flags: set[str] = set()
    for line in _cpu_info():
        if line.startswith(("flags", "Features")):
            flags.update(line.split())
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


# Values that name no device; the last one is Slurm's.
_NO_DEVICES = ("", "-1", "NoDevFiles")


def use_gpus() -> bool:
    """True if torch can use a GPU, unless the environment variable DS_ACCELERATOR is cpu.

    Raises UserError if the machine or the job has a GPU but torch cannot use it, instead of
    computing on the CPU.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return False
    if torch.cuda.is_available():
        return True
    evidence = _evidence_of_gpus()
    if evidence is None:
        return False
    if torch.version.cuda is None and torch.version.hip is None:
        reason = "it is built without CUDA; install a build with CUDA (docs/versions.md)"
    else:
        try:
            torch.cuda.init()
            problem = "it finds none"
        except RuntimeError as error:
            problem = first_line(error)
        reason = (
            f"{problem}; check the driver, and that it supports CUDA {torch.version.cuda}, for "
            "which torch is built"
        )
    raise UserError(
        f"torch {torch.__version__} cannot use a GPU on {socket.gethostname()}, although "
        f"{evidence}: {reason}. To run on the CPU, set the environment variable DS_ACCELERATOR=cpu"
    )


def choose_device(name: str | None) -> torch.device:
    """The named device; by default, this process's GPU if there is one. `cuda` is the GPU of this
    rank, too. Raises UserError for an invalid name, and for the name of a single GPU if there are
    several ranks.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if name is None and not use_gpus():
        name = "cpu"
    elif name is None or (name == "cuda" and ranks > 1):
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    elif name.startswith("cuda:") and ranks > 1:
        raise UserError(
            f"--device {name}: {ranks} ranks would share this GPU; --device cuda gives each rank "
            "its own"
        )
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name}: {first_line(error)}") from None
    return device


def _evidence_of_gpus() -> str | None:
    """What says that there is a GPU for this process, as a clause; None if nothing does."""
    variables = os.environ
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        if visible in _NO_DEVICES:
            return None
        return f"CUDA_VISIBLE_DEVICES is {visible}"

    # Indices of the GPUs on this node, and numbers of GPUs.
    none = {"SLURM_JOB_GPUS": _NO_DEVICES, "SLURM_GPUS_ON_NODE": ("", "0"), "SLURM_GPUS": ("", "0")}
    for name, values in none.items():
        if variables.get(name, "") not in values:
            return f"Slurm allocated GPUs ({name} is {variables[name]})"

    # The driver's own program.
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    for line in listed.splitlines():
        if line.startswith("GPU "):
            return f"nvidia-smi lists {line.partition(' (UUID')[0]}"
    return None


# The versions whose source was read. The same as in requirements/.
VERSIONS = {
    "deepspeed": "0.19.8",
    "megatron-core": "0.16.1",
    "lm-eval": "0.4.13",
    "bitsandbytes": "0.50.*",
}


def check_version(package: str) -> None:
    """Raises UserError if the installed version of the package is not that of `VERSIONS`."""
    expected = VERSIONS[package]
    found = _version(package)
    if not fnmatch(found.partition("+")[0], expected):
        raise UserError(
            f"{package} {found} is installed, but this project uses private interfaces of "
            f"{package} {expected}; run: pip install '{package}=={expected}'"
        )


def check_parameters(package: str, owner: Any, name: str, *parameters: str) -> None:
    """Raises UserError if `owner`, a class or module of `package`, has no function `name` with
    these parameters.

    package: the name of the distribution, or Python for the standard library.
    """
    function = getattr(owner, name, None)
    if function is None or not set(parameters) <= set(inspect.signature(function).parameters):
        path = owner.__name__
        if inspect.isclass(owner):
            path = f"{owner.__module__}.{owner.__qualname__}"
        raise UserError(
            f"{package} {_version(package)} has no {path}.{name} with the parameters "
            f"{', '.join(parameters)}, which this project relies on; install a version of "
            "docs/versions.md"
        )


def _version(package: str) -> str:
    if package == "Python":
        return platform.python_version()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a copy on the path that was not installed
        return "of an unknown version"
