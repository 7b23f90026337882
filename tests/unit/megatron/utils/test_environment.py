"""The code, machine and libraries that produced a result."""

import platform
from types import SimpleNamespace

import pytest
import torch

from megatron.utils import environment
from megatron.utils.errors import UserError


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.delenv("KERPLE_COMMIT", raising=False)
    environment.commit.cache_clear()
    yield
    environment.commit.cache_clear()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags : fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16", True),
        ("flags : fpu avx512f", False),
        ("model name : bf16", False),
    ],
)
def test_bfloat16_instructions(line, expected, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\n{line}\n")
    monkeypatch.setattr(environment, "CPU_INFO", path)
    assert environment.has_bf16_instructions() == expected
    path.unlink()
    assert not environment.has_bf16_instructions()


@pytest.mark.parametrize(("status", "git", "expected"), [(0, True, "ab12-dirty"), (128, True, None), (0, False, None)])
def test_the_commit_is_that_of_this_working_tree(status, git, expected, tmp_path, monkeypatch):
    def run(command, **options):
        assert str(tmp_path) in command
        return SimpleNamespace(returncode=status, stdout="ab12-dirty\n")

    monkeypatch.setattr(environment.subprocess, "run", run)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    if git:
        (tmp_path / ".git").touch()
    assert environment.commit() == expected


def test_without_git_there_is_no_commit(monkeypatch):
    def run(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(environment.subprocess, "run", run)
    assert environment.commit() is None


@pytest.mark.parametrize(
    ("value", "expected"), [("", None), ("0123abc", "0123abc"), ("0" * 40 + "-dirty", "0" * 40 + "-dirty")]
)
def test_without_a_working_tree_the_commit_is_that_of_the_variable(value, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setenv("KERPLE_COMMIT", value)
    assert environment.commit() == expected


def test_a_variable_that_is_not_a_commit_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setenv("KERPLE_COMMIT", "main")
    with pytest.raises(UserError, match="KERPLE_COMMIT='main'"):
        environment.commit()


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


def test_versions():
    assert environment.versions() == f"Python {platform.python_version()}, torch {torch.__version__}"
