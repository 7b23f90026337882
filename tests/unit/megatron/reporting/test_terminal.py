"""Tables in the terminal."""

import io

import pytest
from rich.console import Console

from megatron.reporting.tables import Cell, Row, Section, Table
from megatron.reporting.terminal import print_table


@pytest.mark.parametrize("width", [10, 80])
def test_files_have_no_width(width):
    table = Table(
        "name",
        "A [bold] title",
        ("method",),
        ("a long header", "512"),
        (
            Section("[perplexity]"),
            Row(("kerple_log",), (Cell("23.70 ± 0.47"), Cell("22,621 ± 12", worse=True))),
        ),
    )
    output = io.StringIO()
    print_table(Console(file=output, width=width), table)
    text = output.getvalue()
    for expected in ("[bold]", "[perplexity]", "kerple_log", "23.70 ± 0.47", "22,621 ± 12 †"):
        assert expected in text
    assert "…" not in text


SEVEN_LENGTHS = Table(
    "name",
    "Extrapolation",
    ("method", "train length"),
    ("64", "128", "256", "512", "1024", "2048", "4096"),
    (
        Section("perplexity"),
        Row(("kerple_log", "512"), tuple(Cell(f"{value}.25 ± 0.12") for value in range(11, 18))),
    ),
)


@pytest.mark.parametrize("width", [60, 80, 130])
def test_cells_that_do_not_fit_into_the_terminal_are_wrapped_between_words(width):
    output = io.StringIO()
    print_table(
        Console(file=output, width=width, force_terminal=True, color_system=None), SEVEN_LENGTHS
    )
    text = output.getvalue()
    assert max(map(len, text.splitlines())) <= max(width, 77)  # without spaces, 77 characters
    assert "…" not in text
    positions = [text.index(f"{value}.25") for value in range(11, 18)]
    assert positions == sorted(positions)
    assert text.count("± 0.12") == 7


def test_best_values_are_bold():
    table = Table(
        "name", "title", ("method",), ("512",), (Row(("alibi",), (Cell("2.5", best=True),)),)
    )
    output = io.StringIO()
    print_table(Console(file=output, width=80, force_terminal=True, color_system="standard"), table)
    assert "\x1b[1m2.5\x1b[0m" in output.getvalue()
