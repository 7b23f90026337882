"""Results of the Chomsky-hierarchy benchmark: a table of tasks and methods, and figures of accuracy
over length.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import Series

from megatron.chomsky.experiment import ExperimentSettings, Result
from megatron.chomsky.tasks import TASKS
from megatron.reporting.aggregate import comparable_means
from megatron.reporting.formatting import best_texts, format_mean
from megatron.reporting.published import line_numbers
from megatron.reporting.style import SCREEN, Style, legend_above, line_style, new_figure
from megatron.reporting.tables import Cell, Row, Table

FEWER_SEEDS = "methods with fewer than others are not bold"  # part of a note


def chomsky_table(results: Sequence[Result], settings: ExperimentSettings) -> Table:
    """The score of each task and method in percent, averaged over seeds."""
    methods = list(dict.fromkeys(result["pos_emb"] for result in results))
    rows = []
    for task in tasks_of(results, TASKS):
        scores: dict[str, dict[int, float]] = {method: {} for method in methods}
        for result in results:
            if result["task"] == task:
                scores[result["pos_emb"]][result["seed"]] = 100 * result["score"]
        cells = mean_cells(scores.values())
        rows.append(Row((TASKS[task].level, task.replace("_", " ")), tuple(cells)))

    # The note tells the lengths and the training.
    tested = [length for length in settings.test_lengths if length > settings.train_longest]
    steps = {0: " by doubling", 1: ""}
    step = steps.get(settings.test_every, f" in steps of {settings.test_every}")
    note = (
        f"Accuracy in percent, averaged over the test lengths {tested[0]} to {tested[-1]}{step} "
        f"(training lengths 1 to {settings.train_longest}; {settings.steps:,} steps of "
        f"{settings.batch} samples; architecture {settings.architecture})."
    )
    num_seeds = len({result["seed"] for result in results})
    if num_seeds > 1:
        note += f" Mean ± standard deviation over up to {num_seeds} seeds; {FEWER_SEEDS}."
    return Table(
        "chomsky",
        "Tasks of the Chomsky hierarchy",
        ("level", "task"),
        tuple(methods),
        tuple(rows),
        (note,),
    )


def mean_cells(
    values: Iterable[Mapping[int, float]], *, standard_error: bool = False
) -> list[Cell]:
    """The mean over the seeds of each method, from its values by seed (see `format_mean`). The
    highest one is bold, of those that `comparable_means` compares.
    """
    cells, texts = [], []
    for by_seed in values:
        cells.append(Series(by_seed, dtype=float))
        known = by_seed.values() or None
        texts.append(format_mean(known, digits=3, standard_error=standard_error))
    best = best_texts(comparable_means(cells), texts, "highest")
    return list(map(Cell, texts, best))


def chomsky_figure(
    results: Sequence[Result], settings: ExperimentSettings, style: Style = SCREEN
) -> Figure:
    """A panel per task with the accuracy of each method (mean over seeds) by input length."""
    tasks = tasks_of(results, TASKS)
    numbers = line_numbers({result["pos_emb"]: result["pos_emb"] for result in results})
    columns = style.columns(len(tasks))
    figure, panels = new_figure(style, len(tasks), columns, sharex=True, sharey=True)
    handles = {}
    for axes, task in zip(panels, tasks, strict=True):
        for method, number in numbers.items():
            # The mean over the seeds at each length.
            line = task, method
            seeds = [r["accuracies"] for r in results if (r["task"], r["pos_emb"]) == line]
            if seeds:
                means = []
                for length in seeds[0]:
                    means.append(100 * statistics.fmean(seed[length] for seed in seeds))
                look = line_style(style, number) | {"marker": None}
                lengths = list(map(int, seeds[0]))
                (handles[method],) = axes.plot(lengths, means, label=method, **look)
        mark_guessing(axes, 100 / TASKS[task].classes)
        axes.set_title(task.replace("_", " "), loc="left")
        axes.set_ylim(0, 102)
    figure.supxlabel(
        f"length of the input (trained up to {settings.train_longest}); dotted: random guessing"
    )
    figure.supylabel("accuracy (%)")
    legend_above(figure, style, list(handles.values()))
    return figure


def mark_guessing(axes: Axes, percent: float) -> None:
    """A dotted line at the accuracy of random guessing."""
    axes.axhline(percent, color="#999999", linewidth=0.8, linestyle=(0, (1, 2)))


def tasks_of(results: Sequence[Result], names: Iterable[str]) -> list[str]:
    """The tasks with results, in the order of `names`."""
    return [name for name in names if any(result["task"] == name for result in results)]
