"""Whether to compute on GPUs or on the CPU."""

import os
import shutil
import socket
import subprocess

import torch

from megatron.utils.errors import UserError, first_line

# Values that name no device; the last one is Slurm's.
_NO_DEVICES = ("", "-1", "NoDevFiles")


def use_gpus() -> bool:
    """True if torch can use a GPU, unless the environment variable DS_ACCELERATOR is cpu.

    Raises UserError if the machine or the job has a GPU but torch cannot use it, instead of computing on the CPU.
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
            f"{problem}; check the driver, and that it supports CUDA {torch.version.cuda}, for which torch is built"
        )
    raise UserError(
        f"torch {torch.__version__} cannot use a GPU on {socket.gethostname()}, although {evidence}: {reason}. To run "
        "on the CPU, set the environment variable DS_ACCELERATOR=cpu"
    )


def _evidence_of_gpus() -> str | None:
    """What says that there is a GPU for this process, as a clause; None if nothing does."""
    variables = os.environ
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return None if visible in _NO_DEVICES else f"CUDA_VISIBLE_DEVICES is {visible}"
    # Indices of the GPUs on this node, and numbers of GPUs.
    for name, none in (("SLURM_JOB_GPUS", _NO_DEVICES), ("SLURM_GPUS_ON_NODE", ("", "0")), ("SLURM_GPUS", ("", "0"))):
        if variables.get(name, "") not in none:
            return f"Slurm allocated GPUs ({name} is {variables[name]})"
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    gpus = [line for line in listed.splitlines() if line.startswith("GPU ")]
    return f"nvidia-smi lists {gpus[0].partition(' (UUID')[0]}" if gpus else None
