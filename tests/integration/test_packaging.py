"""Package metadata and Dockerfile, which no test builds: the files that they name exist."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

from megatron.utils.environment import COMMIT_VARIABLE

ROOT = Path(__file__).parents[2]
IMAGE = (ROOT / "Dockerfile").read_text()


def test_requirements_of_the_package():
    """Parsed by setuptools, which rejects requirement files that include others. `kerple` needs only torch. The
    development requirements include those of all extras that tests need.
    """
    package = apply_configuration(Distribution(), ROOT / "pyproject.toml")
    assert {Requirement(line).name for line in package.install_requires} == {"torch"}
    train = {Requirement(line).name for line in package.extras_require["train"]}
    assert {"torch", "deepspeed", "megatron-core"} <= train
    assert not {"wandb", "tensorboard", "matplotlib", "scipy"} & train
    everything = {Requirement(line).name for line in package.extras_require["all"]}
    s3 = {"s3fs", "aiobotocore", "boto3"}
    assert not s3 & everything
    extras = {Requirement(line).name for lines in package.extras_require.values() for line in lines}
    assert everything >= extras - s3 - {"triton"}
    # pip does not find a boto3 for aiobotocore in reasonable time.
    pins = {Requirement(line).name: str(Requirement(line).specifier) for line in package.extras_require["s3"]}
    assert pins["aiobotocore"].startswith("==")
    assert pins["boto3"].startswith("==")


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_requirement_files(path):
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            assert (path.parent / line.removeprefix("-r ")).is_file()
        elif line and not line.startswith("#"):
            assert Requirement(line).specifier


def test_the_demo_needs_a_part_of_the_extras():
    """And no package that only other commands import: those would make its installation larger."""
    (demo, *extras) = [
        {
            Requirement(line).name: line
            for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
            if line and not line.startswith(("#", "-r"))
        }
        for name in ("demo", "core", "train", "report")
    ]
    assert all(demo[name] in extra.values() for name in demo for extra in extras if name in extra)
    assert demo.keys() <= extras[-1].keys()


def test_files_in_the_dockerfile_exist_and_are_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = re.findall(r"^COPY (\S+) ", IMAGE, flags=re.MULTILINE)
    assert copied == ["requirements", "."]
    assert all((ROOT / name).exists() and name not in ignored for name in copied)
    assert [name for name in re.findall(r"requirements/\S+", IMAGE) if not (ROOT / name).is_file()] == []
    assert f"ENV {COMMIT_VARIABLE}=${{COMMIT}}" in IMAGE
    # No folder that the image needs is ignored.
    assert not {"requirements", "megatron", "configs", "tools", "tests", "docs", "benchmarks"} & set(ignored)


def test_one_version_of_torch():
    versions = set(re.findall(r"torch==([\d.]+)", IMAGE + (ROOT / "Makefile").read_text()))
    assert len(versions) == 1
    (line,) = [line for line in (ROOT / "requirements/core.txt").read_text().splitlines() if line.startswith("torch")]
    assert versions.pop() in Requirement(line).specifier
