"""The report of evaluate.py: a table of all measurements in the terminal and as Markdown, a plot of perplexity by
length, and the losses as JSON.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from pandas import Series
from rich.console import Console

from megatron.reporting.aggregate import (
    ALPHA,
    DIFFERENT_TARGETS,
    AnyRecord,
    Measurements,
    Method,
    Setting,
    have_different_targets,
    measurements,
    method_of,
    setting_of,
    significantly_better,
)
from megatron.reporting.differences import DIFFERENCE_NOTE, PairedLosses
from megatron.reporting.figures import perplexity_plot
from megatron.reporting.formatting import NOT_AVAILABLE, TITLE, format_mean, format_number, format_percent
from megatron.reporting.modes import mode_figures
from megatron.reporting.paper_tables import REFERENCE, missing_notes
from megatron.reporting.style import render
from megatron.reporting.tables import DAGGER, Cell, Row, Section, Table, markdown
from megatron.reporting.terminal import print_table
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class Measure:
    """A section of the table: one quantity of the records of one kind. value: a key of a record, or a function."""

    kind: str
    value: str | Callable[[AnyRecord], float | None]
    format: Callable[[Series], str] = format_mean


def _format_error(values: Series) -> str:
    return format_number(values.mean(), digits=2)


MEASURES = {
    PERPLEXITY: Measure("extrapolation", "perplexity"),
    "loss": Measure("extrapolation", "loss"),
    "standard error": Measure("extrapolation", "stderr", _format_error),
    "bits per byte": Measure("extrapolation", "bits_per_byte"),
    "loss, first bin": Measure("positions", lambda record: record["losses"][0] if record["losses"] else None),
    "loss, last bin": Measure("positions", lambda record: record["losses"][-1] if record["losses"] else None),
    "resolution": Measure("resolution", "resolution"),
    "passkey accuracy": Measure("passkey", "accuracy", format_percent),
}


def write_summary(
    records: Sequence[AnyRecord],
    directory: str | os.PathLike[str],
    title: str = TITLE,
    *,
    compare_with: str | None = None,
) -> list[Path]:
    """Write the losses as `extrapolation.json` (`{"rows": [...]}`), the table as `extrapolation.md` and the plot as
    `extrapolation.png`. With several inference modes, there is also a heat map per setting, `modes-SETTING.png`. Each
    file is replaced atomically.

    Args:
        compare_with: see `summary_table`.

    Returns the paths. Raises UserError if there are no losses or the folder cannot be written to.
    """
    rows = [record for record in records if record["kind"] == "extrapolation"]
    if not rows:
        raise UserError("there are no results to report")
    labeled = _label_checkpoints(records)
    perplexities = measurements(labeled, "extrapolation", "perplexity")
    draw = partial(
        perplexity_plot, perplexities, PairedLosses(labeled), title=title, reference=compare_with or REFERENCE.pos_emb
    )
    contents = {
        "extrapolation.json": (json.dumps({"rows": rows}, indent=1, allow_nan=False) + "\n").encode(),
        "extrapolation.md": markdown(summary_table(records, title, compare_with), heading="#").encode(),
        "extrapolation.png": render(draw),
        **{f"{figure.name}.png": figure.render() for figure in mode_figures(labeled)},
    }
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the report to {folder}: {error.strerror or error}") from error
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]


def print_summary(
    records: Sequence[AnyRecord], title: str = TITLE, console: Console | None = None, *, compare_with: str | None = None
) -> None:
    """Print the table and its notes."""
    console = console or Console()
    table = summary_table(records, title, compare_with)
    print_table(console, table)
    for note in table.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def check_comparison(records: Sequence[AnyRecord], compare_with: str | None) -> None:
    """Raises UserError if no method in the summary of these records has the name `compare_with`. Values of the records
    are not read, so this can be checked before they are measured.
    """
    names, methods = _method_names(_label_checkpoints(records)), _method_names(records)
    if compare_with is not None and compare_with not in names:
        reason, remedy = "none of the checkpoints has this method", "add a checkpoint of it to --checkpoint"
        if compare_with in methods:
            reason, remedy = "several checkpoints have this method and the same seed", "name them with --label"
        raise UserError(f"--compare-with {compare_with}: {reason}; choose one of {', '.join(names)}, or {remedy}")


def _method_names(records: Sequence[AnyRecord]) -> list[str]:
    names = [method_of(record).pos_emb for record in records if record["kind"] == "extrapolation"]
    return list(dict.fromkeys(names))


def summary_table(records: Sequence[AnyRecord], title: str = TITLE, compare_with: str | None = None) -> Table:
    """A section per measure, in it a row per method and mode, and a column per length.

    Mode, training length, corpus, protocol and model size are columns if they differ between rows. If the training
    length does not differ, its column is marked with a star, and a last column gives the ratio of the perplexity at the
    largest length to that at the training length, each the mean over the seeds that have both.

    Args:
        compare_with: a method. Perplexities that it significantly improves on are marked, and an additional section
            shows the differences from its losses.

    Raises UserError like `check_comparison`.
    """
    # Sections: the perplexity always, other measures if any record has them.
    check_comparison(records, compare_with)
    records = _label_checkpoints(records)
    measured = {name: measurements(records, measure.kind, measure.value) for name, measure in MEASURES.items()}
    sections = {}
    for name, values in measured.items():
        if name == PERPLEXITY or values.frame["value"].notna().any():
            sections[name] = values.over_depths() if MEASURES[name].kind == "passkey" else values
    perplexities = sections[PERPLEXITY]

    # Columns: labels, lengths, and the ratio of the longest length to the training length.
    lines = list(chain.from_iterable(values.lines for values in measured.values()))
    lengths = sorted(set(chain.from_iterable(values.lengths for values in measured.values())))
    label_columns = _label_columns(lines, list(sections.values()))
    train_lengths = {setting.train_length for setting, _ in lines}
    train_length = train_lengths.pop() if len(train_lengths) == 1 else None
    columns = [f"{length:,}{'*' * (length == train_length)}" for length in lengths]
    has_star, longest = train_length in perplexities.lengths, max(perplexities.lengths, default=0)
    has_ratio = train_length is not None and has_star and longest > train_length
    if has_ratio:
        columns.append(f"{longest:,} / {train_length:,}")

    # Rows: a section per measure, then the differences. A single section needs no title.
    table_lines: list[Row | Section] = []
    for name, values in sections.items():
        table_lines.append(Section(name))
        for setting, method in values.lines:
            cells = [_cell(name, values, setting, method, length, compare_with) for length in lengths]
            if has_ratio:
                ratio = _ratio(values, setting, method, longest, train_length) if name == PERPLEXITY else ""
                cells.append(Cell(ratio))
            table_lines.append(Row(_labels(setting, method, label_columns), tuple(cells)))
    differences = _difference_lines(records, perplexities.lines, lengths, label_columns, compare_with, has_ratio)
    table_lines += differences
    if len(sections) == 1 and not differences:
        del table_lines[0]

    # A star needs an explanation, a comparison its test.
    notes = _notes(records, has_star, compare_with)
    if differences:
        notes.append(DIFFERENCE_NOTE)
    notes += _missing_notes(measured, records)
    return Table(
        "extrapolation", title, tuple(label_columns), tuple(columns), tuple(table_lines), tuple(dict.fromkeys(notes))
    )


def _label_columns(lines: Iterable[tuple[Setting, Method]], sections: Sequence[Measurements]) -> list[str]:
    """`method`, and what differs between rows."""
    columns = ["method"]
    if any(method.mode != "full" for _, method in lines):
        columns.append("mode")
    if len({setting.train_length for setting, _ in lines}) > 1:
        columns.append("trained at")
    for name, part in (("corpus", "corpus"), ("protocol", "protocol"), ("model", "size")):
        if any(len({getattr(setting, part) for setting in values.settings}) > 1 for values in sections):
            columns.append(name)
    return columns


def _labels(setting: Setting, method: Method, columns: Iterable[str]) -> tuple[str, ...]:
    """The texts of these label columns."""
    labels = {
        "method": method.pos_emb,
        "mode": method.mode,
        "trained at": f"{setting.train_length:,}" if setting.train_length else "unknown",
        "corpus": setting.corpus or "unknown",
        "protocol": setting.protocol or "unknown",
        "model": setting.size or "unknown",
    }
    return tuple(labels[column] for column in columns)


def _cell(
    name: str, values: Measurements, setting: Setting, method: Method, length: int, compare_with: str | None
) -> Cell:
    """The value of the measure `name`. A perplexity is marked if that of `compare_with` is significantly better."""
    value = values.values(setting, method, length)
    if value is None:
        return Cell("")
    worse = False
    if name == PERPLEXITY and compare_with not in (None, method.pos_emb):
        reference = values.values(setting, Method(compare_with, method.mode), length)
        worse = reference is not None and significantly_better(reference, value)
    return Cell(MEASURES[name].format(value), worse=worse)


def _ratio(values: Measurements, setting: Setting, method: Method, longest: int, train_length: int | None) -> str:
    """The perplexity at the longest length over that at the training length."""
    by_length = values.by_seed(setting, method)
    if longest not in by_length.index or train_length not in by_length.index:
        return NOT_AVAILABLE
    # Of the same seeds: a run can lack a value at one of the lengths.
    means = by_length.loc[[train_length, longest]].dropna(axis="columns").mean(axis="columns")
    growth = means[longest] / means[train_length]
    if math.isnan(growth):
        return NOT_AVAILABLE
    return f"{growth:.2f}x" if growth < 10 else f"{format_number(growth, 3)}x"


def _difference_lines(
    records: Sequence[AnyRecord],
    lines: Sequence[tuple[Setting, Method]],
    lengths: Sequence[int],
    label_columns: Sequence[str],
    compare_with: str | None,
    has_ratio: bool,
) -> list[Row | Section]:
    """The paired differences of the losses from those of mode `full`, and from those of `compare_with`: a section each
    if a line has another method as counterpart and paired losses.
    """
    counterparts: dict[str, Callable[[Method], Method]] = {
        "the method in mode full": lambda method: Method(method.pos_emb)
    }
    if compare_with is not None:
        counterparts[compare_with] = lambda method: Method(compare_with, method.mode)
    losses = PairedLosses(records)
    table_lines: list[Row | Section] = []
    for name, counterpart in counterparts.items():
        rows = []
        for setting, method in lines:
            other = counterpart(method)
            pairs = [((setting, method, length), (setting, other, length)) for length in lengths]
            if method != other and any(losses.difference(*pair) for pair in pairs):
                cells = [Cell(losses.text(*pair)) for pair in pairs] + [Cell("")] * has_ratio
                rows.append(Row(_labels(setting, method, label_columns), tuple(cells)))
        if rows:
            table_lines += [Section(f"loss minus that of {name}"), *rows]
    return table_lines


def _missing_notes(measured: Mapping[str, Measurements], records: Iterable[AnyRecord]) -> list[str]:
    """Which values are missing and why, once for the measures of a kind of record."""
    notes = []
    by_kind: dict[str, Measurements] = {}
    for name, measure in MEASURES.items():
        by_kind.setdefault(measure.kind, measured[name])
    for values in by_kind.values():
        notes += missing_notes(values, {method: f"{method.pos_emb} ({method.mode})" for method in values.methods})
    for record in records:
        if record["kind"] == "effective_length" and not record["effective_lengths"]:
            notes.append(f"{NOT_AVAILABLE}: {method_of(record).pos_emb}: {record['note']}.")
    return notes


def _label_checkpoints(records: Iterable[AnyRecord]) -> list[AnyRecord]:
    """The records, with the checkpoint added to the name of methods that have two checkpoints with the same seed and
    setting: averaging those would not be averaging over seeds.
    """
    records = list(records)
    keys = ("kind", "pos_emb", "seed", "mode", "train_length", "protocol", "corpus", "length", "depth")
    checkpoints: dict[tuple[object, ...], object] = {}
    ambiguous = set()
    for record in records:
        if record.get("checkpoint"):
            first = checkpoints.setdefault(tuple(record.get(key) for key in keys), record["checkpoint"])
            if first != record["checkpoint"]:
                ambiguous.add(record["pos_emb"])
    labeled = []
    for record in records:
        if record["pos_emb"] in ambiguous and record.get("checkpoint"):
            checkpoint = "{path} at {iteration}".format(**record["checkpoint"])
            record = {**record, "pos_emb": f"{method_of(record).pos_emb} ({checkpoint})"}
        labeled.append(record)
    return labeled


def _notes(records: Sequence[AnyRecord], has_star: bool, compare_with: str | None) -> list[str]:
    """Explanations of the values, one sentence each."""
    # The columns.
    by_kind: dict[str, list[AnyRecord]] = {}
    for record in records:
        by_kind.setdefault(record["kind"], []).append(record)
    losses = by_kind.get("extrapolation", [])
    notes = ["Columns: sequence length in tokens. Lower perplexity, loss (in nats) and bits per byte are better."]
    if has_star:
        notes.append("The star marks the training length.")

    # How many tokens each protocol scores, and whether they are the same.
    for protocol in dict.fromkeys(record["protocol"] for record in losses):
        measured = [record for record in losses if record["protocol"] == protocol]
        counts = sorted({record["tokens"] for record in measured if record["tokens"]})
        if have_different_targets(measured):
            notes.append(f"Protocol {protocol}: {DIFFERENT_TARGETS}")
        elif len(counts) == 1:
            digests = {(record.get("corpus"), record["targets"]) for record in measured if record.get("targets")}
            same = "the same " if len(digests) <= len({corpus for corpus, _ in digests}) else ""
            notes.append(f"Protocol {protocol}: {same}{counts[0]:,} tokens are scored at every length.")
        elif counts:
            notes.append(f"Protocol {protocol}: {counts[0]:,} to {counts[-1]:,} tokens are scored.")

    # Spread and significance over the seeds.
    seeds: dict[tuple[Setting, Method], set[int | None]] = {}
    for record in losses:
        if record["loss"] is not None:
            seeds.setdefault((setting_of(record), method_of(record)), set()).add(record["seed"])
    num_seeds = max(map(len, seeds.values()), default=0)
    if num_seeds > 1:
        fewest = min(map(len, seeds.values()))
        counts_text = f"{num_seeds}" if fewest == num_seeds else f"{fewest} to {num_seeds}"
        notes.append(f"Mean ± standard deviation over {counts_text} seeds.")
    if compare_with is not None:
        notes.append(
            f"{DAGGER}: {compare_with} is significantly better (paired two-sided t-test over the seeds, p < {ALPHA:g})."
            if num_seeds > 1
            else f"With one seed, the variation of {compare_with} and the other methods between seeds is unknown."
        )

    # Standard errors and bins.
    if any(record.get("stderr") is not None for record in losses):
        notes.append(
            "The standard error is that of the loss, over documents (over segments if documents are not known)."
        )
    bins = sorted({len(record["losses"]) for record in by_kind.get("positions", []) if record["losses"]})
    if bins:
        notes.append(
            f"The loss by position was measured in {' or '.join(map(str, bins))} bins; the table shows the first and "
            "the last."
        )

    # The other measures.
    if "resolution" in by_kind:
        notes.append("The attention resolution (LEX) is the mean over heads, layers and texts; higher is better.")
    if "passkey" in by_kind:
        depths = ", ".join(f"{depth:g}" for depth in sorted({record["depth"] for record in by_kind["passkey"]}))
        notes.append(f"Passkey accuracy: mean over depths {depths}; higher is better.")

    # Effective lengths, which no column shows.
    for record in by_kind.get("effective_length", []):
        lengths = sorted(chain.from_iterable(record["effective_lengths"]))
        if lengths:
            unlimited = sum(length >= record["length"] for length in lengths)
            notes.append(
                f"Effective length of {method_of(record).pos_emb} over {len(lengths)} heads: {lengths[0]:,} to "
                f"{lengths[-1]:,}, median {statistics.median(lengths):,.0f}"
                + (f"; {unlimited} of them reach {record['length']:,} or more." if unlimited else ".")
            )
    return notes
