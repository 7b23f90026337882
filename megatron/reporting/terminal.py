"""Tables in the terminal: as narrow as their contents allow, with no cell truncated."""

from collections.abc import Sequence

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from megatron.reporting.tables import DAGGER, Section, Table

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
    rows: list[list[Text]] = []
    for line in table.lines:
        if isinstance(line, Section):
            rows.append([Text(line.title, style="bold"), *[Text()] * (len(table.headers) - 1)])
        else:
            cells = [Text(cell.text, style="bold" if cell.best else "") for cell in line.cells]
            for text, cell in zip(cells, line.cells, strict=True):
                text.append(f" {DAGGER}" if cell.worse else "")
            rows.append([*map(Text, line.labels), *cells])
    texts = [[text.plain for text in row] for row in rows]
    result = compact_table(table.title, table.headers, texts, len(table.label_columns))
    for line, row in zip(table.lines, rows, strict=True):
        if isinstance(line, Section):
            result.add_section()
        result.add_row(*row)
    return result
