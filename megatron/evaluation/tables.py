"""Rows of results as tables: one line per method and mode, one column per length, mean ± deviation over seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from megatron.config.errors import UserError
from megatron.evaluation.rows import Row
from megatron.evaluation.statistics import ALPHA, significantly_better

NOT_AVAILABLE = "n/a"
SIGNIFICANT = "†"


@dataclass(frozen=True)
class Series:
    """What one method reached in one mode; `by_seed[length]` holds the perplexity of each seed that has one (of each
    checkpoint, where seeds are not known or the same).
    """

    pos_emb: str
    mode: str
    train_length: int | None
    protocol: str
    corpus: str | None
    by_seed: dict[int, dict[object, float]]

    @property
    def perplexities(self) -> dict[int, list[float]]:
        """Length -> the values of all seeds."""
        return {length: list(values.values()) for length, values in self.by_seed.items()}

    @property
    def setting(self) -> tuple[str, int | None, str, str | None]:
        """What is the same where two methods can be compared."""
        return self.mode, self.train_length, self.protocol, self.corpus

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
    """Rows by method, mode, training length, protocol and corpus, in the order in which they first appear; by
    checkpoint, too, where a method has two with the same seed.
    """
    found: dict[tuple, Series] = {}
    several = _ambiguous(rows)
    for row in rows:
        name = _name(row)
        if name in several:
            name += " ({path} at {iteration})".format(**row["checkpoint"])
        key = (name, row["mode"], row["train_length"], row["protocol"], row.get("corpus"))
        series = found.setdefault(key, Series(*key, {}))
        values = series.by_seed.setdefault(row["length"], {})
        if row["perplexity"] is not None:
            seed = row["seed"] if row["seed"] not in values else (row["seed"], len(values))
            values[seed] = row["perplexity"]
    return list(found.values())


def _ambiguous(rows: Sequence[Row]) -> set[str]:
    """Methods of which two checkpoints have the same seed: their mean would be one over no seeds."""
    first: dict[tuple, Row] = {}
    keys = ("pos_emb", "seed", "mode", "train_length", "protocol", "corpus", "length")
    return {
        _name(row)
        for row in rows
        if row.get("checkpoint")
        and first.setdefault(tuple(row.get(key) for key in keys), row).get("checkpoint") != row["checkpoint"]
    }


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


def worse(series: Series, reference: Series | None, length: int) -> bool:
    """Whether the reference is significantly better at the length, over the seeds of both (KERPLE's Table 3)."""
    if reference is None or reference is series:
        return False
    return significantly_better(reference.by_seed.get(length, {}), series.by_seed.get(length, {}))


def _reference(series: Series, every: Sequence[Series], compare_with: str | None) -> Series | None:
    """The series of the method to compare with, in the same setting."""
    return next((one for one in every if one.pos_emb == compare_with and one.setting == series.setting), None)


def table(rows: Sequence[Row], compare_with: str | None = None) -> tuple[list[str], list[list[str]], int]:
    """Column titles, lines of cells, and how many columns hold names rather than numbers.

    The mode is a column where it is not `full` throughout, the training length, the protocol and the corpus where they
    differ. Where the training length does not, its column carries a star and the last column compares the longest
    length with it. compare_with: a method; what it is significantly better than is marked. Raises UserError where
    there are no results of it.
    """
    lengths, trained = lengths_of(rows), common_train_length(rows)
    several_modes = any(row["mode"] != "full" for row in rows)
    several_trained = len({row["train_length"] for row in rows}) > 1
    every = group(rows)
    if compare_with is not None and all(one.pos_emb != compare_with for one in every):
        raise UserError(
            f"--compare-with {compare_with}: there are no results of it; choose one of "
            f"{', '.join(dict.fromkeys(one.pos_emb for one in every))}"
        )
    several = [name for name in ("corpus", "protocol") if len({getattr(one, name) for one in every}) > 1]
    compared = trained in lengths and lengths[-1] > trained
    titles = ["method", *(["mode"] if several_modes else []), *(["trained at"] if several_trained else []), *several]
    names = len(titles)
    titles += [f"{length:,}*" if length == trained else f"{length:,}" for length in lengths]
    titles += [f"{lengths[-1]:,} / {trained:,}"] if compared else []
    lines = []
    for series in every:
        reference = _reference(series, every, compare_with)
        cells = [series.pos_emb, *([series.mode] if several_modes else [])]
        cells += [f"{series.train_length:,}" if series.train_length else "unknown"] if several_trained else []
        cells += [getattr(series, name) or "unknown" for name in several]
        for length in lengths:
            cells.append(cell(series, length) + SIGNIFICANT * worse(series, reference, length))
        cells += [_ratio(series, lengths[-1], trained)] if compared else []
        lines.append(cells)
    return titles, lines, names


def explanation(rows: Sequence[Row], compare_with: str | None = None) -> list[str]:
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
    if compare_with is not None:
        sentences.append(
            f"{SIGNIFICANT}: {compare_with} is significantly better (paired two-sided t-test over the seeds, "
            f"p < {ALPHA:g})."
            if len(seeds) > 1
            else f"One seed: whether a difference from {compare_with} is chance cannot be tested."
        )
    missing: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["perplexity"] is None:
            missing.setdefault((_name(row), row["mode"]), []).append(row)
    for (name, mode), absent in missing.items():
        where = ", ".join(f"{length:,}" for length in lengths_of(absent))
        reason = absent[0]["note"] or "the perplexity is beyond a float; the loss is in the JSON file"
        sentences.append(f"{NOT_AVAILABLE}: {name} ({mode}) at {where}: {reason}.")
    return sentences


def markdown(rows: Sequence[Row], title: str, compare_with: str | None = None) -> str:
    """A Markdown document: title, table, what the numbers are."""
    titles, lines, names = table(rows, compare_with)
    rule = [":--"] * names + ["--:"] * (len(titles) - names)
    # A star at the end of a title would otherwise begin emphasis that runs to the next one.
    titles = [title.replace("*", "\\*") for title in titles]
    written = [f"| {' | '.join(cells)} |" for cells in (titles, rule, *lines)]
    return (
        "\n".join([f"# {title}", "", *written, "", *(f"- {sentence}" for sentence in explanation(rows, compare_with))])
        + "\n"
    )


def rich_table(rows: Sequence[Row], title: str, compare_with: str | None = None) -> Table:
    """The same table for the terminal."""
    titles, lines, names = table(rows, compare_with)
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
