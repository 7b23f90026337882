"""docs/tutorial.md and examples/tutorial.ipynb: the same commands and files. The notebook runs with
a small text; a command that fails stops it.
"""

import os
import re
import shlex
import shutil
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from megatron.cli.generate import main as generate
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.runs import ROOT, environment

BLOCK = re.compile(r"```(?:bash|python|yaml)\n(.*?)```", re.DOTALL)
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


def test_the_notebook_has_the_commands_and_files_of_the_page():
    cells = [
        cell.source
        for cell in nbformat.read(NOTEBOOK, as_version=4).cells
        if cell.cell_type == "code"
    ]
    blocks = BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text())
    assert len(blocks) == 7
    commands = "\n".join(cells).replace("\n!", "\n").removeprefix("!")
    for block in blocks:
        assert block.strip() in commands


def test_the_page_generates_text(tmp_path, capsys):
    (line,) = re.findall(
        r"^kerple generate (.*)", (ROOT / "docs" / "tutorial.md").read_text(), re.MULTILINE
    )
    words = [str(tmp_path) if word.startswith("runs/") else word for word in shlex.split(line)]
    write_checkpoint(tmp_path, "kerple_log", write_corpus(tmp_path))
    generate(words)
    assert capsys.readouterr().out.startswith("--- sample 1 of 1, ")


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    (tmp_path / "notes").mkdir()
    for path in (ROOT / "docs").glob("*.md"):
        shutil.copy(path, tmp_path / "notes")
    command = tmp_path / "bin" / "kerple"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/kerple_command.py" "$@"\n')
    command.chmod(0o755)
    variables = {
        **environment(),
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "COLUMNS": "100",
    }
    for name in os.environ.keys() | variables:
        monkeypatch.delenv(name, raising=False) if name not in variables else monkeypatch.setenv(
            name, variables[name]
        )
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        source = cell.source.replace("FOLDER", "notes")
        if cell.cell_type == "code":  # IPython ignores the exit status of a command
            source = re.sub(r"^(!.*)$", r"\1\nassert _exit_code == 0", source, flags=re.MULTILINE)
        cell.source = source
    NotebookClient(
        notebook, timeout=3600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    tables = [
        output.data["text/markdown"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/markdown" in output.get("data", {})
    ]
    assert len(tables) == 4
    assert "| ALiBi | " in tables[0]
    assert "square_root" not in tables[0]
    assert "| square_root | " in tables[2]
    assert " ± " in tables[3]
    assert (tmp_path / "exported" / "model.safetensors").is_file()
