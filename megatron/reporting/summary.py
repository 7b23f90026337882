"""What evaluate.py shows of its records: tables in the terminal and as Markdown."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron.reporting.aggregate import AnyRecord
from megatron.reporting.paper_tables import passkey_tables, perplexity_tables, resolution_tables
from megatron.reporting.tables import markdown
from megatron.reporting.terminal import print_table
from megatron.utils.files import write_atomically


def write_summary(records: Sequence[AnyRecord], folder: Path, console: Console | None = None) -> Path:
    """Print the tables of perplexities, attention resolutions and passkey accuracies, and write them as
    `extrapolation.md`. Returns its path. Raises UserError if it cannot be written.
    """
    console = console or Console()
    tables = perplexity_tables(records, papers=False) + resolution_tables(records) + passkey_tables(records)
    for table in tables:
        print_table(console, table)
        for note in table.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)
    path = folder / "extrapolation.md"
    write_atomically(path, "\n".join(markdown(table, heading="#") for table in tables).encode())
    return path
