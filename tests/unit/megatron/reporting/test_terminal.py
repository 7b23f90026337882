"""Tables in the terminal."""

import io

import pytest
from rich.console import Console

from megatron.reporting.tables import Cell, Row, Section, Table
from megatron.reporting.terminal import standard_output, terminal_table


@pytest.mark.parametrize("width", [30, 80])
def test_cells_are_never_truncated(width):
    table = Table(
        "name",
        "A [bold] title",
        ("method",),
        ("a long header", "512"),
        (Section("[perplexity]"), Row(("kerple_log",), (Cell("23.70 ± 0.47"), Cell("22,621 ± 12", worse=True)))),
    )
    output = io.StringIO()
    Console(file=output, width=width).print(terminal_table(table), crop=False)
    text = output.getvalue()
    for expected in ("[bold]", "[perplexity]", "kerple_log", "23.70 ± 0.47", "22,621 ± 12 †"):
        assert expected in text
    assert "…" not in text


def test_best_values_are_bold():
    table = Table("name", "title", ("method",), ("512",), (Row(("alibi",), (Cell("2.5", best=True),)),))
    output = io.StringIO()
    Console(file=output, width=80, force_terminal=True, color_system="standard").print(terminal_table(table))
    assert "\x1b[1m2.5\x1b[0m" in output.getvalue()


def test_files_have_no_width(capsys):
    standard_output().print("x" * 150)
    assert capsys.readouterr().out == "x" * 150 + "\n"
