"""The command line of tools/plot_kernels.py."""

import runpy
import sys

import pytest

from megatron.cli import plot_kernels
from megatron.utils.errors import UserError
from tests.support.runs import ROOT


def test_options(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(plot_kernels, "write_page", lambda *arguments: calls.append(arguments) or ["page.md", "a.png"])
    plot_kernels.main([])
    plot_kernels.main(["--output", "page.md", "--checkpoint", "a", "b"])
    assert calls == [("runs/plots/positional-methods.md", []), ("page.md", ["a", "b"])]
    assert capsys.readouterr().out.splitlines() == ["wrote page.md and 1 pictures"] * 2


def test_the_tool_reports_missing_checkpoints(tmp_path, monkeypatch, capsys):
    arguments = ["plot_kernels.py", "--output", str(tmp_path / "page.md"), "--checkpoint", str(tmp_path / "missing")]
    with pytest.raises(UserError, match="missing"):
        plot_kernels.main(arguments[1:])
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "tools" / "plot_kernels.py"), run_name="__main__")
    assert capsys.readouterr().err.startswith("error: ")
