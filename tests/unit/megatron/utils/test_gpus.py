"""GPUs that torch cannot use."""

from types import SimpleNamespace

import pytest
import torch

from megatron.utils import gpus
from megatron.utils.errors import UserError


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(gpus.shutil, "which", lambda program: None)


def test_a_machine_without_gpus(monkeypatch):
    assert not gpus.use_gpus()
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    assert not gpus.use_gpus()


@pytest.mark.parametrize("visible", ["", "-1"])
def test_no_device_is_visible(visible, monkeypatch):
    monkeypatch.setenv("SLURM_GPUS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert not gpus.use_gpus()


@pytest.mark.parametrize(
    ("name", "value", "evidence"),
    [
        ("CUDA_VISIBLE_DEVICES", "0", "CUDA_VISIBLE_DEVICES is 0"),
        ("SLURM_JOB_GPUS", "0", r"Slurm allocated GPUs \(SLURM_JOB_GPUS is 0\)"),
        ("SLURM_GPUS_ON_NODE", "8", r"Slurm allocated GPUs \(SLURM_GPUS_ON_NODE is 8\)"),
        ("SLURM_GPUS", "a100:2", r"Slurm allocated GPUs \(SLURM_GPUS is a100:2\)"),
    ],
)
def test_gpus_that_this_build_of_torch_cannot_use(name, value, evidence, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match=rf"although {evidence}: it is built without CUDA; .* set .* DS_ACCELERATOR=cpu"
    ):
        gpus.use_gpus()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert not gpus.use_gpus()


def test_a_driver_that_torch_cannot_use(monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore")

    listed = SimpleNamespace(stdout="GPU 0: NVIDIA A100 (UUID: GPU-1)\nGPU 1: NVIDIA A100 (UUID: GPU-2)\n")
    monkeypatch.setattr(gpus.shutil, "which", lambda program: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(gpus.subprocess, "run", lambda *arguments, **options: listed)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UserError, match=r"nvidia-smi.*GPU 0: NVIDIA A100.*CUDA 13\.0"):
        gpus.use_gpus()


def test_nvidia_smi_without_a_gpu(monkeypatch):
    monkeypatch.setattr(gpus.shutil, "which", lambda program: "/usr/bin/nvidia-smi")
    listed = SimpleNamespace(stdout="NVIDIA-SMI has failed\n")
    monkeypatch.setattr(gpus.subprocess, "run", lambda *arguments, **options: listed)
    assert not gpus.use_gpus()
