"""The report of `kerple report` and `kerple sweep`: tables, figures and an HTML page from stored
results.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kerple.positional.registry import canonical_name
from megatron.reporting.aggregate import AnyRecord, Method, method_of
from megatron.reporting.figures import ReportFigure, passkey_figures, perplexity_figures
from megatron.reporting.formatting import TITLE
from megatron.reporting.html import Chapter, render_page
from megatron.reporting.modes import mode_figures, mode_tables
from megatron.reporting.paper_tables import (
    REFERENCE,
    difference_tables,
    passkey_tables,
    perplexity_tables,
    resolution_tables,
)
from megatron.reporting.positions import position_figures
from megatron.reporting.published import corpus_name
from megatron.reporting.speed import step_time_tables, step_times
from megatron.reporting.tables import latex, markdown
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically, write_errors


@dataclass
class Sources:
    """The inputs of a report.

    Attributes:
        records: evaluation records.
        checkpoints: folders of further checkpoints whose biases and weights are plotted.
        weight_figures, length_figures: see `megatron.plots.checkpoints.add_weight_figures`.
        notes: filled by `add_weight_figures` and `write_report`: what is left out, and why, and
            files of earlier reports.
    """

    records: Sequence[AnyRecord]
    checkpoints: Sequence[Path] = ()
    weight_figures: list[ReportFigure] = field(default_factory=list)
    length_figures: list[ReportFigure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Replace aliases of methods by their primary names."""
        records = []
        for record in self.records:
            records.append({**record, "pos_emb": primary_name(method_of(record).pos_emb)})
        self.records = records


def primary_name(pos_emb: str) -> str:
    """The `pos_emb` of a record, which can have options, with the primary name of its method."""
    name, bracket, options = pos_emb.partition(" (")
    return canonical_name(name) + bracket + options


def write_report(
    sources: Sources,
    directory: str | os.PathLike[str],
    title: str = TITLE,
    reference: Method = REFERENCE,
) -> Path:
    """Write `report.html`, `tables/NAME.{md,tex}` and `figures/NAME.{png,pdf}`. Returns the path of
    `report.html`.

    reference: the method that the others are compared with by a t-test. Raises UserError if there
    is nothing to report or the folder cannot be written to.
    """
    # The chapters in the order of the report.
    records = sources.records
    times = step_times(records, sources.notes)
    chapters = [
        Chapter(
            "perplexity",
            "Perplexity by length",
            "Perplexity at the training length and beyond. Lower is better.",
            tables=perplexity_tables(records, reference) + difference_tables(records, reference),
            figures=perplexity_figures(records),
        ),
        Chapter(
            "modes",
            "Inference modes",
            "The loss of each method in each inference mode. Lower is better.",
            tables=mode_tables(records),
            figures=mode_figures(records),
        ),
        Chapter("positions", "Loss by position", figures=position_figures(records)),
        Chapter(
            "resolution",
            "Attention resolution",
            "Higher is better.",
            tables=resolution_tables(records),
        ),
        Chapter(
            "passkey",
            "Passkey retrieval",
            "How often the model repeats a number hidden in a text, by text length and by the "
            "position of the number: depth 0 is the beginning of the text, depth 1 just before the "
            "question. Higher is better.",
            tables=passkey_tables(records),
            figures=passkey_figures(records),
        ),
        Chapter(
            "kernels",
            "Kernels",
            "The bias that each head adds to the scores, or the weight that it multiplies them by.",
            figures=sources.weight_figures,
        ),
        Chapter("effective-lengths", "Effective lengths", figures=sources.length_figures),
        Chapter("speed", "Training time", tables=step_time_tables(times)),
    ]

    # Create the folders only if there is something to write, and each file once.
    for chapter in chapters:
        names = [f"{table.name}.md" for table in chapter.tables]
        names += [f"{figure.name}.png" for figure in chapter.figures]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise UserError(
                f"two tables or figures would have the file name {repeated[0]}, because the names "
                "of two methods or labels differ in case or punctuation only; evaluate one of them "
                "again with another --label"
            )
    if all(chapter.empty for chapter in chapters):
        raise UserError("there are no results to report")
    folder = Path(directory)
    with write_errors(folder):
        for name in ("tables", "figures"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    # Each table and figure as a file of its own, for papers.
    contents: dict[Path, bytes] = {}
    for chapter in chapters:
        for table in chapter.tables:
            contents[folder / "tables" / f"{table.name}.md"] = markdown(table).encode()
            contents[folder / "tables" / f"{table.name}.tex"] = latex(table).encode()
        for figure in chapter.figures:
            contents[folder / "figures" / f"{figure.name}.png"] = figure.png
            contents[folder / "figures" / f"{figure.name}.pdf"] = figure.pdf
    for path, content in contents.items():
        write_atomically(path, content)

    # Earlier reports may have left others in the folder.
    others = []
    for name in ("tables", "figures"):
        others += [path for path in sorted((folder / name).iterdir()) if path not in contents]
    if others:
        sources.notes.append(
            f"{len(others)} file(s) in {folder}, such as {others[0].relative_to(folder)}, are not "
            "of this report; remove them if you do not need them"
        )

    # What the checkpoints were, and the notes of the sources.
    notes: dict[str, None] = {}
    for record in records:
        checkpoint = record.get("checkpoint") or {}
        if checkpoint.get("path"):
            note = (
                f"{record['pos_emb']}, {corpus_name(record.get('corpus'))}, seed "
                f"{record.get('seed')}: {checkpoint['path']}, iteration {checkpoint['iteration']}, "
                f"fingerprint {checkpoint['fingerprint']}."
            )
            notes[note] = None
    kernels = [f"Kernels of {path}." for path in sources.checkpoints]
    source_notes = [*notes, *kernels, *sources.notes]
    source_chapter = Chapter("sources", "Sources of the results", notes=source_notes)
    path = folder / "report.html"
    write_atomically(path, render_page(title, [*chapters, source_chapter]).encode())
    return path
