"""Timing of alternatives that run alternately in one process. The result is the ratio to the
baseline within a round.

A machine's speed drifts with clock frequency, other load and caches, so alternatives that run one
after the other would be measured at different speeds. Each round runs every alternative once and
starts with a different one, so the drift affects all of them equally. `--busy` is for a machine
with other load.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support.results import write_json
from megatron.utils.environment import processor


@dataclass(frozen=True)
class Timing:
    """The seconds per run of an alternative, and their ratio to the baseline.

    Attributes:
        name: of the alternative.
        median, minimum: seconds.
        ratio: median over the rounds of its time divided by the baseline's in the same round.
        limit: the largest accepted ratio, or None.
        seconds: of every round.
    """

    name: str
    median: float
    minimum: float
    ratio: float
    limit: float | None
    seconds: list[float]

    @property
    def passed(self) -> bool:
        return self.limit is None or self.ratio <= self.limit


Alternatives = Mapping[str, Callable[[], object]]


def option_parser(description: str) -> argparse.ArgumentParser:
    """The options that all CPU benchmarks share. description: its first paragraph is the help."""
    first, _, _ = description.partition("\n\n")
    parser = argparse.ArgumentParser(description=first)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="measurements per alternative")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="measure CPU time on one thread, for a machine with other load",
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser


class CpuBench:
    """A CPU benchmark run.

    Attributes:
        options: of the command line, as `option_parser` parses them.
        tables: those that were printed, by title.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.tables: dict[str, list[Timing]] = {}

        # CPU time counts all threads, so it is measured on one.
        threads = options.threads
        self._clock = time.perf_counter
        if options.busy:
            threads = 1
            self._clock = time.process_time
        torch.set_num_threads(threads)

    def measure(
        self,
        title: str,
        alternatives: Alternatives,
        *,
        rounds: int | None = None,
        warmup: int = 3,
        limits: Mapping[str, float] = {},
    ) -> list[Timing]:
        """Time the alternatives, of which the first is the baseline, and print their table.

        Args:
            rounds: by default those of the command line.
            warmup: rounds that do not count.
            limits: the largest accepted ratios to the baseline, by name.
        """
        seconds = self._measure_rounds(alternatives, warmup, rounds or self.options.rounds)
        baseline = next(iter(seconds.values()))
        timings = []
        for name, times in seconds.items():
            # Ratios within a round, then their median.
            ratios = [time / base for time, base in zip(times, baseline, strict=True)]
            ratio = statistics.median(ratios)
            median = statistics.median(times)
            limit = limits.get(name)
            timings.append(Timing(name, median, min(times), ratio, limit, times))
        _show(title, timings)
        self.tables[title] = timings
        return timings

    def _measure_rounds(
        self, alternatives: Alternatives, warmup: int, rounds: int
    ) -> dict[str, list[float]]:
        """The seconds of every round after the warmup, by name."""
        names = list(alternatives)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(warmup + rounds):
            # Each round starts with another alternative.
            first = number % len(names)
            for name in names[first:] + names[:first]:
                start = self._clock()
                alternatives[name]()
                duration = self._clock() - start
                if number >= warmup:
                    seconds[name].append(duration)
        return seconds

    def finish(self) -> int:
        """Write the tables, and the hardware they were measured on, to the file of `--json`.

        Returns the exit status: 1 if a limit is exceeded, else 0.
        """
        rows = {}
        exceeded = False
        for title, timings in self.tables.items():
            rows[title] = [asdict(timing) for timing in timings]
            exceeded |= not all(timing.passed for timing in timings)
        if self.options.json:
            write_json(self.options.json, {"hardware": hardware(), "tables": rows})
        return int(exceeded)


def _show(title: str, timings: list[Timing]) -> None:
    """Print a table; exceeded limits are marked."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("median ms", "fastest ms", f"ratio to {timings[0].name}", "limit"):
        table.add_column(heading, justify="right")
    for timing in timings:
        limit = ""
        if timing.limit is not None:
            limit = f"{timing.limit:.2f}"
        if not timing.passed:
            limit += " exceeded"
        table.add_row(
            timing.name,
            f"{timing.median * 1e3:.2f}",
            f"{timing.minimum * 1e3:.2f}",
            f"{timing.ratio:.3f}",
            limit,
        )
    Console().print(table)


def hardware() -> dict[str, object]:
    """The hardware and software that the times depend on."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
