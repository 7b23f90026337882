"""The command `kerple`: its table, its messages, and how an installed wheel runs
outside the clone.
"""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import kerple
from kerple_command import COMMANDS, main, usage
from tests.support.checkpoints import settings_of, write_checkpoint, write_yaml
from tests.support.runs import ROOT, environment


@pytest.fixture
def run(monkeypatch):
    """run(*words): the exit status of `kerple WORDS`."""

    def run_command(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["/bin/kerple", *words])
        try:
            return main()
        except SystemExit as ended:
            return int(ended.code or 0)

    return run_command


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(run, capsys, name):
    assert run(name, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: kerple {name} ")


def test_usage(run, capsys):
    assert run() == run("--help") == 0
    assert capsys.readouterr().out == 2 * f"{usage()}\n"
    assert all(f"  {name} " in usage() for name in COMMANDS)
    assert run("--version") == 0
    assert capsys.readouterr().out == f"kerple-neox {kerple.__version__}\n"
    assert run("trian") == 2
    assert capsys.readouterr().err.startswith(
        "error: 'trian' is not a command; choose one of train, evaluate, "
    )


def test_a_missing_package_is_named_with_the_extra_that_installs_it(run, capsys, monkeypatch):
    for module in [name for name in sys.modules if name.startswith("megatron.cli.re")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "megatron.reporting.report", None)
    assert run("report", "results") == 2
    assert capsys.readouterr().err == (
        "error: kerple report needs the module megatron.reporting.report, which is not installed: "
        "pip install 'kerple-neox[report]' (in a clone: pip install '.[report]')\n"
    )


IMPORTS = """import pkgutil, sys, kerple_command
for name in sorted(kerple_command.COMMANDS, key=("report", "chomsky").__contains__):
    if name == "report":
        figures = [name for name in ("matplotlib", "pandas") if name in sys.modules]
        print("figures:", *figures, file=sys.stderr)
    pkgutil.resolve_name(kerple_command.COMMANDS[name].function)
from megatron.cli import generate
generate.main([sys.argv[1]])
import torch
heavy = ("deepspeed", "megatron.core", "wandb", "tensorboard", "scipy")
unused = [name for name in heavy if name in sys.modules]
print("unused:", *unused, torch.distributed.is_initialized(), file=sys.stderr)"""


@pytest.mark.ci
def test_what_the_commands_import(tmp_path):
    """Only training imports DeepSpeed and megatron-core; no command imports wandb or TensorBoard
    until it logs. Only `report` and `chomsky` import packages for figures before they have checked
    their options. `generate` reads prompts from a pipe and needs no process group.
    """
    write_checkpoint(tmp_path / "run", "kerple_log", "nowhere")
    keys = {
        "load": str(tmp_path / "run"),
        "maximum_tokens": 8,
        "temperature": 1.0,
        "text_gen_type": "interactive",
    }
    config = write_yaml(tmp_path / "all.yml", settings_of("kerple_log", "nowhere", **keys))
    words = [sys.executable, "-c", IMPORTS, str(config)]
    result = subprocess.run(
        words,
        cwd=ROOT,
        env=environment(),
        input="def f\nab\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.encode()) >= 2
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith(("figures:", "unused:"))] == [
        "figures:",
        "unused: False",
    ]


# -- the wheel
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the files that git knows, so that nothing is written into the
    checkout.
    """
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(re.compile(r"(?!tests/|docs/|benchmarks/)").match, listed.split("\0")[:-1]):
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        else:
            target.write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run(
        [*command, "--wheel-dir", str(folder), str(folder / "source")], check=True, timeout=300
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.ci
def test_contents_of_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("METADATA")]
    files = [
        path
        for folder in ("kerple", "megatron")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    ]
    files += [ROOT / "check_megatron.py", ROOT / "kerple_command.py"]
    expected = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    expected |= {f"megatron/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yml")}
    expected -= {name for name in expected if name.endswith(".md")}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "megatron/__init__.py" not in names  # it would hide megatron-core
    assert f"\nVersion: {kerple.__version__}\n" in metadata
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, flags=re.MULTILINE))
    assert {command.extra for command in COMMANDS.values()} - {None} <= extras
    assert extras == {"train", "data", "eval", "report", "tracking", "gpu", "all"}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> dict[str, str]:
    """The environment variables of an environment in which only the wheel is new: it sees this
    one's packages.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    paths = {"purelib", "platlib"}
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    others = {sysconfig.get_path(name) for name in paths}
    (site / "others.pth").write_text("".join(f"{path}\n" for path in sorted(others)))
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, str(wheel)], check=True, timeout=300)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**variables, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}


def run_installed(installed: dict[str, str], folder: Path, line: str, status: int = 0) -> str:
    result = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=installed,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == status, f"{line}\n{result.stdout}\n{result.stderr}"
    return result.stdout + result.stderr


@pytest.mark.slow
def test_a_foreign_megatron_hides_an_installed_one(installed, tmp_path):
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise ImportError('must not be imported')")
    output = run_installed(
        installed, tmp_path, f"PYTHONPATH={tmp_path} kerple train demo.yml", status=2
    )
    assert output.startswith("error: another package named megatron hides this project's: ")
    assert output.count("\n") == 1


@pytest.mark.slow
def test_the_installed_commands(installed, tmp_path):
    """Training to report in an empty folder, with the packaged configurations."""
    where = run_installed(
        installed, tmp_path, "python -c 'import kerple, megatron.cli; print(kerple.__file__)'"
    )
    assert str(ROOT) not in where
    run_installed(installed, tmp_path, "kerple prepare python_stdlib --limit-mb 1 --vocab-size 512")
    train = (
        "kerple train demo.yml pos_emb/alibi --set train-iters=2 eval-iters=1 eval-interval=2 "
        "num-layers=1"
    )
    output = run_installed(installed, tmp_path, train)
    assert "note: demo.yml, pos_emb/alibi.yml: this project's own, from " in output
    checkpoint = "runs/demo/alibi/checkpoints"
    run_installed(
        installed, tmp_path, f"kerple evaluate --checkpoint {checkpoint} --lengths 64 --tokens 512"
    )
    keys = "num_samples=1 maximum_tokens=4 text_gen_type=unconditional"
    run_installed(
        installed, tmp_path, f"kerple generate --checkpoint {checkpoint} --set {keys} -o -"
    )
    assert "alibi" in run_installed(installed, tmp_path, f"kerple inspect {checkpoint}")
    run_installed(installed, tmp_path, "kerple report runs/demo/alibi --output report")
    assert (tmp_path / "report" / "report.html").is_file()
    assert "runs" in run_installed(
        installed, tmp_path, "kerple sweep sweeps/python_stdlib --dry-run"
    )
