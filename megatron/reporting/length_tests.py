"""Length tests of decoders: accuracy by length and by distance, as tables and a figure."""

import statistics
from collections.abc import Callable, Sequence
from itertools import product

from matplotlib.figure import Figure

from megatron.chomsky.experiment import ExperimentSettings, Result
from megatron.chomsky.length_tasks import LENGTH_TASKS
from megatron.reporting.chomsky import FEWER_SEEDS, mark_guessing, mean_cells, tasks_of
from megatron.reporting.formatting import standard_error_of_mean
from megatron.reporting.published import line_numbers
from megatron.reporting.style import (
    SCREEN,
    Style,
    fill_band,
    legend_above,
    length_ticks,
    line_style,
    mark_train_length,
    new_figure,
    panel_title,
)
from megatron.reporting.tables import Row, Section, Table

Curve = dict[int, float]  # percent by length, or by the first distance of a bin


def length_table(results: Sequence[Result], settings: ExperimentSettings) -> Table:
    """The accuracy of each method at each length in percent: mean, standard error over seeds."""
    columns = {length: f"{length:,}" for length in settings.test_lengths}
    note = ""
    if settings.train_longest in columns:
        columns[settings.train_longest] += "*"
        note = "The star marks the longest training length. "
    title = "Length tests: accuracy by length"
    return _table("length_tests", title, results, _by_length, columns, note, settings)


def distance_table(results: Sequence[Result], settings: ExperimentSettings) -> Table:
    """The accuracy at the longest length in percent, by distance between key and query."""
    first = sorted({distance for result in results for distance in _by_distance(result)})
    columns = {distance: f"{distance:,}–{2 * distance - 1:,}" for distance in first}
    title = f"Length tests: accuracy by distance at length {settings.test_lengths[-1]:,}"
    note = "Columns: positions between the key and its query. "
    return _table("length_tests_distance", title, results, _by_distance, columns, note, settings)


def _table(
    name: str,
    title: str,
    results: Sequence[Result],
    curve: Callable[[Result], Curve],
    columns: dict[int, str],
    note: str,
    settings: ExperimentSettings,
) -> Table:
    # A section per task.
    lines: list[Row | Section] = []
    for task in tasks_of(results, LENGTH_TASKS):
        guess = 100 * LENGTH_TASKS[task].guess
        lines.append(Section(f"{task.replace('_', ' ')} (random guessing: {guess:.1f})"))
        by_method: dict[str, dict[int, Curve]] = {}
        for result in results:
            if result["task"] == task:
                curves = by_method.setdefault(result["pos_emb"], {})
                curves[result["seed"]] = curve(result)

        # Mean over the seeds of each method, column by column, with the best value in bold.
        by_column = []
        for column in columns:
            values = []
            for curves in by_method.values():
                values.append({seed: own[column] for seed, own in curves.items() if column in own})
            by_column.append(mean_cells(values, standard_error=True))
        for method, cells in zip(by_method, zip(*by_column, strict=True), strict=True):
            lines.append(Row((method,), cells))

    # The number of seeds decides what the values are.
    num_seeds = len({result["seed"] for result in results})
    note += (
        f"Accuracy in percent (decoders with {settings.num_layers} layers of "
        f"{settings.hidden_size}, trained at lengths up to {settings.train_longest}; "
        f"{settings.steps:,} steps of {settings.batch} samples; tested with "
        f"{settings.test_samples} samples per length"
    )
    notes = [f"{note}).", f"Mean ± standard error over up to {num_seeds} seeds; {FEWER_SEEDS}."]
    if num_seeds == 1:
        notes = [f"{note}, one seed)."]
    return Table(name, title, ("method",), tuple(columns.values()), tuple(lines), tuple(notes))


def length_figure(
    results: Sequence[Result], settings: ExperimentSettings, style: Style = SCREEN
) -> Figure:
    """For each task a panel of accuracy by length, and one by distance at the longest length: a
    line per method (mean over seeds) with a band of ± one standard error.
    """
    tasks = tasks_of(results, LENGTH_TASKS)
    numbers = line_numbers({result["pos_emb"]: result["pos_emb"] for result in results})
    columns = style.columns(2)
    figure, panels = new_figure(style, 2 * len(tasks), columns, sharey=True)
    handles = {}
    for axes, (task, curve) in zip(panels, product(tasks, (_by_length, _by_distance)), strict=True):
        of_task = [result for result in results if result["task"] == task]
        ticks: set[int] = set()
        for method, number in numbers.items():
            seeds = [curve(result) for result in of_task if result["pos_emb"] == method]
            x = sorted(set().union(*seeds))
            if not x:
                continue
            ticks |= set(x)

            # Seeds can lack points.
            values = [[seed[point] for seed in seeds if point in seed] for point in x]
            means = list(map(statistics.fmean, values))
            errors = list(map(standard_error_of_mean, values))
            look = line_style(style, number)
            (handles[method],) = axes.plot(x, means, label=method, **look)
            fill_band(axes, x, means, errors, look["color"])

        # The axes.
        mark_guessing(axes, 100 * LENGTH_TASKS[task].guess)
        axes.set_ylim(0, 102)
        length_ticks(axes, style, sorted(ticks), columns)
        axes.set_xlabel(f"distance at length {settings.test_lengths[-1]:,}")
        if curve is _by_length:
            axes.set_xlabel("length")
            mark_train_length(axes, style, settings.train_longest, label=False)
        panel_title(axes, style, columns, task.replace("_", " "))

    # What lines and bands are.
    explained = "in tokens; dashed: training length, dotted: random guessing"
    if len({result["seed"] for result in results}) > 1:
        explained += "\nbands: ± one standard error over the seeds"
    figure.supxlabel(explained)
    figure.supylabel("accuracy (%)")
    legend_above(figure, style, list(handles.values()))
    return figure


def _by_length(result: Result) -> Curve:
    return {int(length): 100 * accuracy for length, accuracy in result["accuracies"].items()}


def _by_distance(result: Result) -> Curve:
    """At the longest length, by the first distance of each bin."""
    longest = list(result["distances"].values())[-1]
    return {int(distance): 100 * correct / count for distance, (correct, count) in longest.items()}
