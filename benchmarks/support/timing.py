"""Timing of alternatives that run alternately in one process. The result is the ratio to the
baseline within a round.

A machine's speed drifts with clock frequency, other load and caches, so alternatives that run one
after the other would be measured at different speeds. Each round runs every alternative once and
starts with a different one, so the drift affects all of them equally.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

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


def compare(
    alternatives: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    limits: Mapping[str, float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time the alternatives alternately; the first is the baseline. `synchronize` waits for a
    device to finish.

    On a machine with other load, use one thread and `clock=time.process_time`.
    """
    # Each round starts with another alternative.
    names = list(alternatives)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(warmup + rounds):
        shift = round_index % len(names)
        for name in names[shift:] + names[:shift]:
            synchronize()
            start = clock()
            alternatives[name]()
            synchronize()
            if round_index >= warmup:
                seconds[name].append(clock() - start)

    # Ratios within a round, then their median.
    baseline = seconds[names[0]]
    timings = []
    for name, times in seconds.items():
        ratio = statistics.median(time / base for time, base in zip(times, baseline, strict=True))
        limit = (limits or {}).get(name)
        timings.append(Timing(name, statistics.median(times), min(times), ratio, limit, times))
    return timings


def show(title: str, timings: list[Timing]) -> None:
    """Print a table; exceeded limits are marked."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("median ms", "fastest ms", f"ratio to {timings[0].name}", "limit"):
        table.add_column(heading, justify="right")
    for timing in timings:
        limit = ""
        if timing.limit is not None:
            limit = f"{timing.limit:.2f}{' exceeded' * (not timing.passed)}"
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all CPU benchmarks share. `apply_options` applies them."""
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="measurements per alternative")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="measure CPU time on one thread, for a machine with other load",
    )
    parser.add_argument("--json", type=Path, help="file for the results")


def apply_options(options: argparse.Namespace) -> Callable[[], float]:
    """Set the number of threads, and return the clock to measure with."""
    threads, clock = options.threads, time.perf_counter
    if options.busy:
        threads, clock = 1, time.process_time
    torch.set_num_threads(threads)
    return clock


def write_json(path: Path, tables: dict[str, list[Timing]]) -> None:
    """Write the tables, by title, and the hardware they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {title: list(map(asdict, timings)) for title, timings in tables.items()}
    content = {"hardware": hardware(), "tables": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
