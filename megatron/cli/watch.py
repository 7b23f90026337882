"""tools/watch.py: loss, speed, time left and kernel parameters of a running or finished run, and its metrics as CSV."""

import argparse
import csv
import io
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.text import Text

from megatron.reporting.terminal import print_rows, standard_output
from megatron.reporting.training_log import metrics_lines
from megatron.utils.command_line import OptionParser, integer, number
from megatron.utils.errors import UserError
from megatron.utils.files import METRICS, check_writable, write_atomically
from megatron.utils.progress import readable_time
from megatron.utils.typed_json import Int, Name

DESCRIPTION = "Show the loss, speed, time left and kernel parameters of a running or finished training run."
STANDARD_OUTPUT = "-"
COLUMNS = {
    "loss": ("train/loss", "{:.4f}"),
    "validation loss": ("validation/loss", "{:.4f}"),
    "learning rate": ("train/learning_rate", "{:.3e}"),
    "grad norm": ("train/grad_norm", "{:.3f}"),
    "tokens/s": ("train/tokens_per_second", "{:,.0f}"),
}
Metrics = dict[str, Any]  # of one iteration, by name
_METRICS: TypeAdapter[Metrics] = TypeAdapter(dict[Name, Int | float | None])


def main(argv: Sequence[str] | None = None) -> None:
    """Print the state of a run; in a terminal, again and again until it has finished. Raises UserError."""
    options = _parse(argv)
    path = metrics_file(options.run)
    if options.csv is not None:
        content = as_csv(read_metrics(path)).encode()
        if options.csv == STANDARD_OUTPUT:
            sys.stdout.buffer.write(content)
            sys.stdout.flush()
        else:
            check_writable(Path(options.csv).parent, "--csv")
            write_atomically(Path(options.csv), content)
        return
    console = standard_output()
    while True:
        history = read_metrics(path)
        if console.is_terminal and not options.once:
            console.clear()
        print_run(console, path, history, options.rows)
        if options.once or not console.is_terminal or is_finished(history):
            return
        time.sleep(options.interval)


def metrics_file(run: Path) -> Path:
    """The metrics file of a run: `run` itself, or the file in it or in its folder `logs`. Raises UserError."""
    for path in (run, run / METRICS, run / "logs" / METRICS):
        if path.is_file():
            return path
    raise UserError(
        f"{run} contains no {METRICS} or logs/{METRICS}; give the log-dir of a run that has started training "
        "(without log-dir, a run writes no metrics)"
    )


def read_metrics(path: Path) -> list[Metrics]:
    """The metrics of each logged iteration, in order. Incomplete lines are skipped, see `metrics_lines`.

    If a run resumed from an earlier iteration, the metrics of the steps that it repeated are those of the last time.

    Raises UserError if the file cannot be read or a value has a wrong type.
    """
    history: list[Metrics] = []
    for place, content in metrics_lines(path, _METRICS):
        values = {name: value for name, value in content.items() if value is not None}
        iteration = values.get("iteration")
        if not isinstance(iteration, int):
            raise UserError(f"{place}: iteration is missing or not an integer; give a file that training wrote")
        while history and history[-1]["iteration"] > iteration:
            history.pop()
        if history and history[-1]["iteration"] == iteration:
            history[-1] |= values
        else:
            history.append(values)
    return history


def is_finished(history: Sequence[Metrics]) -> bool:
    """Whether the last iteration has been logged."""
    return bool(history) and history[-1]["iteration"] == history[-1].get("last_iteration")


def seconds_left(history: Sequence[Metrics]) -> float | None:
    """The remaining training time at the speed of the latest log line; None if it cannot be estimated."""
    trained = [values for values in history if values.get("train/tokens_per_second") and values.get("train/tokens")]
    if not trained or not trained[-1].get("last_iteration"):
        return None
    latest, before = trained[-1], trained[-2] if len(trained) > 1 else {"iteration": 0, "train/tokens": 0.0}
    tokens = latest["train/tokens"] - before["train/tokens"]
    seconds_per_step = tokens / max(1, latest["iteration"] - before["iteration"]) / latest["train/tokens_per_second"]
    seconds = float((latest["last_iteration"] - latest["iteration"]) * seconds_per_step)
    return seconds if math.isfinite(seconds) else None


def print_run(console: Console, path: Path, history: Sequence[Metrics], rows: int) -> None:
    """Print a line with the progress, a table of the latest iterations, and a table of the kernel parameters."""
    console.print(f"{path}: {describe_progress(path, history)}", highlight=False, markup=False, soft_wrap=True)
    if not history:
        return
    names = [name for name, (key, _) in COLUMNS.items() if any(key in values for values in history)]
    lines = []
    for values in history[-rows:]:
        cells = [f"{values['iteration']:,}"]
        for name in names:
            key, template = COLUMNS[name]
            cells.append(template.format(values[key]) if key in values else "")
        lines.append([Text(cell) for cell in cells])
    print_rows(console, "Training", ["iteration", *names], lines, 1)
    kernels = kernel_parameters(history)
    if kernels:
        headers = ["parameter", "first mean", "mean", "lowest head", "highest head"]
        lines = [[Text(name), *(Text(f"{value:.4f}") for value in values)] for name, values in kernels.items()]
        print_rows(console, "Kernel parameters", headers, lines, 1)


def describe_progress(path: Path, history: Sequence[Metrics]) -> str:
    """Such as `iteration 450 of 600 (75%), 3m left, written 5s ago`."""
    if not history:
        return "no metrics yet"
    latest = history[-1]
    last = latest.get("last_iteration")
    parts = [
        f"iteration {latest['iteration']:,}" + (f" of {last:,} ({latest['iteration'] / last:.0%})" if last else "")
    ]
    left = seconds_left(history)
    if is_finished(history):
        parts.append("finished")
    elif left is not None:
        parts.append(f"{readable_time(left)} left")
    parts.append(f"written {readable_time(max(0.0, time.time() - path.stat().st_mtime))} ago")
    return ", ".join(parts)


def kernel_parameters(history: Sequence[Metrics]) -> dict[str, tuple[float, float, float, float]]:
    """Parameter -> its first logged mean over heads, and its latest mean, minimum and maximum."""
    logged = [values for values in history if any(key.startswith("kernel/") for key in values)]
    parameters = {}
    for key, mean in logged[-1].items() if logged else ():
        name = key.removeprefix("kernel/").removesuffix("/mean")
        if key == f"kernel/{name}/mean":
            low, high = (logged[-1].get(f"kernel/{name}/{end}", math.nan) for end in ("min", "max"))
            parameters[name] = logged[0].get(key, math.nan), mean, low, high
    return parameters


def as_csv(history: Sequence[Metrics]) -> str:
    """One line per iteration and one column per metric, with a header. Metrics that were not logged are empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(
        stream, list(dict.fromkeys(key for values in history for key in values)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(history)
    return stream.getvalue()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=DESCRIPTION)
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the run's log-dir, or the folder that contains it as logs"
    )
    parser.add_argument("--csv", metavar="FILE", help="write all metrics as CSV instead; - for stdout")
    parser.add_argument("--once", action="store_true", help="print once, also in a terminal")
    parser.add_argument(
        "--interval",
        type=number(0, 86400, above=True),
        default=5.0,
        metavar="SECONDS",
        help="time between updates in a terminal (default: %(default)s)",
    )
    parser.add_argument(
        "--rows",
        type=integer(1, 10**6),
        default=10,
        metavar="N",
        help="latest iterations to list (default: %(default)s)",
    )
    return parser.parse_args(argv)
