"""All entry points and tools: options with dashes, and a clear message if another `megatron`
package hides ours.
"""

import argparse
import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import check_megatron
from megatron.utils.command_line import OptionParser
from tests.support.forks import fork_script

ROOT = Path(__file__).parents[2]
TOOLS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tools").rglob("*.py"))
SCRIPTS = ["train.py", "evaluate.py", "eval.py", "generate.py", "prepare_data.py", *TOOLS]


@pytest.fixture
def foreign_megatron(tmp_path) -> Path:
    """A folder with another package named megatron, as GPT-NeoX's repository has one."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise ImportError('must not be imported')")
    return tmp_path


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_have_dashes_and_accept_underscores(script, monkeypatch, capsys):
    parsers = []
    construct = argparse.ArgumentParser.__init__

    def record(parser, *args, **kwargs):
        construct(parser, *args, **kwargs)
        parsers.append(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "__init__", record)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert exit_.value.code == 0
    assert "usage: " in capsys.readouterr().out
    assert parsers
    assert all(isinstance(parser, OptionParser) for parser in parsers)
    names = {
        name for parser in parsers for action in parser._actions for name in action.option_strings
    }
    assert not [name for name in names if "_" in name]
    unchecked = [
        action.option_strings
        for parser in parsers
        for action in parser._actions
        if action.type in (int, float)
    ]
    assert unchecked in ([], [["--local-rank"]])  # numbers have a range: `integer`, `number`


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "benchmarks").glob("*.py")))
def test_benchmarks_have_help(script, tmp_path):
    """In a fork, because some of them change the environment."""
    with (tmp_path / "output").open("w+") as output:
        process = fork_script(
            [str(ROOT / "benchmarks" / script), "--help"], streams=(-1, output.fileno(), -1)
        )
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        output.seek(0)
        assert "usage: " in output.read()


def test_an_interrupt_during_imports_is_one_line(capsys):
    check_megatron.report_exception(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "interrupted\n"


def test_a_missing_package_during_imports_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["evaluate.py"])
    for name, expected in (("scipy", True), ("megatron.absent", False)):
        error = ModuleNotFoundError(f"No module named {name!r}", name=name)
        check_megatron.report_exception(ModuleNotFoundError, error, None)
        message = capsys.readouterr().err
        assert (
            message.startswith("error: evaluate.py needs the module scipy, which is not installed")
            is expected
        )
        assert ("pip install '.[all]'" in message) is expected


def test_a_foreign_megatron_is_found_without_importing_it(foreign_megatron, monkeypatch):
    assert check_megatron.find_foreign_megatron() is None
    monkeypatch.delitem(sys.modules, "megatron")
    for path in ([str(foreign_megatron), *sys.path], [*sys.path, str(foreign_megatron)]):
        monkeypatch.setattr(sys, "path", path)
        assert (
            check_megatron.find_foreign_megatron() == foreign_megatron / "megatron" / "__init__.py"
        )


@pytest.mark.parametrize(
    "script", ["deepy.py", "train.py", "evaluate.py", "tools/ckpts/inspect_checkpoints.py"]
)
def test_a_foreign_megatron_is_reported_in_one_line(foreign_megatron, script):
    result = subprocess.run(
        [sys.executable, ROOT / script, "--help"],
        env={**os.environ, "PYTHONPATH": str(foreign_megatron)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: another package named megatron hides this project's: "
        f"{foreign_megatron / 'megatron'}; remove {foreign_megatron} from PYTHONPATH, or uninstall "
        "the package\n"
    )


@pytest.mark.parametrize("script", ["deepy.py", *SCRIPTS])
def test_the_check_precedes_all_imports_and_errors_are_handled_in_one_place(script):
    text = (ROOT / script).read_text()
    imports = sorted(
        (node.lineno, name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
        if name == "check_megatron" or name.startswith(("megatron", "kerple"))
    )
    assert imports[0][1] == "check_megatron"
    assert "sys.exit(run_main(" in text.splitlines()[-1]
