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

    @property
    def lengths(self) -> list[int]:
        """The lengths at which there is a perplexity, ascending."""
        return sorted(length for length, values in self.perplexities.items() if values)

    def mean(self, length: int) -> float | None:
        """Mean perplexity over seeds; None where there is none."""
        values = self.perplexities.get(length)
        return statistics.fmean(values) if values else None

    def deviation(self, length: int) -> float | None:
        """Standard deviation over seeds (n - 1 in the denominator); None with fewer than two."""
        values = self.perplexities.get(length, [])
        return statistics.stdev(values) if len(values) > 1 else None


def group(rows: Sequence[Row]) -> list[Series]:
    """Rows by method, mode and training length, in the order in which they first appear."""
    found: dict[tuple[str, str, int | None], Series] = {}
    for row in rows:
        key = (_name(row), row["mode"], row["train_length"])
        series = found.setdefault(key, Series(*key, {}))
        values = series.perplexities.setdefault(row["length"], [])
        if row["perplexity"] is not None:
            values.append(row["perplexity"])
    return list(found.values())


def lengths_of(rows: Sequence[Row]) -> list[int]:
    """Every length, ascending."""
    return sorted({row["length"] for row in rows})


def common_train_length(rows: Sequence[Row]) -> int | None:
    """The training length that all rows share; None where they do not, or where it is not known."""
    trained = {row["train_length"] for row in rows}
    return trained.pop() if len(trained) == 1 else None


def number(value: float, digits: int = 4) -> str:
    """So many significant digits, no exponent below a million: 3.412, 101.3, 22,621."""
    if value >= 1e6:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{_decimals(value, digits)}f}"


def cell(series: Series, length: int) -> str:
    """`mean`, or with two or more seeds `mean ± deviation`, both to the deviation's second significant digit."""
    mean, deviation = series.mean(length), series.deviation(length)
    if mean is None:
        return NOT_AVAILABLE
    if not deviation or mean >= 1e6:
        return number(mean)
    decimals = _decimals(deviation, 2)
    return f"{mean:,.{decimals}f} ± {deviation:,.{decimals}f}"


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], int]:
    """Column titles, lines of cells, and how many columns hold names rather than numbers.

    The mode is a column where it is not `full` throughout, the training length where it differs. Where it does not, its
    column carries a star and the last column compares the longest length with it.
    """
    lengths, trained = lengths_of(rows), common_train_length(rows)
    several_modes = any(row["mode"] != "full" for row in rows)
    several_trained = len({row["train_length"] for row in rows}) > 1
    compared = trained in lengths and lengths[-1] > trained
    titles = ["method", *(["mode"] if several_modes else []), *(["trained at"] if several_trained else [])]
    names = len(titles)
    titles += [f"{length:,}*" if length == trained else f"{length:,}" for length in lengths]
    titles += [f"{lengths[-1]:,} / {trained:,}"] if compared else []
    lines = []
    for series in group(rows):
        cells = [series.pos_emb, *([series.mode] if several_modes else [])]
        cells += [f"{series.train_length:,}" if series.train_length else "unknown"] if several_trained else []
        cells += [cell(series, length) for length in lengths]
        cells += [_ratio(series, lengths[-1], trained)] if compared else []
        lines.append(cells)
    return titles, lines, names


def explanation(rows: Sequence[Row]) -> list[str]:
    """What the numbers are and why some are missing, one sentence each, for below the table."""
    sentences = ["Perplexity by length of the text in tokens; lower is better."]
    trained = common_train_length(rows)
    if trained in lengths_of(rows):
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
    missing: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["perplexity"] is None:
            missing.setdefault((_name(row), row["mode"]), []).append(row)
    for (name, mode), absent in missing.items():
        where = ", ".join(f"{length:,}" for length in lengths_of(absent))
        reason = absent[0]["note"] or "the perplexity is beyond a float; the loss is in the JSON file"
        sentences.append(f"{NOT_AVAILABLE}: {name} ({mode}) at {where}: {reason}.")
    return sentences


def markdown(rows: Sequence[Row], title: str) -> str:
    """A Markdown document: title, table, what the numbers are."""
    titles, lines, names = table(rows)
    rule = [":--"] * names + ["--:"] * (len(titles) - names)
    # A star at the end of a title would otherwise begin emphasis that runs to the next one.
    titles = [title.replace("*", "\\*") for title in titles]
    written = [f"| {' | '.join(cells)} |" for cells in (titles, rule, *lines)]
    return "\n".join([f"# {title}", "", *written, "", *(f"- {sentence}" for sentence in explanation(rows))]) + "\n"


def rich_table(rows: Sequence[Row], title: str) -> Table:
    """The same table for the terminal."""
    titles, lines, names = table(rows)
    result = Table(title=title, title_justify="left")
    for index, column in enumerate(titles):
        result.add_column(column, justify="left" if index < names else "right")
    for cells in lines:
        result.add_row(*cells)
    return result


def _name(row: Row) -> str:
    return row["pos_emb"] or "model"


def _ratio(series: Series, longest: int, trained: int) -> str:
    if not {longest, trained} <= set(series.lengths):
        return NOT_AVAILABLE
    ratio = series.mean(longest) / series.mean(trained)
    return f"{ratio:.2f}x" if ratio < 10 else f"{number(ratio, 3)}x"


def _decimals(value: float, digits: int) -> int:
    """How many decimals show so many significant digits."""
    return max(0, digits - 1 - math.floor(math.log10(value))) if value > 0 else 0
