"""Rows of results as series: what one method reached in one mode by length, mean ± deviation over seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.reporting.statistics import significantly_better

NOT_AVAILABLE = "n/a"


@dataclass(frozen=True)
class Series:
    """What one method reached in one mode; `by_seed[length]` holds the value of each seed that has one (of each
    checkpoint, where seeds are not known or the same).
    """

    pos_emb: str
    mode: str
    train_length: int | None
    protocol: str
    corpus: str | None
    by_seed: dict[int, dict[object, float]]

    @property
    def setting(self) -> tuple[str, int | None, str, str | None]:
        """What is the same where two methods can be compared."""
        return self.mode, self.train_length, self.protocol, self.corpus

    @property
    def lengths(self) -> list[int]:
        """The lengths at which there is a value, ascending."""
        return sorted(length for length, values in self.by_seed.items() if values)

    def mean(self, length: int) -> float | None:
        """Mean over seeds; None where there is no value."""
        values = self.by_seed.get(length)
        return statistics.fmean(values.values()) if values else None

    def deviation(self, length: int) -> float | None:
        """Standard deviation over seeds (n - 1 in the denominator); None with fewer than two."""
        values = self.by_seed.get(length, {})
        return statistics.stdev(values.values()) if len(values) > 1 else None


def group(rows: Sequence[Mapping[str, Any]], value: str = "perplexity") -> list[Series]:
    """Rows by method, mode, training length, protocol and corpus, in the order in which they first appear; by
    checkpoint, too, where a method has two with the same seed. value: the key of what the series are of.
    """
    found: dict[tuple, Series] = {}
    several = _ambiguous(rows)
    for row in rows:
        name = name_of(row)
        if name in several:
            name += " ({path} at {iteration})".format(**row["checkpoint"])
        key = (name, row["mode"], row["train_length"], row["protocol"], row.get("corpus"))
        series = found.setdefault(key, Series(*key, {}))
        values = series.by_seed.setdefault(row["length"], {})
        if row.get(value) is not None:
            seed = row["seed"] if row["seed"] not in values else (row["seed"], len(values))
            values[seed] = row[value]
    return list(found.values())


def _ambiguous(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Methods of which two checkpoints have the same seed: their mean would be one over no seeds."""
    first: dict[tuple, Mapping[str, Any]] = {}
    keys = ("pos_emb", "seed", "mode", "train_length", "protocol", "corpus", "length")
    return {
        name_of(row)
        for row in rows
        if row.get("checkpoint")
        and first.setdefault(tuple(row.get(key) for key in keys), row).get("checkpoint") != row["checkpoint"]
    }


def name_of(row: Mapping[str, Any]) -> str:
    return row["pos_emb"] or "model"


def lengths_of(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Every length, ascending."""
    return sorted({row["length"] for row in rows})


def common_train_length(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The training length that all rows share; None where they do not, or where it is not known."""
    trained = {row["train_length"] for row in rows}
    return trained.pop() if len(trained) == 1 else None


def worse(series: Series, reference: Series | None, length: int) -> bool:
    """Whether the reference is significantly better at the length, over the seeds of both (KERPLE's Table 3)."""
    if reference is None or reference is series:
        return False
    return significantly_better(reference.by_seed.get(length, {}), series.by_seed.get(length, {}))


def number(value: float, digits: int = 4) -> str:
    """So many significant digits, no exponent below a million: 3.412, 101.3, 22,621."""
    if abs(value) >= 1e6:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{_decimals(value, digits)}f}"


def cell(series: Series, length: int) -> str:
    """`mean`, or with two or more seeds `mean ± deviation`, both to the deviation's second significant digit. Empty
    where nothing was asked for, n/a where there is no value.
    """
    mean, deviation = series.mean(length), series.deviation(length)
    if mean is None:
        return NOT_AVAILABLE if length in series.by_seed else ""
    if not deviation or mean >= 1e6:
        return number(mean)
    decimals = _decimals(deviation, 2)
    return f"{mean:,.{decimals}f} ± {deviation:,.{decimals}f}"


def rough(series: Series, length: int) -> str:
    """The mean alone, to its second significant digit, of what is an estimate itself."""
    mean = series.mean(length)
    return cell(series, length) if mean is None else number(mean, 2)


def per_cent(series: Series, length: int) -> str:
    """Of shares: `40%`, or with two or more seeds `40% ± 14%`."""
    mean, deviation = series.mean(length), series.deviation(length)
    if mean is None:
        return cell(series, length)
    return f"{mean:.0%}" if deviation is None else f"{mean:.0%} ± {deviation:.0%}"


def _decimals(value: float, digits: int) -> int:
    """How many decimals show so many significant digits."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
