"""Fair timing of alternatives: they take turns in one process, and what counts is the ratio within a turn.

A machine's speed drifts (clock, neighbours, caches); alternatives that run one after the other would be compared at
different speeds. Every round runs each of them once, starting with another one each time, so that the drift hits all
alike.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Timing:
    """One alternative: seconds per run, and its ratio to the baseline.

    Attributes:
        name: of the alternative.
        median, minimum: seconds.
        ratio: median over the rounds of its time divided by the baseline's in the same round.
        limit: the largest ratio that is good enough, or None.
    """

    name: str
    median: float
    minimum: float
    ratio: float
    limit: float | None

    @property
    def passed(self) -> bool:
        return self.limit is None or self.ratio <= self.limit


def compare(
    alternatives: dict[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    limits: dict[str, float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time the alternatives by turns; the first one is the baseline. `synchronize` waits for a device's work.

    On a machine that is busy with other things, one thread and `clock=time.process_time` still give a fair ratio.
    """
    names = list(alternatives)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            synchronize()
            start = clock()
            alternatives[name]()
            synchronize()
            if turn >= warmup:
                seconds[name].append(clock() - start)
    baseline = seconds[names[0]]
    return [
        Timing(
            name,
            statistics.median(seconds[name]),
            min(seconds[name]),
            statistics.median(mine / theirs for mine, theirs in zip(seconds[name], baseline, strict=True)),
            (limits or {}).get(name),
        )
        for name in names
    ]


def show(title: str, timings: list[Timing], console: Console | None = None) -> None:
    """Print a table; a missed limit is marked."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("median ms", "fastest ms", f"ratio to {timings[0].name}", "limit"):
        table.add_column(heading, justify="right")
    for timing in timings:
        limit = "" if timing.limit is None else f"{timing.limit:.2f}" + ("" if timing.passed else " missed")
        table.add_row(
            timing.name, f"{timing.median * 1e3:.2f}", f"{timing.minimum * 1e3:.2f}", f"{timing.ratio:.3f}", limit
        )
    (console or Console()).print(table)


def hardware() -> dict[str, object]:
    """What the numbers depend on."""
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that all benchmarks share; `apply_options` puts them into effect."""
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="turns that each alternative gets")
    parser.add_argument("--busy", action="store_true", help="count CPU time on one thread, for a machine that is busy")
    parser.add_argument("--json", type=Path, help="also write the numbers here")


def apply_options(options: argparse.Namespace) -> Callable[[], float]:
    """Set the number of threads; the clock to time with."""
    torch.set_num_threads(1 if options.busy else options.threads)
    return time.process_time if options.busy else time.perf_counter


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write_json(path: Path, tables: dict[str, list[Timing]]) -> None:
    """Keep the tables, by title, and the hardware they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "hardware": hardware(),
        "tables": {title: [asdict(row) for row in rows] for title, rows in tables.items()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
