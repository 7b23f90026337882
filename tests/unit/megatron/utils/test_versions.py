"""Every place that overrides or calls an interface which can change without notice rejects an unknown one."""

import importlib
import re
import tarfile
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml

from kerple.positional.functional import may_cache
from megatron.config import UserError
from megatron.config.yaml_files import parse_override
from megatron.model.parallel import column_linear
from megatron.model.settings import TensorParallel
from megatron.optimizers.registry import build_optimizer
from megatron.utils.versions import VERSIONS, check_parameters, check_version
from tests.support.errors import assert_rejected

ROOT = Path(__file__).resolve().parents[4]


def install(monkeypatch, package: str, version: str) -> None:
    """Pretend that another version of a package is installed."""
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == package else installed(name))


@pytest.mark.parametrize("package", VERSIONS)
def test_the_versions_are_those_of_the_requirements(package):
    files = {path.name: path.read_text() for path in (ROOT / "requirements").glob("*.txt")}
    (locked,) = re.findall(rf"^{package}==(.*)", files.pop("lock.txt"), re.MULTILINE)
    assert fnmatch(locked, VERSIONS[package])
    lines = {line for text in files.values() for line in re.findall(rf"^{package}\b.*", text, re.MULTILINE)}
    exact = VERSIONS[package].removesuffix(".*")
    assert lines == ({f"{package}=={exact}"} if exact == VERSIONS[package] else {f"{package}>={exact},<0.51"})


def test_a_version_built_from_source_is_accepted(monkeypatch):
    install(monkeypatch, "deepspeed", VERSIONS["deepspeed"] + "+1f2e3d4c")
    check_version("deepspeed")
    install(monkeypatch, "deepspeed", "99.1.0+1f2e3d4c")
    with pytest.raises(UserError, match="deepspeed 99"):
        check_version("deepspeed")


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("deepspeed", "megatron.training.deepspeed_setup"),
        ("megatron-core", "megatron.data.index_cache"),
        ("lm-eval", "megatron.evaluation.harness"),
    ],
)
def test_modules_reject_unknown_versions(package, module, monkeypatch):
    source = importlib.util.find_spec(module)
    install(monkeypatch, package, "99.1.0")
    with pytest.raises(UserError, match=rf"{package} 99\.1\.0 .*{package}=={VERSIONS[package]}"):
        source.loader.exec_module(importlib.util.module_from_spec(source))


def test_tensor_parallel_layers_reject_unknown_versions(monkeypatch):
    install(monkeypatch, "megatron-core", "0.17.0")
    assert_rejected(r"megatron-core.*0\.17\.0", column_linear, 4, 8, bias=True, tp=TensorParallel(rank=0, size=2))


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


def test_yaml_needs_the_overridden_function_of_pyyaml(monkeypatch):
    monkeypatch.delattr(yaml.composer.Composer, "compose_node")
    assert_rejected("PyYAML.*compose_node", parse_override, "seed=1")


def test_renamed_parameters_are_an_error():
    check_parameters("Python", tarfile.TarInfo, "frombuf", "buf", "encoding")
    pattern = r"Python 3.*tarfile\.TarInfo\.frombuf.*buffer"
    assert_rejected(pattern, check_parameters, "Python", tarfile.TarInfo, "frombuf", "buffer")
