"""What no other test builds: the package's metadata and the image agree with the files they name."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

ROOT = Path(__file__).parents[2]
IMAGE = (ROOT / "Dockerfile").read_text()


def test_requirements_of_the_package():
    """Read as a build reads them; setuptools takes no file that includes another."""
    package = apply_configuration(Distribution(), ROOT / "pyproject.toml")
    assert {"torch", "deepspeed", "megatron-core"} <= {Requirement(one).name for one in package.install_requires}


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_requirement_files(path):
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            assert (path.parent / line.removeprefix("-r ")).is_file()
        elif line and not line.startswith("#"):
            assert Requirement(line).specifier


def test_the_image_has_what_it_names():
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = re.findall(r"^COPY (\S+) ", IMAGE, flags=re.MULTILINE)
    assert copied == ["requirements", "."]
    assert all((ROOT / name).exists() and name not in ignored for name in copied)
    assert [name for name in re.findall(r"requirements/\S+", IMAGE) if not (ROOT / name).is_file()] == []
    # What belongs to the image lies in none of the folders that are kept out of it.
    assert not {"requirements", "megatron", "configs", "tools", "tests", "docs", "benchmarks"} & set(ignored)


def test_one_version_of_torch():
    versions = set(re.findall(r"torch==([\d.]+)", IMAGE + (ROOT / "Makefile").read_text()))
    assert len(versions) == 1
    (line,) = [one for one in (ROOT / "requirements/core.txt").read_text().splitlines() if one.startswith("torch")]
    assert versions.pop() in Requirement(line).specifier
