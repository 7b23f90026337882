"""Rows of results as tables: one line per method and mode, one column per length, mean ± deviation over seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from megatron.evaluation.rows import Row

NOT_AVAILABLE = "n/a"


@dataclass(frozen=True)
class Series:
    """What one method reached in one mode; `perplexities[length]` holds a value for each seed that has one."""

    pos_emb: str
    mode: str
    train_length: int | None
    perplexities: dict[int, list[float]]

    def mean(self, length: int) -> float | None:
        """Mean perplexity over seeds; None where there is none."""
        values = self.perplexities.get(length)
        return statistics.fmean(values) if values else None

    def deviation(self, length: int) -> float | None:
        """Standard deviation over seeds (n - 1 in the denominator); None with fewer than two."""
        values = self.perplexities.get(length, [])
        return statistics.stdev(values) if len(values) > 1 else None

    def growth(self) -> tuple[int, int, float] | None:
        """Training length, longest length measured, ratio of their perplexities; None where one is missing."""
        measured = [length for length, values in self.perplexities.items() if values]
        if self.train_length not in measured or max(measured) <= self.train_length:
            return None
        return self.train_length, max(measured), self.mean(max(measured)) / self.mean(self.train_length)


def group(rows: Sequence[Row]) -> list[Series]:
    """Rows by method, mode and training length, in the order in which they first appear."""
    found: dict[tuple[str, str, int | None], Series] = {}
    for row in rows:
        key = (row["pos_emb"] or "model", row["mode"], row["train_length"])
        series = found.setdefault(key, Series(*key, {}))
        values = series.perplexities.setdefault(row["length"], [])
        if row["perplexity"] is not None:
            values.append(row["perplexity"])
    return list(found.values())


def lengths_of(rows: Sequence[Row]) -> list[int]:
    """Every length, ascending."""
    return sorted({row["length"] for row in rows})


def number(value: float) -> str:
    """Four significant digits, without an exponent below a million: 3.412, 101.3, 22,621."""
    if value >= 1e6:
        return f"{value:.3g}"
    decimals = max(0, 3 - max(0, math.floor(math.log10(value)))) if value > 0 else 0
    return f"{value:,.{decimals}f}"


def cell(series: Series, length: int) -> str:
    """`mean`, or `mean ± deviation` with two or more seeds."""
    mean, deviation = series.mean(length), series.deviation(length)
    if mean is None:
        return NOT_AVAILABLE
    return number(mean) if deviation is None else f"{number(mean)} ± {deviation:.2g}"


def header(rows: Sequence[Row]) -> list[str]:
    """Column titles; the training length carries a star where all rows share it."""
    trained = {row["train_length"] for row in rows}
    star = trained.pop() if len(trained) == 1 else None
    lengths = [f"{length:,}*" if length == star else f"{length:,}" for length in lengths_of(rows)]
    return ["method", "mode", *(["trained at"] if star is None else []), *lengths, "growth"]


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """The cells below `header`."""
    one_length = len({row["train_length"] for row in rows}) == 1 and rows[0]["train_length"] is not None
    result = []
    for series in group(rows):
        trained = [] if one_length else ["?" if series.train_length is None else f"{series.train_length:,}"]
        growth = series.growth()
        cells = [cell(series, length) for length in lengths_of(rows)]
        result.append([series.pos_emb, series.mode, *trained, *cells, f"{growth[2]:.3g}x" if growth else NOT_AVAILABLE])
    return result


def explanation(rows: Sequence[Row]) -> list[str]:
    """What the numbers are, one sentence each, for below the table; the reasons of what is not available included."""
    sentences = ["Perplexity by segment length in tokens; lower is better."]
    trained = {row["train_length"] for row in rows}
    if len(trained) == 1 and None not in trained:
        sentences.append(f"* Training length: {trained.pop():,} tokens.")
    sentences.append("Growth: perplexity at the longest length measured over that at the training length.")
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        counts = sorted({row["tokens"] for row in rows if row["protocol"] == protocol and row["tokens"]})
        if len(counts) == 1:
            sentences.append(f"Protocol {protocol}: the same {counts[0]:,} tokens are scored at every length.")
        elif counts:
            sentences.append(f"Protocol {protocol}: between {counts[0]:,} and {counts[-1]:,} tokens are scored.")
    seeds = {row["seed"] for row in rows}
    if len(seeds) > 1:
        sentences.append(f"Mean ± standard deviation over {len(seeds)} seeds.")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["note"] is not None:
            reasons.setdefault(row["note"], []).append(
                f"{row['pos_emb'] or 'model'} {row['mode']} at {row['length']:,}"
            )
    sentences.extend(f"{NOT_AVAILABLE} ({', '.join(where)}): {note}." for note, where in reasons.items())
    overflown = [row for row in rows if row["loss"] is not None and row["perplexity"] is None]
    if overflown:
        sentences.append(
            f"{NOT_AVAILABLE} without a reason given: the perplexity is beyond a float; the loss is in the JSON file."
        )
    return sentences


def markdown(rows: Sequence[Row], title: str) -> str:
    """A Markdown document: title, table, what the numbers are."""
    columns = header(rows)
    named = 3 if columns[2] == "trained at" else 2
    rule = [":--"] * named + ["--:"] * (len(columns) - named)
    table = [f"| {' | '.join(cells)} |" for cells in (columns, rule, *lines(rows))]
    return "\n".join([f"# {title}", "", *table, "", *(f"{sentence}  " for sentence in explanation(rows))]) + "\n"


def rich_table(rows: Sequence[Row], title: str) -> Table:
    """The same table for the terminal."""
    table = Table(title=title, caption=" ".join(explanation(rows)), caption_justify="left")
    for index, column in enumerate(header(rows)):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    for cells in lines(rows):
        table.add_row(*cells)
    return table
