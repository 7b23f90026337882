"""Records of results as a table: a block per measure, in it a line per method and mode and a column per length."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rich.table import Table as RichTable

from megatron.evaluation.records import Record, extrapolation_records
from megatron.reporting.aggregate import (
    NOT_AVAILABLE,
    Series,
    cell,
    common_train_length,
    group,
    lengths_of,
    name_of,
    number,
    per_cent,
    rough,
    worse,
)
from megatron.reporting.statistics import ALPHA
from megatron.reporting.terminal import compact_table
from megatron.utils.errors import UserError

SIGNIFICANT = "†"
PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class Measure:
    """What a block of the table shows: the value under a key of the records of one kind."""

    kind: str
    key: str
    show: Callable[[Series, int], str] = cell


MEASURES = {
    PERPLEXITY: Measure("extrapolation", "perplexity"),
    "loss": Measure("extrapolation", "loss"),
    "standard error": Measure("extrapolation", "stderr", rough),
    "bits per byte": Measure("extrapolation", "bits_per_byte"),
    "loss, first bin": Measure("positions", "first"),
    "loss, last bin": Measure("positions", "last"),
    "resolution": Measure("resolution", "resolution", rough),
    "pass keys found": Measure("passkey", "accuracy", per_cent),
}

# By kind of record, what is None or empty where nothing could be measured.
_VALUES = {
    "extrapolation": "perplexity",
    "positions": "losses",
    "resolution": "resolution",
    "passkey": "accuracy",
    "effective_length": "effective_lengths",
}


@dataclass(frozen=True)
class Table:
    """titles: of the columns, the first `names` of which hold names, the others numbers. blocks: by measure, the lines
    of cells; perplexity is always there, the others where there is a value.
    """

    titles: list[str]
    names: int
    blocks: dict[str, list[list[str]]]


def table(records: Sequence[Record], compare_with: str | None = None) -> Table:
    """The table of all records whose values have a length.

    The mode is a column where it is not `full` throughout, the training length, the protocol and the corpus where they
    differ. Where the training length does not, its column carries a star, and the last column compares the longest
    perplexity with it. compare_with: a method; what it is significantly better than, in perplexity, is marked. Raises
    UserError where there are no results of it.
    """
    of_kind = {measure.kind: _rows(records, measure.kind) for measure in MEASURES.values()}
    every = {title: group(of_kind[measure.kind], measure.key) for title, measure in MEASURES.items()}
    blocks = {
        title: block for title, block in every.items() if title == PERPLEXITY or any(one.lengths for one in block)
    }
    rows = list(chain.from_iterable(of_kind.values()))
    lengths, trained = lengths_of(rows), common_train_length(rows)
    _check_compared(blocks[PERPLEXITY], compare_with)

    modes = ["mode"] if any(row["mode"] != "full" for row in rows) else []
    several_trained = len({row["train_length"] for row in rows}) > 1
    several = [name for name in ("corpus", "protocol") if any(_differ(block, name) for block in blocks.values())]
    titles = ["method", *modes, *(["trained at"] if several_trained else []), *several]
    names = len(titles)
    titles += [f"{length:,}*" if length == trained else f"{length:,}" for length in lengths]
    scored = lengths_of(of_kind["extrapolation"])
    compared = trained in scored and scored[-1] > trained
    titles += [f"{scored[-1]:,} / {trained:,}"] if compared else []

    def lines(title: str) -> list[list[str]]:
        made = []
        for one in blocks[title]:
            cells = [one.pos_emb, *(one.mode for _ in modes)]
            cells += [f"{one.train_length:,}" if one.train_length else "unknown"] if several_trained else []
            cells += [getattr(one, name) or "unknown" for name in several]
            reference = _reference(one, blocks[title], compare_with) if title == PERPLEXITY else None
            cells += [MEASURES[title].show(one, at) + SIGNIFICANT * worse(one, reference, at) for at in lengths]
            cells += [_ratio(one, scored[-1], trained) if title == PERPLEXITY else ""] if compared else []
            made.append(cells)
        return made

    return Table(titles, names, {title: lines(title) for title in blocks})


def explanation(records: Sequence[Record], compare_with: str | None = None) -> list[str]:
    """What the numbers are and why some are missing, one sentence each, for below the table."""
    rows = extrapolation_records(records)
    sentences = ["By length of the text in tokens; of perplexity, loss (in nats) and bits per byte, lower is better."]
    if common_train_length(rows) in lengths_of(rows):
        sentences.append("The star marks the training length.")
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        counts = sorted({row["tokens"] for row in rows if row["protocol"] == protocol and row["tokens"]})
        if len(counts) == 1:
            sentences.append(f"Protocol {protocol}: the same {counts[0]:,} tokens are scored at every length.")
        elif counts:
            sentences.append(f"Protocol {protocol}: {counts[0]:,} to {counts[-1]:,} tokens are scored.")
    seeds = {row["seed"] for row in rows}
    if len(seeds) > 1:
        sentences.append(f"Mean ± standard deviation over {len(seeds)} seeds.")
    if compare_with is not None:
        sentences.append(
            f"{SIGNIFICANT}: {compare_with} is significantly better (paired two-sided t-test over the seeds, "
            f"p < {ALPHA:g})."
            if len(seeds) > 1
            else f"One seed: whether a difference from {compare_with} is chance cannot be tested."
        )
    return [*sentences, *_of_further_measures(records), *_reasons(records)]


def markdown(records: Sequence[Record], title: str, compare_with: str | None = None) -> str:
    """A Markdown document: title, table, what the numbers are."""
    made = table(records, compare_with)
    rule = [":--"] * made.names + ["--:"] * (len(made.titles) - made.names)
    # A star at the end of a title would otherwise begin emphasis that runs to the next one.
    lines = [[title.replace("*", "\\*") for title in made.titles], rule]
    for measure, block in made.blocks.items():
        lines += [[f"**{measure}**", *[""] * (len(rule) - 1)]] if len(made.blocks) > 1 else []
        lines += block
    written = [f"| {' | '.join(cells)} |" for cells in lines]
    sentences = (f"- {sentence}" for sentence in explanation(records, compare_with))
    return "\n".join([f"# {title}", "", *written, "", *sentences]) + "\n"


def rich_table(records: Sequence[Record], title: str, compare_with: str | None = None) -> RichTable:
    """The same table for the terminal, see `compact_table`."""
    made = table(records, compare_with)
    lines = list(chain.from_iterable(made.blocks.values()))
    result = compact_table(title, made.titles, lines, made.names)
    for measure, block in made.blocks.items():
        if len(made.blocks) > 1:
            result.add_section()
            result.add_row(measure, style="bold")
        for cells in block:
            result.add_row(*cells)
    return result


def _rows(records: Sequence[Record], kind: str) -> list[Mapping[str, Any]]:
    """The records of a kind with one value each: of a curve by position its ends, of pass keys the mean over depths."""
    found: list[Mapping[str, Any]] = [record for record in records if record["kind"] == kind]
    if kind == "positions":
        return [{**row, "first": (row["losses"] or [None])[0], "last": (row["losses"] or [None])[-1]} for row in found]
    if kind != "passkey":
        return found
    depths: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in found:
        origin = (row.get("checkpoint") or {}).get("fingerprint")
        depths.setdefault((origin, *(row[key] for key in ("pos_emb", "seed", "mode", "length"))), []).append(row)
    return [
        {**rows[0], "accuracy": None if any(row["accuracy"] is None for row in rows) else _share_found(rows)}
        for rows in depths.values()
    ]


def _share_found(rows: Sequence[Mapping[str, Any]]) -> float:
    return sum(row["correct"] for row in rows) / sum(row["trials"] for row in rows)


def _of_further_measures(records: Sequence[Record]) -> list[str]:
    """What is to be said of the measures that were asked for beside the loss."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_kind.setdefault(record["kind"], []).append(record)
    sentences = []
    if any(row.get("stderr") is not None for row in by_kind.get("extrapolation", [])):
        sentences.append("The standard error is of the loss, over documents (segments where those are not known).")
    if any(row["losses"] for row in by_kind.get("positions", [])):
        bins = sorted({len(row["losses"]) for row in by_kind["positions"] if row["losses"]})
        sentences.append(
            f"The loss by position is there in {' or '.join(map(str, bins))} bins; here are the first and the last."
        )
    if "resolution" in by_kind:
        sentences.append("The attention resolution (LEX) is a mean over heads, layers and texts; higher is better.")
    if "passkey" in by_kind:
        depths = sorted({row["depth"] for row in by_kind["passkey"]})
        sentences.append(f"Pass keys were hidden at depths {', '.join(f'{depth:g}' for depth in depths)}.")
    for row in by_kind.get("effective_length", []):
        lengths = sorted(chain.from_iterable(row["effective_lengths"]))
        if lengths:
            beyond = sum(length >= row["length"] for length in lengths)
            sentences.append(
                f"Effective length of {name_of(row)} over {len(lengths)} heads: {lengths[0]:,} to {lengths[-1]:,}, "
                f"median {statistics.median(lengths):,.0f}" + (f"; {beyond} see all that far." if beyond else ".")
            )
    return sentences


