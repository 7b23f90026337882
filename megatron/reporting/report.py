"""Stored results -> tables/, figures/ and report.html in one folder."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.reporting import adaptive, figures, plots, speed
from megatron.reporting.drawing import PaperFigure
from megatron.reporting.kernels import Kernel, kernels_of
from megatron.reporting.page import Chapter, page
from megatron.reporting.passkey import passkey_figures, passkey_tables
from megatron.reporting.published import display_name
from megatron.reporting.rendering import comma_separated, latex, markdown
from megatron.reporting.results import Method, Setting, method_of, setting_of, slug
from megatron.reporting.tables import CORPORA, REFERENCE, perplexity_tables, resolution_tables
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

TITLE = "Length extrapolation"


@dataclass
class Sources:
    """What a report is made from: records of results, and whatever else is to be drawn.

    checkpoints: further ones whose kernels are drawn, each a folder. benchmarks: files of benchmarks/train_step.py.
    """

    records: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[Path] = ()
    benchmarks: Sequence[Path] = ()
    notes: list[str] = field(default_factory=list)


def write_report(
    sources: Sources, directory: str | os.PathLike[str], title: str = TITLE, reference: Method = REFERENCE
) -> Path:
    """Write `report.html`, `tables/NAME.{md,csv,tex}` and `figures/NAME.{png,pdf}`; returns the path of the first.

    Raises UserError when there is nothing to report, or the folder cannot be written to.
    """
    chapters = report_chapters(sources, reference)
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
            for ending, render in (("md", markdown), ("csv", comma_separated), ("tex", latex)):
                write_atomically(folder / "tables" / f"{table.name}.{ending}", render(table).encode())
        for figure in chapter.figures:
            write_atomically(folder / "figures" / f"{figure.name}.png", figure.png())
            write_atomically(folder / "figures" / f"{figure.name}.pdf", figure.pdf())
    provenance = Chapter("sources", "Where the numbers come from", sentences=_provenance(sources))
    path = folder / "report.html"
    write_atomically(path, page(title, _lead(sources.records), [*chapters, provenance]).encode())
    return path


def report_chapters(sources: Sources, reference: Method = REFERENCE) -> list[Chapter]:
    """Everything the sources fill; what is missing on the way is added to `sources.notes`."""
    records = sources.records
    kernels, lengths = _kernels(sources)
    speeds = speed.speeds(records)
    timing = speed.speed_tables(speeds)
    for path in sources.benchmarks:
        timing += speed.benchmark_tables(path)
    return [
        Chapter(
            "perplexity",
            "Perplexity by length",
            "What the models max_kv_len on texts as long as those they were trained on, and longer. Lower is better.",
            tables=perplexity_tables(records, reference),
            figures=curves(records),
        ),
        Chapter("positions", "Perplexity by position", figures=figures.position_figures(records)),
        Chapter("resolution", "Attention resolution", "Higher is better.", tables=resolution_tables(records)),
        Chapter(
            "passkey",
            "Passkey retrieval",
            "How often a model gives back a number hidden in a text, by the length of the text and where the number "
            "stands in it: at depth 0 at the beginning, at depth 1 just before the question. Higher is better.",
            tables=passkey_tables(records),
            figures=passkey_figures(records),
        ),
        Chapter("kernels", "Kernels", "What each head adds to the scores, or multiplies them by.", figures=kernels),
        Chapter("effective-lengths", "Effective lengths", figures=lengths),
        Chapter("speed", "Training time", tables=timing),
    ]


def curves(records: Sequence[Mapping[str, Any]]) -> list[PaperFigure]:
    """Perplexity over length with a band of a standard deviation, a figure per corpus, training length, protocol."""
    by_setting: dict[Setting, list[Mapping[str, Any]]] = {}
    for record in records:
        if record["kind"] == "extrapolation":
            by_setting.setdefault(setting_of(record), []).append(record)
    found = []
    for setting, rows in by_setting.items():
        corpus = CORPORA.get(setting.corpus.lower(), setting.corpus)
        title = f"{corpus}, trained at length {setting.train_length}" if setting.train_length else corpus
        seeds = len({row.get("seed") for row in rows})
        caption = f"Perplexity over the length of the text, protocol {setting.protocol}." + (
            f" Lines: means; bands: a standard deviation to each side, over {seeds} seeds." if seeds > 1 else ""
        )
        methods = dict.fromkeys(display_name(method_of(row)) for row in rows)
        named = [{**row, "pos_emb": display_name((method_of(row)[0], "full"))} for row in rows]
        found.append(
            PaperFigure(
                f"extrapolation-{setting.name}",
                title,
                caption,
                f"Lines of the perplexity over the length for {', '.join(methods)}.",
                plots.figure(named, ""),
            )
        )
    return found


def _kernels(sources: Sources) -> tuple[list[PaperFigure], list[PaperFigure]]:
    """Kernels of one seed per method, corpus and training length; effective lengths of these, from the results where
    they are there, all methods of a corpus and training length in one figure; then those of the checkpoints that were
    named.
    """
    drawn: list[PaperFigure] = []
    stored = {
        _fingerprint(record): [end for layer in record["effective_lengths"] for end in layer]
        for record in sources.records
        if record["kind"] == "effective_length"
    }
    lengths: dict[Setting, dict[str, list[int]]] = {}
    for (setting, pos_emb), record in _one_seed(sources.records).items():
        corpus = CORPORA.get(setting.corpus.lower(), setting.corpus)
        name, file = display_name((pos_emb, "full")), f"{setting.name}-{slug(pos_emb)}"
        of = f"{name}, {corpus}" + (f", seed {record['seed']}" if record.get("seed") is not None else "")
        found, adapted = _try_checkpoint(record.get("checkpoint") or {}, sources, of, file)
        drawn += adapted
        if found:
            drawn += figures.kernel_figures(found, of=of, name=file)
        ends = stored.get(_fingerprint(record)) or _ends(found)
        if ends:
            lengths.setdefault(setting, {})[name] = ends
    together = [
        figures.effective_length_figure(
            found, of=CORPORA.get(setting.corpus.lower(), setting.corpus), name=setting.name
        )
        for setting, found in lengths.items()
    ]
    named: dict[str, list[int]] = {}
    for folder in sources.checkpoints:
        label = folder.resolve().parent.name if folder.name == "checkpoints" else folder.resolve().name
        found, adapted = kernels_of(folder), adaptive.figure_of(folder, of=label, name=label)
        if adapted is not None:
            drawn.append(adapted)
            continue
        if not found:
            raise UserError(f"{folder}: its positional method is no function of the distance, so there is no kernel")
        of = f"{display_name((found[0].pos_emb, 'full'))}, {label}"
        drawn += figures.kernel_figures(found, of=of, name=label)
        named |= {of: ends} if (ends := _ends(found)) else {}
    if named:
        together.append(figures.effective_length_figure(named, of="named checkpoints", name="named"))
    return drawn, together


def _ends(kernels: Sequence[Kernel]) -> list[int]:
    """The effective lengths of all heads, of all layers where each has its own."""
    return [end for one in kernels if one.effective_lengths is not None for end in one.effective_lengths.tolist()]


def _one_seed(records: Iterable[Mapping[str, Any]]) -> dict[tuple[Setting, str], Mapping[str, Any]]:
    """The record of the lowest seed for each (corpus, training length, size of model) and method."""
    found: dict[tuple[Setting, str], Mapping[str, Any]] = {}
    for record in records:
        if record["kind"] != "extrapolation":
            continue
        setting = setting_of(record)
        key = replace(setting, protocol=""), method_of(record)[0]
        if key not in found or (record.get("seed") or 0) < (found[key].get("seed") or 0):
            found[key] = record
    return found


def _try_checkpoint(
    checkpoint: Mapping[str, Any], sources: Sources, of: str, name: str
) -> tuple[list[Kernel], list[PaperFigure]]:
    """The kernels of a checkpoint that a record names, and DAPE's figure; a note where it cannot be read."""
    origin, iteration = checkpoint.get("path"), checkpoint.get("iteration")
    if origin is None:
        return [], []
    try:
        figure = adaptive.figure_of(origin, iteration, of=of, name=name)
        return kernels_of(origin, iteration), [figure] if figure is not None else []
    except (UserError, OSError) as error:
        sources.notes.append(f"No kernels are drawn of a checkpoint that cannot be read: {error}.")
        return [], []


