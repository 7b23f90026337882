"""Tables in the terminal."""

import re

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from megatron.reporting.tables import DAGGER, Section, Table

MAX_WIDTH = 100_000


def print_table(console: Console, table: Table) -> None:
    """Print a table of a report.

    Cells that do not fit into a terminal are wrapped between words; nothing is cut. Files and pipes
    have no width.
    """
    # The title of a section is a row of a single cell.
    rows: list[list[Text]] = []
    for line in table.lines:
        if isinstance(line, Section):
            rows.append([Text(line.title, style="bold")])
            continue
        row = list(map(Text, line.labels))
        for cell in line.cells:
            text = Text(cell.text)
            if cell.best:
                text.style = "bold"
            if cell.worse:
                text.append(f" {DAGGER}")
            row.append(text)
        rows.append(row)

    # Labels are left-aligned, the other columns right-aligned. A column has room for its words.
    title = Text(table.title)
    grid = RichTable(title=title, title_justify="left", box=HORIZONTALS, padding=(0, 1, 0, 0))
    for index, header in enumerate(table.headers):
        texts = [row[index].plain for row in rows if index < len(row)]
        words = re.findall(r"± \S+|\S+", " ".join([header, *texts]))
        grid.add_column(Text(header), justify="right", min_width=max(map(len, words), default=0))
    for column in grid.columns[: len(table.label_columns)]:
        column.justify = "left"
    for row in rows:
        if len(row) == 1:
            grid.add_section()
        grid.add_row(*row)

    # Wrap the cells of a table that is too wide: rich does not shrink columns reliably.
    unlimited = console.options.update_width(MAX_WIDTH)
    if console.is_terminal and console.measure(grid, options=unlimited).maximum > console.width:
        for column in grid.columns:
            column.width = column.min_width
    grid.width = console.measure(grid, options=unlimited).maximum
    console.print(grid, crop=False, soft_wrap=False)