def _reasons(records: Sequence[Record]) -> list[str]:
    """Why values are missing, a sentence for each method, mode and kind of record: the first of its reasons."""
    missing: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in records:
        if row[_VALUES[row["kind"]]] in (None, []):
            missing.setdefault((name_of(row), row["mode"], row["kind"]), []).append(row)
    sentences = []
    for (name, mode, kind), absent in missing.items():
        reason = absent[0]["note"] or "the perplexity is beyond a float; the loss is in the JSON file"
        where = ", ".join(f"{length:,}" for length in lengths_of(absent))
        at = "" if kind == "effective_length" else f" ({mode}) at {where}"
        sentences.append(f"{NOT_AVAILABLE}: {name}{at}: {reason}.")
    return list(dict.fromkeys(sentences))


def _check_compared(every: Sequence[Series], compare_with: str | None) -> None:
    if compare_with is not None and all(one.pos_emb != compare_with for one in every):
        raise UserError(
            f"--compare-with {compare_with}: there are no results of it; choose one of "
            f"{', '.join(dict.fromkeys(one.pos_emb for one in every))}"
        )


def _differ(every: Sequence[Series], name: str) -> bool:
    return len({getattr(one, name) for one in every}) > 1


def _reference(series: Series, every: Sequence[Series], compare_with: str | None) -> Series | None:
    """The series of the method to compare with, in the same setting."""
    return next((one for one in every if one.pos_emb == compare_with and one.setting == series.setting), None)


def _ratio(series: Series, longest: int, trained: int) -> str:
    if not {longest, trained} <= set(series.lengths):
        return NOT_AVAILABLE
    ratio = series.mean(longest) / series.mean(trained)
    return f"{ratio:.2f}x" if ratio < 10 else f"{number(ratio, 3)}x"