def _fingerprint(record: Mapping[str, Any]) -> str | None:
    return (record.get("checkpoint") or {}).get("fingerprint")


def _lead(records: Sequence[Mapping[str, Any]]) -> str:
    scored = [record for record in records if record["kind"] == "extrapolation"]
    if not scored:
        return "Kernels and timing."
    methods = len({record["pos_emb"] for record in scored})
    corpora = list(dict.fromkeys(CORPORA.get(s.corpus.lower(), s.corpus) for s in map(setting_of, scored)))
    seeds = len({record.get("seed") for record in scored})
    lengths = sorted({record["length"] for record in scored})
    return (
        f"{_count(methods, 'positional method')} on {', '.join(corpora)}, {_count(seeds, 'seed')}, "
        f"at {lengths[0]:,} to {lengths[-1]:,} tokens."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _provenance(sources: Sources) -> list[str]:
    """One sentence per checkpoint, then what could not be shown."""
    found = {}
    for record in sources.records:
        checkpoint = record.get("checkpoint") or {}
        if checkpoint.get("path"):
            label = f"{record.get('pos_emb')}, {setting_of(record).corpus}, seed {record.get('seed')}"
            fingerprint = f", fingerprint {checkpoint['fingerprint']}" if checkpoint.get("fingerprint") else ""
            found[checkpoint["path"]] = (
                f"{label}: {checkpoint['path']}, iteration {checkpoint.get('iteration')}{fingerprint}."
            )
    return [*found.values(), *(f"Kernels of {folder}." for folder in sources.checkpoints), *sources.notes]
