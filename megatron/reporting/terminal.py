"""Tables in the terminal: as narrow as their contents allow, with no cell truncated."""

from collections.abc import Sequence

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from megatron.reporting.tables import DAGGER, Section, Table

UNBOUNDED_WIDTH = 200
MAX_WIDTH = 100_000
CONTINUED = " (continued)"


def standard_output() -> Console:
    """The standard output. Files and pipes have no width, so tables are not wrapped to 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=UNBOUNDED_WIDTH)


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

    If the columns do not fit into a terminal, they are printed as several tables, each with the label columns. Headers
    may wrap between words, cells do not. Lines of a table that is still too wide are wrapped by the terminal.

    Args:
        label_columns: number of left-aligned columns; the others are right-aligned.
    """
    width = console.width if console.is_terminal else MAX_WIDTH
    unlimited = console.options.update_width(MAX_WIDTH)
    last = label_columns
    while True:
        first, last = last, len(headers) + 1
        while True:
            last -= 1
            table = _rich_table(title, headers, rows, label_columns, range(first, last))
            narrowest, widest = console.measure(table, options=unlimited)
            if narrowest <= width or last <= first + 1:
                break
        if widest > width:
            for column in table.columns:
                column.width = column.min_width  # rich does not shrink columns reliably
        console.print(table, crop=False)
        if last == len(headers):
            return
        title = title if title.endswith(CONTINUED) else title + CONTINUED


def _rich_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[Text]], label_columns: int, values: range
) -> RichTable:
    """The label columns, and the value columns with these indices."""
    table = RichTable(title=Text(title), title_justify="left", box=HORIZONTALS, padding=(0, 1, 0, 0))
    columns = [*range(label_columns), *values]
    for index in columns:
        cells = [row[index].plain for row in rows if index < len(row)]
        width = max(map(len, (*headers[index].split(), *cells)), default=0)
        table.add_column(Text(headers[index]), justify="left" if index < label_columns else "right", min_width=width)
    for row in rows:
        if len(row) == 1:
            table.add_section()
        table.add_row(*row) if len(row) == 1 else table.add_row(*(row[index] for index in columns))
    return table
