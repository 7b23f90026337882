"""Figures of all experiments: a thin line per run."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from pandas import DataFrame, concat

from experiments.analysis import method_name
from megatron.reporting.published import corpus_name, corpus_sort_key, line_numbers
from megatron.reporting.style import GRAY, SCREEN, Style, legend_above, line_style, new_figure

METHODS = ("kerple_log", "alibi", "rpe", "rotary", "kerple_power_ap_")
RECALL_METHODS = (
    "kerple_log",
    "kerple_power_ap_",
    "dape_kerple",
    "alibi",
    "rpe",
    "fire",
    "rotary",
    "learned",
    "none",
)
THIN = 0.1  # width of a run's line, relative to the text
LINEAR = 0.05  # nats: logarithmic axes are linear up to here
NATS = (-2, -1, -0.5, -0.2, -0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # ticks
MULTIPLES = (1, 8, 64)  # of the training length: ticks


def cost_plot(costs: DataFrame, style: Style = SCREEN) -> Figure:
    """The cost of extrapolation (`analysis.costs`) by length, a panel per corpus and training
    length; 0 at the training length, where a window has all keys.
    """
    groups = dict(list(costs.groupby(["train_length", "corpus"])))
    count = len(groups)
    figure, panels = new_figure(style, count, count, 1.9, sharex=True, sharey=True)
    for axes, key in zip(panels, sorted(groups, key=_panel_order), strict=True):
        # Every run starts at the training length.
        train_length, corpus = key
        own = groups[key]
        frame = own.assign(x=own["length"] / train_length, y=own["cost"])
        start = frame.assign(x=1.0, y=0.0).drop_duplicates(["pos_emb", "seed"])
        _draw_runs(axes, concat([start, frame]), style)
        _scale_by_length(axes, style)
        axes.set_title(f"{corpus_name(corpus)}, {train_length}", loc="left")
    _scale_nats(panels[0])
    figure.supylabel("cost of extrapolation (nats)")
    figure.supxlabel("sequence length / training length")
    legend_above(figure, style, _handles(style, costs))
    return figure


def _panel_order(key: tuple[int, str]) -> tuple[int, int]:
    """By training length, then as in the papers."""
    train_length, corpus = key
    return train_length, corpus_sort_key(corpus)


def _thousands(value: float, _: object) -> str:
    if not value:
        return "0"
    return f"{value / 1000:g}k"


def recall_plot(frame: DataFrame, train_length: int, style: Style = SCREEN) -> Figure:
    """Recall by distance (`analysis.recall_by_distance`): the mean over seeds in a band from the
    lowest to the highest one, a panel per method.
    """
    groups = dict(list(frame.groupby("pos_emb")))
    methods = [pos_emb for pos_emb in RECALL_METHODS if pos_emb in groups]
    figure, panels = new_figure(style, len(methods), 3, 0.8, sharex=True, sharey=True)
    for axes, pos_emb in zip(panels, methods, strict=True):
        # The mean in a band from the lowest to the highest seed.
        recall = groups[pos_emb].groupby("distance")["recall"]
        values = 100 * recall.agg(["mean", "min", "max"])
        looks = _looks(style, pos_emb)
        axes.fill_between(
            values.index,
            values["min"],
            values["max"],
            color=looks["color"],
            alpha=0.25,
            linewidth=0,
        )
        axes.plot(values.index, values["mean"], **looks)

        # The axes.
        _mark_length(axes, train_length, style)
        axes.set_title(method_name(pos_emb), loc="left")
        axes.set_xscale("log", base=2)
        set_ticks(axes.xaxis, (2, 16, 64, 512))
        axes.set_ylim(0, 110)
    figure.supxlabel("distance between key and query (tokens)")
    figure.supylabel("recall (% of the training length's)")
    return figure


def long_context_plot(
    differences: DataFrame, progress: DataFrame, train_length: int, style: Style = SCREEN
) -> Figure:
    """The loss by position minus that of ALiBi, and the in-context score during training
    (`analysis.training_progress`).
    """
    figure, (by_position, by_step) = new_figure(style, 2, 2)
    multiples = differences["position"] / train_length
    frame = differences.assign(x=multiples, y=differences["difference"])
    _draw_runs(by_position, frame, style)
    _scale_by_length(by_position, style)
    _scale_nats(by_position)
    by_position.set_title("loss minus ALiBi's (nats)", loc="left")
    by_position.set_xlabel(f"position / {train_length:,}")

    # During training.
    frame = progress.rename(columns={"step": "x", "score": "y"})
    _draw_runs(by_step, frame, style)
    by_step.set_title("in-context score", loc="left")
    by_step.set_xlabel("step")
    by_step.xaxis.set_major_formatter(FuncFormatter(_thousands))
    legend_above(figure, style, _handles(style, progress))
    return figure


def _draw_runs(axes: Axes, frame: DataFrame, style: Style) -> None:
    """y by x, a thin line per run of METHODS."""
    for pos_emb in METHODS:
        looks = _looks(style, pos_emb)
        looks["linewidth"] = THIN * style.size
        looks["markersize"] = 0.35 * style.size
        runs = frame[frame["pos_emb"] == pos_emb].sort_values("x")
        for _, run in runs.groupby("seed"):
            axes.plot(run["x"], run["y"], **looks)
    axes.axhline(0, color=GRAY, linewidth=THIN * style.size, zorder=1)


def _scale_by_length(axes: Axes, style: Style) -> None:
    """x is a length divided by the training length, which is marked."""
    _mark_length(axes, 1, style)
    axes.set_xscale("log", base=2)
    set_ticks(axes.xaxis, MULTIPLES, "{:g}×")


def _mark_length(axes: Axes, length: int, style: Style) -> None:
    """A dashed line at the training length."""
    width = THIN * style.size
    axes.axvline(length, color=GRAY, linewidth=width, linestyle="dashed", zorder=1)


def _scale_nats(axes: Axes) -> None:
    """y is a difference in nats: linear near 0, logarithmic elsewhere."""
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
    low, high = axes.get_ylim()
    set_ticks(axes.yaxis, [tick for tick in NATS if low <= tick <= high])


def set_ticks(axis: Axis, ticks: Sequence[float], text: str = "{:g}") -> None:
    """Ticks at these values only, with this text."""
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text.format(value)))
    axis.set_minor_locator(NullLocator())


def _looks(style: Style, pos_emb: str) -> dict[str, Any]:
    """The line of a method, as in the other figures."""
    numbers = line_numbers({"": pos_emb})
    return line_style(style, numbers[""])


def _handles(style: Style, frame: DataFrame) -> list[Line2D]:
    """The entries of the legend."""
    drawn = set(frame["pos_emb"])
    handles = []
    for pos_emb in METHODS:
        if pos_emb in drawn:
            looks = _looks(style, pos_emb)
            handles.append(Line2D([], [], label=method_name(pos_emb), **looks))
    return handles
