"""Tables in the terminal."""

import re
from collections.abc import Sequence

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from megatron.reporting.tables import DAGGER, Section, Table

MAX_WIDTH = 100_000


def print_table(console: Console, table: Table) -> None:
    """Print a table of a report, see `print_rows`."""
    rows: list[list[Text]] = []
    for line in table.lines:
        if isinstance(line, Section):
            rows.append([Text(line.title, style="bold")])
        else:
            cells = [Text(label) for label in line.labels]
            for cell in line.cells:
                text = Text(cell.text, style="bold" if cell.best else "")
                cells.append(text.append(f" {DAGGER}" if cell.worse else ""))
            rows.append(cells)
    print_rows(console, table.title, table.headers, rows, len(table.label_columns))


def print_rows(
    console: Console, title: str, headers: Sequence[str], rows: Sequence[Sequence[Text]], label_columns: int
) -> None:
    """Print rows of one cell per header; a row of a single cell is the title of a section.

    Cells that do not fit into a terminal are wrapped between words; nothing is cut. Files and pipes have no width.

    Args:
        label_columns: number of left-aligned columns; the others are right-aligned.
    """
    table = RichTable(title=Text(title), title_justify="left", box=HORIZONTALS, padding=(0, 1, 0, 0))
    for index, header in enumerate(headers):
        texts = [header, *(row[index].plain for row in rows if index < len(row))]
        words = re.findall(r"± \S+|\S+", " ".join(texts))
        width = max(map(len, words), default=0)
        table.add_column(Text(header), justify="left" if index < label_columns else "right", min_width=width)
    for row in rows:
        if len(row) == 1:
            table.add_section()
        table.add_row(*row)
    unlimited = console.options.update_width(MAX_WIDTH)
    if console.is_terminal and console.measure(table, options=unlimited).maximum > console.width:
        for column in table.columns:
            column.width = column.min_width  # rich does not shrink columns reliably
    table.width = console.measure(table, options=unlimited).maximum
    console.print(table, crop=False, soft_wrap=False)
