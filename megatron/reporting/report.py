"""The report of tools/report.py and tools/sweep.py: tables, figures and an HTML page from stored results."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from kerple.positional.registry import canonical_name
from megatron.checkpoint.directory import find_step, weights_fingerprint
from megatron.evaluation.records import fingerprint_of
from megatron.reporting.aggregate import AnyRecord, Method, Setting, method_of, setting_of
from megatron.reporting.checkpoint_figures import (
    DistanceTable,
    checkpoint_adaptive_figure,
    distance_figures,
    distance_tables,
    effective_length_figure,
)
from megatron.reporting.context import context_figures, context_tables
from megatron.reporting.figures import ReportFigure, passkey_figures, perplexity_figures
from megatron.reporting.formatting import TITLE, slug
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
from megatron.reporting.published import corpus_name, display_name, line_numbers
from megatron.reporting.references import bibtex
from megatron.reporting.speed import benchmark_tables, step_time_tables, step_times
from megatron.reporting.style import SCREEN, Style
from megatron.reporting.tables import Table, comma_separated, latex, markdown
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

Named = TypeVar("Named", Table, ReportFigure)


@dataclass
class Sources:
    """The inputs of a report.

    Attributes:
        records: evaluation records.
        checkpoints: folders of further checkpoints whose biases and weights are plotted.
        benchmarks: JSON files of benchmarks/train_step.py.
        notes: filled by the report: what it omits, and why.
    """

    records: Sequence[AnyRecord]
    checkpoints: Sequence[Path] = ()
    benchmarks: Sequence[Path] = ()
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Replace aliases of methods by their primary names."""
        records = []
        for record in self.records:
            pos_emb, bracket, options = method_of(record).pos_emb.partition(" (")
            records.append({**record, "pos_emb": canonical_name(pos_emb) + bracket + options})
        self.records = records


def write_report(
    sources: Sources,
    directory: str | os.PathLike[str],
    title: str = TITLE,
    reference: Method = REFERENCE,
    style: Style = SCREEN,
) -> Path:
    """Write `report.html`, `tables/NAME.{md,csv,tex}`, `figures/NAME.{png,pdf}` and `references.bib`. Returns the path
    of `report.html`.

    Args:
        reference: the method that the others are compared with by a t-test.
        style: of the files in `figures/`.

    Raises UserError if there is nothing to report or the folder cannot be written to.
    """
    chapters = _with_unique_names(report_chapters(sources, reference))
    if all(chapter.empty for chapter in chapters):
        raise UserError("there are no results to report")
    folder = Path(directory)
    try:
        for name in ("tables", "figures"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the report to {folder}: {error.strerror or error}") from error
    for chapter in chapters:
        for table in chapter.tables:
            for extension, render in (("md", markdown), ("csv", comma_separated), ("tex", latex)):
                write_atomically(folder / "tables" / f"{table.name}.{extension}", render(table).encode())
        for figure in chapter.figures:
            write_atomically(folder / "figures" / f"{figure.name}.png", figure.render(style))
            write_atomically(folder / "figures" / f"{figure.name}.pdf", figure.render(style, "pdf"))
    notes = {}
    for record in sources.records:
        checkpoint = record.get("checkpoint") or {}
        if checkpoint.get("path"):
            fingerprint = f", fingerprint {checkpoint['fingerprint']}" if checkpoint.get("fingerprint") else ""
            notes[checkpoint["path"]] = (
                f"{record['pos_emb']}, {corpus_name(record.get('corpus'))}, seed {record.get('seed')}: "
                f"{checkpoint['path']}, iteration {checkpoint.get('iteration')}{fingerprint}."
            )
    source_notes = [*notes.values(), *(f"Kernels of {path}." for path in sources.checkpoints), *sources.notes]
    source_chapter = Chapter("sources", "Sources of the results", notes=source_notes)
    if references := bibtex(record["pos_emb"] for record in sources.records):
        write_atomically(folder / "references.bib", references.encode())
    path = folder / "report.html"
    write_atomically(path, render_page(title, _lead(sources.records), [*chapters, source_chapter]).encode())
    return path


def _with_unique_names(chapters: Iterable[Chapter]) -> list[Chapter]:
    """The chapters with numbers added to equal names of tables or figures: different texts can have the same slug."""
    used: dict[tuple[type, str], int] = {}

    def unique(item: Named) -> Named:
        key = type(item), item.name.lower()
        used[key] = used.get(key, 0) + 1
        return item if used[key] == 1 else replace(item, name=f"{item.name}-{used[key]}")

    return [
        replace(chapter, tables=list(map(unique, chapter.tables)), figures=list(map(unique, chapter.figures)))
        for chapter in chapters
    ]


def report_chapters(sources: Sources, reference: Method = REFERENCE) -> list[Chapter]:
    """All chapters; those that the sources have no results for are empty. Adds to `sources.notes`."""
    records = sources.records
    weight_figures, length_figures = _checkpoint_figures(sources)
    time_tables = step_time_tables(step_times(records))
    for path in sources.benchmarks:
        time_tables += benchmark_tables(path)
    return [
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
            "The loss of each method in each inference mode, and the best combinations. Lower is better.",
            tables=mode_tables(records),
            figures=mode_figures(records),
        ),
        Chapter("positions", "Loss by position", figures=position_figures(records)),
        Chapter(
            "context",
            "Context utilization",
            "Loss with only a part of the context minus the loss of the same tokens with the full context. Higher "
            "means that the model gains more from the rest of the context.",
            tables=context_tables(records),
            figures=context_figures(records),
        ),
        Chapter("resolution", "Attention resolution", "Higher is better.", tables=resolution_tables(records)),
        Chapter(
            "passkey",
            "Passkey retrieval",
            "How often the model repeats a number hidden in a text, by text length and by the position of the number: "
            "depth 0 is the beginning of the text, depth 1 just before the question. Higher is better.",
            tables=passkey_tables(records),
            figures=passkey_figures(records),
        ),
        Chapter(
            "kernels",
            "Kernels",
            "The bias that each head adds to the scores, or the weight that it multiplies them by.",
            figures=weight_figures,
        ),
        Chapter("effective-lengths", "Effective lengths", figures=length_figures),
        Chapter("speed", "Training time", tables=time_tables),
    ]


