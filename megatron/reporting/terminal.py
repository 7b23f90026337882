"""Tables for the terminal: no wider than what they hold, and none of it cut off."""

from collections.abc import Sequence

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table

UNBOUNDED_WIDTH = 200


def standard_output() -> Console:
    """The standard output; a file or a pipe has no width to fit."""
    console = Console()
    return console if console.is_terminal else Console(width=UNBOUNDED_WIDTH)


def compact_table(title: str, titles: Sequence[str], lines: Sequence[Sequence[str]], names: int) -> Table:
    """An empty table with columns for these lines, of which the first `names` hold names, the others numbers.

    A title may be wrapped between its words, a cell is not: print it with `crop=False`, so that a terminal which is
    still too narrow wraps the lines itself.
    """
    table = Table(title=title, title_justify="left", box=HORIZONTALS, padding=(0, 1, 0, 0))
    for index, column in enumerate(titles):
        widest = max(map(len, (*column.split(), *(cells[index] for cells in lines))))
        table.add_column(column, justify="left" if index < names else "right", min_width=widest)
    return table
