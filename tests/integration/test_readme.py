"""The commands in the README: marked ones are run unchanged, with a smaller model in configs/demo.yml, and most of them
in processes that have imported their modules; for the others, the configuration files are loaded. Its Python example is
run, too.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.config import load_config
from megatron.config.yaml_files import read_file
from tests.support.runs import ROOT, environment

SMALL = {"num-layers": 1, "hidden-size": 32, "eval-iters": 1, "extrapolation-tokens": 2048}
# Data preparation and the first training start new interpreters.
NEW_INTERPRETERS = ("kerple prepare", "train-iters=20")

BLOCK = re.compile(r"(<!-- these commands are run.*?-->\n)?```bash\n(.*?)```", re.DOTALL)


def commands(run: bool) -> list[str]:
    """The lines of the marked shell blocks of both documents if `run`, otherwise of the README's other blocks."""
    documents = ("README.md", "docs/checkpoints.md") if run else ("README.md",)
    blocks = [block for document in documents for block in BLOCK.findall((ROOT / document).read_text())]
    return [line for marked, text in blocks if bool(marked) == run for line in text.strip().splitlines()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder that looks like a fresh clone, where the commands may write. test_demo.py trains the real demo.yml."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in {"data", "runs", "configs", ".venv", ".git"}:
            (folder / path.name).symlink_to(path)
    (folder / "configs").mkdir()
    for path in (ROOT / "configs").iterdir():
        if path.name != "demo.yml":
            (folder / "configs" / path.name).symlink_to(path)
    keys = {entry.key: entry.value for entry in read_file(ROOT / "configs" / "demo.yml")}
    assert keys.keys() >= SMALL.keys()
    (folder / "configs" / "demo.yml").write_text(json.dumps({**keys, **SMALL}))
    return folder


def test_marked_commands_run(checkout, fork_server, monkeypatch):
    lines = commands(run=True)
    assert len(lines) >= 6
    started = {name: sum(name in line for line in lines) for name in NEW_INTERPRETERS}
    assert started == dict.fromkeys(NEW_INTERPRETERS, 1)
    env = {**environment(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    outputs = {}
    for line in lines:
        command = re.sub("^kerple ", "python kerple_command.py ", line)
        words = shlex.split(command)
        assert words[0] == "python"
        with monkeypatch.context() as context:
            if any(name in line for name in NEW_INTERPRETERS):
                words = ["bash", "-ec", command]
            else:
                words[0] = sys.executable
                context.setattr(subprocess, "Popen", fork_server.Popen)
            done = subprocess.run(words, cwd=checkout, env=env, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        outputs[line.split()[-1] if "load_model" not in line else "load_model"] = done.stdout
    assert "iteration 20/20" in outputs["train-iters=20"]
    resumed = outputs["train-iters=25"]
    assert "iteration 25/25" in resumed
    assert "iteration 20" in resumed
    assert "window@128" in outputs["window@128"]
    assert "kerple_log" in outputs["load_model"]
    assert "all weights are finite" in outputs["runs/small"]
    assert "--- sample 2 of 2, 32 tokens ---" in outputs["temperature=0.8"]
    first, second = re.split("--- sample .*---\n", outputs["temperature=0.8"])[1:]
    assert first != second
    assert not (checkout / "samples.txt").exists()
    released = outputs["train-iters=30"]
    assert "global_step25: not saved by this project; loaded weights and iteration" in released
    assert "iteration 30/30" in released


def test_the_example_in_python():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["context"].shape == (2, 4, 100, 16)
    names["context"].sum().backward()
    assert names["method"].bias_p.grad.any()


def test_configurations_of_the_other_commands_load():
    lines = [line.split("#")[0] for line in commands(run=False)]
    trainings = [shlex.split(line) for line in lines if "train.py" in line]
    assert len(trainings) == 2
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
