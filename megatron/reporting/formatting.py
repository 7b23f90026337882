"""Numbers and file names as text, for all tables, figures and pages."""

import hashlib
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

TITLE = "Length extrapolation"  # of a report, by default
NOT_AVAILABLE = "n/a"  # there is a record without a value; a note below the table gives the reason
NOT_MEASURED = "–"  # there is no record
MAX_SLUG_BYTES = 120


def format_number(value: float, digits: int = 4) -> str:
    """The value with this many significant digits: 3.412, 101.3, 22,621; from one million on
    3.200e+09. NaN: n/a.
    """
    if math.isnan(value):
        return NOT_AVAILABLE
    if math.isinf(value):
        return str(value)
    if abs(value) >= 1e6:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{_decimals(value, digits)}f}"


def format_length(length: int) -> str:
    return f"{length:,}"


def format_mean(
    values: Iterable[float] | None, digits: int = 4, *, standard_error: bool = False
) -> str:
    """The mean over the seeds; for two or more seeds, `mean ± sample standard deviation` (or
    standard error).

    The deviation has two significant digits and the mean as many decimals: 3.41230 ± 0.00028, 32.2
    ± 3.4. The deviation of two values is too uncertain for this: the mean has `digits` significant
    digits, as without a deviation, and the deviation as many decimals. NaN stands for a value that
    is not available and is ignored; None for values that were not measured.
    """
    if values is None:
        return NOT_MEASURED
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return NOT_AVAILABLE
    mean = statistics.fmean(values)
    deviation = 0.0
    if len(values) > 1 and all(map(math.isfinite, values)):
        deviation = statistics.stdev(values)
    if standard_error:
        deviation /= math.sqrt(len(values))

    # Equal values have a deviation of rounding errors. Large values have no decimals.
    if deviation <= 1e-12 * abs(mean):
        return format_number(mean, digits)
    if abs(mean) >= 1e6:
        return f"{format_number(mean, digits)} ± {deviation:.1e}"

    # Both numbers have the same decimals, those of the more reliable one.
    decimals = _decimals(deviation, 2)
    if len(values) == 2 and not standard_error:
        decimals = _decimals(max(abs(mean), deviation), digits)
    return f"{mean:,.{decimals}f} ± {deviation:,.{decimals}f}"


def standard_error_of_mean(values: Sequence[float]) -> float:
    """The standard error of the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values) / math.sqrt(len(values))


def best_texts(
    means: Sequence[float], texts: Sequence[str], best: Literal["lowest", "highest"]
) -> list[bool]:
    """Whether each text of `format_mean` shows the best mean, or a number that is equal to it (or
    better) as printed.

    All are False with fewer than two means. NaN stands for a mean that is not available.
    """
    sign = {"lowest": 1, "highest": -1}[best]
    known = [index for index, mean in enumerate(means) if not math.isnan(mean)]
    if len(known) < 2:
        return [False] * len(means)

    # Compare the numbers as printed; a comparison with NaN is False.
    printed = [math.nan] * len(texts)
    for index in known:
        mean, _, _ = texts[index].partition(" ±")
        printed[index] = sign * float(mean.replace(",", ""))
    limit = printed[min(known, key=lambda index: sign * means[index])]
    return [number <= limit for number in printed]


def format_difference(difference: float, error: float | None) -> str:
    """A difference with its sign (none for 0) and standard error, if known: +0.0123 ± 0.0041."""
    text = f"{difference:+,.4f}"
    if round(difference, 4) == 0:
        text = "0.0000"
    if error is not None and math.isfinite(error):
        text += f" ± {error:,.4f}"
    return text


def format_percent(values: Iterable[float] | None) -> str:
    """Like `format_mean`, for fractions, in whole percent: `40%`, `40% ± 14%`."""
    if values is None:
        return NOT_MEASURED
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return NOT_AVAILABLE
    text = f"{statistics.fmean(values):.0%}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.0%}"
    return text


def _decimals(value: float, digits: int) -> int:
    """The number of decimals that shows `value` with this many significant digits."""
    if not value:
        return 0
    _, _, exponent = f"{value:.{digits - 1}e}".partition("e")  # rounded first: 0.0999 is 0.10
    return max(0, digits - 1 - int(exponent))


def slug(*parts: object) -> str:
    """The parts that are not empty, joined by hyphens; only characters that are safe in file names
    and HTML ids.

    At most MAX_SLUG_BYTES in UTF-8: a digest replaces the end of a longer name.
    """
    safe = (re.sub(r"[^\w.+-]+", "-", str(part)).strip("-.") for part in parts if part)
    name = "-".join(part for part in safe if part)
    if len(name.encode()) <= MAX_SLUG_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name.encode()[: MAX_SLUG_BYTES - 9].decode(errors='ignore')}-{digest}"