def _checkpoint_figures(sources: Sources) -> tuple[list[ReportFigure], list[ReportFigure]]:
    """(figures of biases, weights and DAPE's scores; figures of effective lengths).

    They show the checkpoint with the lowest seed for each method and setting in the records, then
    `sources.checkpoints`. The effective lengths of all methods of a setting share a figure; they come from the
    records if available.
    """
    recorded_lengths = {
        fingerprint_of(record): [length for layer in record["effective_lengths"] for length in layer]
        for record in sources.records
        if record["kind"] == "effective_length"
    }
    weight_figures: list[ReportFigure] = []
    lengths: dict[Setting, dict[str, list[int]]] = {}
    lowest_seeds: dict[tuple[Setting, str], AnyRecord] = {}
    for record in sources.records:
        if record["kind"] == "extrapolation":
            key = replace(setting_of(record), protocol=""), method_of(record).pos_emb
            if key not in lowest_seeds or (record.get("seed") or 0) < (lowest_seeds[key].get("seed") or 0):
                lowest_seeds[key] = record
    for (setting, pos_emb), record in lowest_seeds.items():
        name = display_name(Method(pos_emb))
        model = f"{name}, {corpus_name(setting.corpus)}"
        model += f", seed {record['seed']}" if record.get("seed") is not None else ""
        tables: list[DistanceTable] = []
        checkpoint = record.get("checkpoint") or {}
        path, iteration = checkpoint.get("path"), checkpoint.get("iteration")
        if path is not None:
            try:
                measured = fingerprint_of(record)
                if measured is not None and weights_fingerprint(find_step(path, iteration)) != measured:
                    raise UserError(
                        f"{path}: iteration {iteration} has other weights than those that were evaluated (fingerprint "
                        f"{measured}); evaluate it again"
                    )
                figure_name = f"{setting.name}-{slug(pos_emb).lower()}"
                adaptive = checkpoint_adaptive_figure(path, iteration, model=model, name=figure_name)
                tables = distance_tables(path, iteration)
            except (UserError, OSError) as error:
                sources.notes.append(f"No kernels are plotted for {model}: {error}.")
            else:
                weight_figures += [adaptive] if adaptive else []
                weight_figures += distance_figures(tables, model=model, name=figure_name)
        head_lengths = recorded_lengths.get(fingerprint_of(record)) or _effective_lengths(tables)
        if head_lengths:
            lengths.setdefault(setting, {})[name] = head_lengths
    pos_embs = dict.fromkeys(method_of(record).pos_emb for record in sources.records)
    numbers = line_numbers({display_name(Method(pos_emb)): pos_emb for pos_emb in pos_embs})
    length_figures = [
        effective_length_figure(by_method, model=corpus_name(setting.corpus), name=setting.name, numbers=numbers)
        for setting, by_method in lengths.items()
    ]

    named_lengths: dict[str, list[int]] = {}
    for folder in sources.checkpoints:
        label = folder.resolve().parent.name if folder.name == "checkpoints" else folder.resolve().name
        adaptive = checkpoint_adaptive_figure(folder, model=label, name=label)
        if adaptive is not None:
            weight_figures.append(adaptive)
            continue
        tables = distance_tables(folder)
        if not tables:
            raise UserError(
                f"{folder}: its positional method is not a function of the distance, so it has no kernel to plot"
            )
        model = f"{display_name(Method(tables[0].pos_emb))}, {label}"
        weight_figures += distance_figures(tables, model=model, name=label)
        if head_lengths := _effective_lengths(tables):
            named_lengths[model] = head_lengths
    if named_lengths:
        length_figures.append(effective_length_figure(named_lengths, model="given checkpoints", name="named"))
    return weight_figures, length_figures


def _effective_lengths(tables: Iterable[DistanceTable]) -> list[int]:
    """The effective lengths of all heads, of all layers if the layers differ."""
    return [
        length for table in tables if table.effective_lengths is not None for length in table.effective_lengths.tolist()
    ]


def _lead(records: Sequence[AnyRecord]) -> str:
    """One sentence about what was evaluated."""
    records = [record for record in records if record["kind"] == "extrapolation"]
    if not records:
        return "Kernels and training time."

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}{'s' * (number != 1)}"

    methods = count(len({record["pos_emb"] for record in records}), "positional method")
    corpora = ", ".join(dict.fromkeys(corpus_name(record.get("corpus")) for record in records))
    seeds = count(len({record.get("seed") for record in records}), "seed")
    lengths = [record["length"] for record in records]
    return f"{methods} on {corpora}, {seeds}, at {min(lengths):,} to {max(lengths):,} tokens."
