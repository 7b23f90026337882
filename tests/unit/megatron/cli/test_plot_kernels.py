"""The command line of tools/plot_kernels.py."""

from megatron.cli import plot_kernels


def test_options(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(plot_kernels, "write_page", lambda *arguments: calls.append(arguments) or ["page.md", "a.png"])
    plot_kernels.main([])
    plot_kernels.main(["--output", "page.md", "--checkpoint", "a", "b"])
    assert calls == [("runs/plots/positional-methods.md", []), ("page.md", ["a", "b"])]
    assert capsys.readouterr().out.splitlines() == ["wrote page.md and 1 pictures"] * 2
