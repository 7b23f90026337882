"""A table as a paper lays it out: stubs on the left, numbers on the right, sections across; and how numbers are
written."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

NOT_AVAILABLE = "n/a"
NOT_MEASURED = "–"
DIGITS = 4


@dataclass(frozen=True)
class Cell:
    """`text` as it stands; `best` is printed bold, `worse` (significantly worse than the reference) with a dagger."""

    text: str
    best: bool = False
    worse: bool = False


@dataclass(frozen=True)
class Row:
    """The stub and one cell per column. `published`: numbers of a paper, set apart in print."""

    stub: str
    cells: tuple[Cell, ...]
    published: bool = False


@dataclass(frozen=True)
class Section:
    """A line across the table: what the rows below it are of."""

    title: str


@dataclass(frozen=True)
class PaperTable:
    """`name` is a file's stem; `corner` heads the stubs; every row has a cell per column; `notes` are sentences."""

    name: str
    title: str
    corner: str
    columns: tuple[str, ...]
    lines: tuple[Row | Section, ...]
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        wrong = [line.stub for line in self.rows if len(line.cells) != len(self.columns)]
        if wrong:
            raise ValueError(f"table {self.name}: rows {', '.join(wrong)} have not {len(self.columns)} cells")

    @property
    def rows(self) -> list[Row]:
        return [line for line in self.lines if isinstance(line, Row)]


def written(values: Sequence[float]) -> str:
    """`mean`, or with two or more seeds `mean ± standard deviation` (n - 1), to the mean's fourth significant digit (or
    its point); no value is n/a.
    """
    if not values:
        return NOT_AVAILABLE
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    if not math.isfinite(mean):
        return f"{mean}"
    decimals = max(0, DIGITS - 1 - math.floor(math.log10(abs(mean)))) if mean else 0
    if deviation:
        return f"{_fixed(mean, decimals)} ± {_fixed(deviation, decimals)}"
    return _fixed(mean, decimals)


def _fixed(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if abs(value) < 1e6 else f"{value:.2e}"
