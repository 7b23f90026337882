"""The code, machine and libraries that produced a result; unknown interfaces of libraries are
rejected.
"""

import importlib
import re
import tarfile
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from kerple.positional.functional import may_cache
from megatron.config.yaml_files import parse_override
from megatron.model.parallel import column_linear
from megatron.model.settings import TensorParallel
from megatron.optimizers.registry import build_optimizer
from megatron.utils import environment
from megatron.utils.environment import VERSIONS, check_parameters, check_version
from tests.support.errors import assert_rejected


@pytest.fixture(autouse=True)
def no_cache():
    environment.commit.cache_clear()
    yield
    environment.commit.cache_clear()


def test_bfloat16_instructions(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(environment, "CPU_INFO", path)
    for line, expected in (
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("Features\t: fp asimd bf16", True),
        ("flags : fpu avx512f", False),
    ):
        path.write_text(f"processor\t: 0\n{line}\n")
        assert environment.has_bf16_instructions() == expected
    path.unlink()
    assert not environment.has_bf16_instructions()


@pytest.mark.parametrize(
    ("status", "git", "variable", "expected"),
    [
        (0, True, "0123abc", "ab12-dirty"),
        (128, True, "", None),
        (0, False, "", None),
        (0, False, "0123abc-dirty", "0123abc-dirty"),
    ],
)
def test_the_commit_is_that_of_this_working_tree_or_of_the_variable(
    status, git, variable, expected, tmp_path, monkeypatch
):
    def run(command, **options):
        assert str(tmp_path) in command
        return SimpleNamespace(returncode=status, stdout="ab12-dirty\n")

    monkeypatch.setattr(environment.subprocess, "run", run)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setenv("KERPLE_COMMIT", variable)
    if git:
        (tmp_path / ".git").touch()
    assert environment.commit() == expected


def test_the_machine_is_the_gpu_or_the_processor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(environment, "processor", lambda: "EPYC")
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: {0, 3}, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(environment, "has_bf16_instructions", lambda: False)
    assert environment.machine() == "EPYC, AVX512, 2 cores"
    monkeypatch.setattr(environment, "has_bf16_instructions", lambda: True)
    assert environment.machine() == "EPYC, AVX512 with bfloat16, 2 cores"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    assert environment.machine() == "NVIDIA H100"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    for name in (
        "DS_ACCELERATOR",
        "CUDA_VISIBLE_DEVICES",
        "SLURM_GPUS",
        "SLURM_JOB_GPUS",
        "SLURM_GPUS_ON_NODE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(environment.shutil, "which", lambda program: None)


def test_gpus_that_this_build_of_torch_cannot_use(monkeypatch):
    message = "although .*{} is 0.*: .* without CUDA; .* set .* DS_ACCELERATOR=cpu"
    monkeypatch.setenv("SLURM_JOB_GPUS", "0")
    assert_rejected(message.format("Slurm allocated GPUs .SLURM_JOB_GPUS"), environment.use_gpus)
    for visible in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert not environment.use_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert_rejected(message.format("CUDA_VISIBLE_DEVICES"), environment.use_gpus)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert not environment.use_gpus()


def test_a_driver_that_torch_cannot_use(monkeypatch):
    def init():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nMore"
        )

    listed = SimpleNamespace(
        stdout="GPU 0: NVIDIA A100 (UUID: GPU-1)\nGPU 1: NVIDIA A100 (UUID: GPU-2)\n"
    )
    monkeypatch.setattr(environment.shutil, "which", lambda program: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(environment.subprocess, "run", lambda *arguments, **options: listed)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    assert_rejected(r"nvidia-smi.*GPU 0: NVIDIA A100.*CUDA 13\.0", environment.use_gpus)


ROOT = Path(__file__).resolve().parents[4]


def install(monkeypatch, package: str, version: str) -> None:
    """Pretend that another version of a package is installed."""
    installed = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: version if name == package else installed(name)
    )


@pytest.mark.parametrize("package", VERSIONS)
def test_the_versions_are_those_of_the_requirements(package):
    files = {path.name: path.read_text() for path in (ROOT / "requirements").glob("*.txt")}
    (locked,) = re.findall(rf"^{package}==(.*)", files.pop("lock.txt"), re.MULTILINE)
    assert fnmatch(locked, VERSIONS[package])
    lines = {
        line
        for text in files.values()
        for line in re.findall(rf"^{package}\b.*", text, re.MULTILINE)
    }
    exact = VERSIONS[package].removesuffix(".*")
    assert lines == (
        {f"{package}=={exact}"} if exact == VERSIONS[package] else {f"{package}>={exact},<0.51"}
    )


def loads(module):
    def load():
        source = importlib.util.find_spec(module)
        source.loader.exec_module(importlib.util.module_from_spec(source))

    return load


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("deepspeed", loads("megatron.training.deepspeed_setup")),
        ("megatron-core", loads("megatron.data.index_cache")),
        ("lm-eval", loads("megatron.evaluation.harness")),
        (
            "megatron-core",
            lambda: column_linear(4, 8, bias=True, tp=TensorParallel(rank=0, size=2)),
        ),
    ],
)
def test_unknown_versions_are_rejected(package, call, monkeypatch):
    """Not those that were built from the source of a known version."""
    for version in ("99.1.0", "99.1.0+1f2e3d4c"):
        install(monkeypatch, package, version)
        assert_rejected(rf"{package} 99\.1\.0.*{package}=={VERSIONS[package]}", call)
    install(monkeypatch, package, VERSIONS[package] + "+1f2e3d4c")
    check_version(package)


def test_adam8bit_rejects_unknown_versions(monkeypatch):
    group = {"params": [torch.nn.Parameter(torch.ones(8))]}
    assert build_optimizer("adam8bit", [group], {})
    install(monkeypatch, "bitsandbytes", "0.51.0")
    assert_rejected(r"0\.51\.0.*bitsandbytes==0\.50\.\*", build_optimizer, "adam8bit", [group], {})


def test_caches_need_the_test_for_tensors_of_torch_func(monkeypatch):
    assert may_cache()
    monkeypatch.delattr(torch._C._functorch, "is_functorch_wrapped_tensor")
    with pytest.raises(AttributeError, match="is_functorch_wrapped_tensor"):
        may_cache()


def test_renamed_functions_and_parameters_are_an_error(monkeypatch):
    check_parameters("Python", tarfile.TarInfo, "frombuf", "buf", "encoding")
    pattern = r"Python 3.*tarfile\.TarInfo\.frombuf.*buffer"
    assert_rejected(pattern, check_parameters, "Python", tarfile.TarInfo, "frombuf", "buffer")
    monkeypatch.delattr(yaml.composer.Composer, "compose_mapping_node")
    assert_rejected("PyYAML.*compose_mapping_node", parse_override, "seed=1")


def test_devices():
    assert environment.choose_device("cpu") == torch.device("cpu")
    assert_rejected("--device abacus", environment.choose_device, "abacus")


def test_every_rank_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr("megatron.utils.environment.use_gpus", lambda: True)
    monkeypatch.setattr("megatron.utils.environment.torch.empty", lambda *_, **__: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [environment.choose_device(name) for name in (None, "cuda")] == [
        torch.device("cuda:1")
    ] * 2
    assert_rejected("--device.*cuda:0.*2.*GPU", environment.choose_device, "cuda:0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert environment.choose_device("cuda:0") == torch.device("cuda:0")
