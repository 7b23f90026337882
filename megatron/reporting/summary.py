"""What evaluate.py shows of its records: tables in the terminal and as Markdown, and figures."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron.reporting.aggregate import AnyRecord
from megatron.reporting.figures import perplexity_figures
from megatron.reporting.modes import mode_figures
from megatron.reporting.paper_tables import passkey_tables, perplexity_tables, resolution_tables
from megatron.reporting.tables import markdown
from megatron.reporting.terminal import print_table
from megatron.utils.files import write_atomically


def write_summary(records: Sequence[AnyRecord], folder: Path) -> list[Path]:
    """Print the tables of perplexities, attention resolutions and passkey accuracies, and write
    them as `extrapolation.md`, with the report's figures of perplexities and inference modes as
    `NAME.png`.

    Returns the paths. Raises UserError if a file cannot be written.
    """
    # The tables with their notes.
    console = Console()
    tables = (
        perplexity_tables(records, papers=False)
        + resolution_tables(records)
        + passkey_tables(records)
    )
    for table in tables:
        print_table(console, table)
        for note in table.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)

    # The files.
    text = "\n".join(markdown(table, heading="#") for table in tables)
    contents = {"extrapolation.md": text.encode()}
    for figure in perplexity_figures(records) + mode_figures(records):
        contents[f"{figure.name}.png"] = figure.png
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]
