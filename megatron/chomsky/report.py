"""The benchmark's results as a table, tasks by methods, and as curves of accuracy over length."""

import io
import statistics
from collections.abc import Sequence
from typing import TypedDict

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from megatron.chomsky.experiment import Settings
from megatron.chomsky.tasks import TASKS
from megatron.reporting.figures import COLORS, LINE_STYLES

COLUMNS = 3


class Result(TypedDict):
    """One run: `accuracies[length]` in [0, 1], lengths as decimal strings, and their mean, the `score`."""

    task: str
    pos_emb: str
    seed: int
    score: float
    accuracies: dict[str, float]


def table(results: Sequence[Result]) -> tuple[list[str], list[list[str]], list[list[bool]]]:
    """Titles; lines `level, task, mean score in percent (± deviation over seeds) of each method`; which scores are
    their line's best.
    """
    methods = list(dict.fromkeys(one["pos_emb"] for one in results))
    lines, best = [], []
    for task in (name for name in TASKS if any(one["task"] == name for one in results)):
        scores = [
            [100 * one["score"] for one in results if (one["task"], one["pos_emb"]) == (task, method)]
            for method in methods
        ]
        cells = [_cell(values) for values in scores]
        means = [statistics.fmean(values) if values else -1.0 for values in scores]
        lines.append([TASKS[task].level, task.replace("_", " "), *cells])
        best.append([len(methods) > 1 and round(mean, 1) == round(max(means), 1) for mean in means])
    return ["level", "task", *methods], lines, best


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "n/a"
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def explanation(settings: Settings) -> str:
    """What the numbers are."""
    return (
        f"Accuracy in percent, the mean over test lengths {settings.train_longest + 1} to {settings.test_longest} "
        f"(training lengths 1 to {settings.train_longest}; {settings.steps:,} steps of {settings.batch} samples). "
        "The best of each task is bold."
    )


def markdown(results: Sequence[Result], settings: Settings) -> str:
    """A Markdown document."""
    titles, lines, best = table(results)
    rows = [
        [*line[:2], *(f"**{cell}**" if first else cell for cell, first in zip(line[2:], marks, strict=True))]
        for line, marks in zip(lines, best, strict=True)
    ]
    rule = [":--", ":--", *["--:"] * (len(titles) - 2)]
    written = [f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows)]
    return "\n".join(["# Tasks of the Chomsky hierarchy", "", *written, "", explanation(settings), ""])


def rich_table(results: Sequence[Result]) -> Table:
    """The same for the terminal."""
    titles, lines, best = table(results)
    shown = Table(title="Accuracy beyond the training length, percent", title_justify="left")
    for index, title in enumerate(titles):
        shown.add_column(title, justify="left" if index < 2 else "right")
    for line, marks in zip(lines, best, strict=True):
        cells = (f"[bold]{cell}[/]" if first else cell for cell, first in zip(line[2:], marks, strict=True))
        shown.add_row(*line[:2], *cells)
    return shown


def draw(results: Sequence[Result], settings: Settings) -> bytes:
    """PNG: for each task, accuracy over length, a line for each method (mean over seeds)."""
    tasks = [name for name in TASKS if any(one["task"] == name for one in results)]
    methods = list(dict.fromkeys(one["pos_emb"] for one in results))
    columns = min(COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(1.2 + 3.3 * columns, 1.3 + 2.2 * rows), layout="constrained", dpi=140)
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(tasks) :]:
        axes.set_visible(False)
    handles = {}
    for axes, task in zip(grid.flat, tasks, strict=False):
        for index, method in enumerate(methods):
            runs = [one["accuracies"] for one in results if (one["task"], one["pos_emb"]) == (task, method)]
            if runs:
                lengths = [int(length) for length in runs[0]]
                means = [100 * statistics.fmean(run[str(length)] for run in runs) for length in lengths]
                colour, style = COLORS[index % len(COLORS)], LINE_STYLES[index % len(LINE_STYLES)]
                (handles[method],) = axes.plot(lengths, means, color=colour, linestyle=style, linewidth=1.5)
        chance = 100 / TASKS[task].classes
        axes.axhline(chance, color="#999999", linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_title(task.replace("_", " "), loc="left", fontsize=9.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(0, 102)
        axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    figure.supxlabel(
        f"length of the input (trained up to {settings.train_longest}); dotted: a guess among the classes", fontsize=9.5
    )
    figure.supylabel("accuracy, percent", fontsize=9.5)
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=9)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
