"""The commands in the README: marked ones are run unchanged; for the others, the configuration files are loaded."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import load_config
from tests.support.runs import ROOT, environment

BLOCK = re.compile(r"(<!-- these commands are run.*?-->\n)?```bash\n(.*?)```", re.DOTALL)


def commands(run: bool) -> list[str]:
    """The lines of the README's marked shell blocks if `run`, otherwise of the other blocks."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    return [line for marked, text in blocks if bool(marked) == run for line in text.strip().splitlines()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder that looks like a fresh clone, where the commands may write."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in {"data", "runs", ".venv", ".git"}:
            (folder / path.name).symlink_to(path)
    return folder


def test_marked_commands_run(checkout):
    lines = commands(run=True)
    assert len(lines) >= 6
    env = {**environment(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    outputs = {}
    for line in lines:
        done = subprocess.run(["bash", "-ec", line], cwd=checkout, env=env, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        outputs[line.split()[-1] if "load_model" not in line else "load_model"] = done.stdout
    assert "iteration 20/20" in outputs["train-iters=20"]
    resumed = outputs["train-iters=25"]
    assert "iteration 25/25" in resumed
    assert "iteration 20" in resumed
    assert "window@128" in outputs["window@128"]
    assert "kerple_log" in outputs["load_model"]
    assert "all weights are finite" in outputs["runs/small"]
    released = outputs["train-iters=30"]
    assert "global_step25: not saved by this project; loaded weights and iteration" in released
    assert "iteration 30/30" in released


def test_configurations_of_the_other_commands_load():
    lines = [line.split("#")[0] for line in commands(run=False)]
    trainings = [shlex.split(line) for line in lines if "train.py" in line]
    assert len(trainings) == 4
    for words in trainings:
        assert words[:5] == ["python", "deepy.py", "train.py", "-d", "configs"]
        files, _, overrides = (" ".join(words[5:])).partition(" --set ")
        assert load_config(files.split(), "configs", overrides.split()).model.num_layers == 12
    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)


def test_relative_links_exist():
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
