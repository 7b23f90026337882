"""The commands in the README: marked ones are run unchanged, with a smaller model in
configs/demo.yml, in forks of a process that has imported their modules; for the others, the
configuration files are loaded. Its Python example is run, too.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from megatron.config import load_config
from megatron.config.yaml_files import read_file
from megatron.data.indexed_dataset import read_manifest
from megatron.evaluation.records import read_results
from megatron.utils.environment import has_bf16_instructions
from tests.support.commands import make_checkout, run_here
from tests.support.fork_server import ForkServer
from tests.support.runs import ROOT, environment

SMALL = {"num-layers": 1, "hidden-size": 32, "eval-iters": 1, "extrapolation-tokens": 2048}
PREPARE = "kerple prepare python_stdlib"

BLOCK = re.compile(r"(<!-- these commands are run.*?-->\n)?```bash\n(.*?)```", re.DOTALL)


def commands(run: bool) -> list[str]:
    """The lines of the marked shell blocks of both documents if `run`, otherwise of the README's
    other blocks.
    """
    documents = ("README.md", "docs/checkpoints.md") if run else ("README.md",)
    blocks = [
        block for document in documents for block in BLOCK.findall((ROOT / document).read_text())
    ]
    return [
        line for marked, text in blocks if bool(marked) == run for line in text.strip().splitlines()
    ]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder that looks like a fresh clone, where the commands may write. The demo trains the
    real demo.yml.
    """
    folder = make_checkout(tmp_path_factory.mktemp("checkout"), "configs")
    (folder / "configs").mkdir()
    for path in (ROOT / "configs").iterdir():
        if path.name != "demo.yml":
            (folder / "configs" / path.name).symlink_to(path)
    keys = {entry.key: entry.value for entry in read_file(ROOT / "configs" / "demo.yml")}
    assert keys.keys() >= SMALL.keys()
    (folder / "configs" / "demo.yml").write_text(json.dumps({**keys, **SMALL}))
    return folder


def run_line(line: str, folder: Path, fork_server: ForkServer) -> str:
    """Run a command line, `[python] SCRIPT ...` or `python -c CODE`, in a fork;
    returns its output.
    """
    python, *words = shlex.split(re.sub("^kerple ", "python kerple_command.py ", line))
    assert python == "python"
    if words[0] == "-c":
        (folder / "code.py").write_text(words[1])
        words = ["code.py"]
    with pytest.MonkeyPatch.context() as context:
        context.setattr(subprocess, "Popen", fork_server.Popen)
        command, options = [sys.executable, *words], {"cwd": folder, "env": environment()}
        done = subprocess.run(command, **options, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def prepared(checkout, tmp_path_factory) -> Path:
    """The checkout, with some modules of the standard library as its corpus."""
    library = tmp_path_factory.mktemp("library")
    for path in Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"):
        shutil.copy(path, library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
        run_here(PREPARE.replace("kerple", "python kerple_command.py"), checkout, patch)
    manifest = read_manifest(checkout / "data" / "python_stdlib" / "python_stdlib_text_document")
    assert manifest.documents > 30
    assert manifest.text_bytes > 800_000
    return checkout


@pytest.mark.ci
def test_marked_commands_run(prepared, fork_server):
    lines = commands(run=True)
    assert len(lines) >= 6
    assert lines.count(PREPARE) == 1
    outputs = {}
    for line in lines:
        if line != PREPARE:
            name = "load_model" if "load_model" in line else line.split()[-1]
            outputs[name] = run_line(line, prepared, fork_server)
    assert "iteration 20/20" in outputs["train-iters=20"]
    resumed = outputs["train-iters=25"]
    assert "iteration 25/25" in resumed
    assert "iteration 20" in resumed
    assert "window@128" in outputs["window@128"]
    assert "kerple_log" in outputs["load_model"]
    assert "load=runs/small/kerple_log_checkpoints" in outputs["runs/small"]
    assert "--- sample 2 of 2, 32 tokens ---" in outputs["temperature=0.8"]
    first, second = re.split("--- sample .*---\n", outputs["temperature=0.8"])[1:]
    assert first != second
    assert not (prepared / "samples.txt").exists()


@pytest.mark.ci
def test_the_demo_writes_a_report_and_skips_finished_runs(prepared, fork_server):
    """`tools/demo.py` with a few iterations of one small model, on the corpus of this test."""
    keys = {entry.key: entry.value for entry in read_file(ROOT / "configs" / "sweeps" / "demo.yml")}
    keys |= {
        "output": "runs/small_demo",
        "config-dir": "configs",
        "axes": {"pos_emb": ["pos_emb/kerple_log.yml"]},
    }
    keys |= {
        "set": {"train-iters": 4, "lr-decay-iters": 4},
        "evaluation": {**keys["evaluation"], "tokens": 2048},
    }
    (prepared / "small_demo.yml").write_text(json.dumps(keys))
    line = "python tools/demo.py small_demo.yml"
    printed = run_line(line, prepared, fork_server)
    precision = "bfloat16" if has_bf16_instructions() else "fp32"
    assert printed.startswith(f"training in {precision}\n")
    assert "[1/1] kerple_log: finished" in printed
    assert "kerple_log: from 128 to 2,048 tokens the loss" in printed
    folder = prepared / "runs" / "small_demo"
    run = folder / "runs" / "kerple_log"
    assert json.loads((run / "config.yml").read_text())["precision"] == precision
    records = read_results(run / "evaluation")
    assert [record["length"] for record in records] == [128, 512, 2048]
    for record in records:
        values = [record[name] for name in ("pos_emb", "mode", "train_length", "tokens")]
        assert values == ["kerple_log", "full", 128, 2048]
    assert "kerple_log" in (folder / "report" / "report.html").read_text()
    assert "1 runs, 1 of them already finished" in run_line(line, prepared, fork_server)


def test_the_example_in_python():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["context"].shape == (2, 4, 100, 16)
    names["context"].sum().backward()
    assert names["attention"].positional.bias_p.grad.any()


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
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
