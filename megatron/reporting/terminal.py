"""Tables in the terminal: as narrow as their contents allow, with no cell truncated."""

from collections.abc import Sequence

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from megatron.reporting.tables import DAGGER, Row, Section, Table

UNBOUNDED_WIDTH = 200


def standard_output() -> Console:
    """The standard output. Files and pipes have no width, so tables are not wrapped to 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=UNBOUNDED_WIDTH)


def compact_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], label_columns: int) -> RichTable:
    """An empty table with a column for each header, wide enough for these rows.

    Headers may wrap between words, cells do not. Print it with `crop=False`: in a terminal that is too narrow, the
    terminal then wraps the lines.

    Args:
        label_columns: number of left-aligned columns; the others are right-aligned.
    """
    table = RichTable(title=Text(title), title_justify="left", box=HORIZONTALS, padding=(0, 1, 0, 0))
    for index, header in enumerate(headers):
        width = max(map(len, (*header.split(), *(row[index] for row in rows))))
        table.add_column(Text(header), justify="left" if index < label_columns else "right", min_width=width)
    return table


def terminal_table(table: Table) -> RichTable:
    """A table of a report for the terminal. Print it with `crop=False`."""
    rows = []
    for line in table.lines:
        if isinstance(line, Row):
            cells = (cell.text + (f" {DAGGER}" if cell.worse else "") for cell in line.cells)
            rows.append([*line.labels, *cells])
        else:
            rows.append([line.title] + [""] * (len(table.headers) - 1))
    result = compact_table(table.title, table.headers, rows, len(table.label_columns))
    for line, texts in zip(table.lines, rows, strict=True):
        if isinstance(line, Section):
            result.add_section()
        result.add_row(*map(Text, texts), style="bold" if isinstance(line, Section) else None)
    return result
