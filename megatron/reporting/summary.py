"""Results to files: `extrapolation.json`, `extrapolation.md` and `extrapolation.png` in one folder."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron.evaluation.records import Record, extrapolation_records
from megatron.reporting.plots import draw
from megatron.reporting.run_tables import explanation, markdown, rich_table
from megatron.reporting.terminal import standard_output
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

TITLE = "Length extrapolation"


def write_summary(
    records: Sequence[Record],
    directory: str | os.PathLike[str],
    title: str = TITLE,
    *,
    compare_with: str | None = None,
) -> list[Path]:
    """Write records, of one run or of several: losses as JSON `{"rows": [...]}` and as a plot, all as a Markdown table.

    compare_with: as of `tables.table`. Each file is replaced only when its successor is whole. Returns their paths.
    Raises UserError when there is nothing to report or the folder cannot be written to.
    """
    rows = extrapolation_records(records)
    if not rows:
        raise UserError("there are no results to report")
    folder = Path(directory)
    contents = {
        "extrapolation.json": (json.dumps({"rows": rows}, indent=1, allow_nan=False) + "\n").encode(),
        "extrapolation.md": markdown(records, title, compare_with).encode(),
        "extrapolation.png": draw(rows, title),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the report to {folder}: {error.strerror or error}") from error
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]


def print_summary(
    records: Sequence[Record], title: str = TITLE, console: Console | None = None, *, compare_with: str | None = None
) -> None:
    """The table on the screen, with what its numbers are."""
    console = console or standard_output()
    console.print(rich_table(records, title, compare_with), crop=False)
    for sentence in explanation(records, compare_with):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
