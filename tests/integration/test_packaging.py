"""Package metadata and Dockerfile, which no test builds: the files that they name exist."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

from megatron.utils.environment import COMMIT_VARIABLE

ROOT = Path(__file__).parents[2]
IMAGE = (ROOT / "Dockerfile").read_text()
LOCK = ROOT / "requirements/lock.txt"


def requirements() -> Iterator[Requirement]:
    """The requirements in the files that people edit."""
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        if path.name != LOCK.name:
            lines = path.read_text().splitlines()
            yield from (
                Requirement(line) for line in lines if line and not line.startswith(("#", "-r"))
            )


def test_requirements_of_the_package():
    """Parsed by setuptools, which rejects requirement files that include others. `kerple` needs
    only torch. The development requirements include those of all extras that tests need.
    """
    package = apply_configuration(Distribution(), ROOT / "pyproject.toml")
    assert {Requirement(line).name for line in package.install_requires} == {"torch"}
    train = {Requirement(line).name for line in package.extras_require["train"]}
    assert {"torch", "deepspeed", "megatron-core"} <= train
    assert not {"wandb", "tensorboard", "matplotlib", "scipy"} & train
    everything = {Requirement(line).name for line in package.extras_require["all"]}
    extras = {Requirement(line).name for lines in package.extras_require.values() for line in lines}
    assert everything >= extras - {"triton"}


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_the_lock_pins_all_requirements_for_every_machine(python):
    """If this fails, run `make lock`. torch and the CUDA packages that it needs differ between
    machines.
    """
    lock = [Requirement(line) for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    machine = {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "sys_platform": "linux",
    }
    pins = {pin.name: pin for pin in lock if pin.marker is None or pin.marker.evaluate(machine)}
    assert [name for name in pins if re.match(r"(torch|nvidia|cuda)\b", name)] == []
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) and pin.url is None for pin in lock)
    for requirement in requirements():
        if requirement.name != "torch":
            (pin,) = pins[canonicalize_name(requirement.name)].specifier
            assert pin.version in requirement.specifier, requirement


def test_files_in_the_dockerfile_exist_and_are_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = re.findall(r"^COPY (\S+) ", IMAGE, flags=re.MULTILINE)
    assert copied == ["requirements", "."]
    assert all((ROOT / name).exists() and name not in ignored for name in copied)
    assert [
        name for name in re.findall(r"requirements/\S+", IMAGE) if not (ROOT / name).is_file()
    ] == []
    assert f"ENV {COMMIT_VARIABLE}=${{COMMIT}}" in IMAGE
    # No folder that the image needs is ignored.
    assert not {
        "requirements",
        "megatron",
        "configs",
        "tools",
        "tests",
        "docs",
        "benchmarks",
    } & set(ignored)


def test_one_version_of_torch():
    versions = set(re.findall(r"torch==([\d.]+)", IMAGE + (ROOT / "Makefile").read_text()))
    assert len(versions) == 1
    (line,) = [
        line
        for line in (ROOT / "requirements/core.txt").read_text().splitlines()
        if line.startswith("torch")
    ]
    assert versions.pop() in Requirement(line).specifier


def test_the_documentation_target_installs_nothing(tmp_path):
    environment = tmp_path / "environment"
    command = ["make", "--no-print-directory", "docs", f"VENV={environment}"]
    docs = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert docs.returncode != 0
    assert str(environment) in docs.stderr
    assert "make setup" in docs.stderr
    assert not environment.exists()
    # `make lint` must work in a clean clone.
    lint = subprocess.run(
        ["make", "-n", "lint", f"VENV={environment}"], cwd=ROOT, capture_output=True, text=True
    )
    assert lint.stdout.index("requirements/dev.txt") < lint.stdout.index("sphinx")
    # So is the command kerple, which the documentation uses.
    assert "--editable ." in lint.stdout
