"""Figures of all experiments: a thin line per run."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from pandas import DataFrame, concat

from megatron.reporting.aggregate import Method
from megatron.reporting.published import corpus_name, corpus_sort_key, display_name, line_numbers
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
LINEAR = 0.05  # nats: logarithmic axes are linear up to here
NATS = (-2, -1, -0.5, -0.2, -0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # ticks
MULTIPLES = (1, 8, 64)  # of the training length: ticks


def cost_plot(costs: DataFrame, style: Style = SCREEN) -> Figure:
    """The cost of extrapolation (`analysis.costs`) by length, a panel per corpus and training
    length; 0 at the training length, where a window has all keys.
    """
    # The panels in the order of the training lengths, then of the papers.
    keys = {*zip(costs["train_length"], costs["corpus"], strict=True)}
    ordered = sorted(keys, key=lambda key: (key[0], corpus_sort_key(key[1])))
    figure, panels = new_figure(style, len(keys), len(keys), 1.9, sharex=True, sharey=True)
    for axes, (train_length, corpus) in zip(panels, ordered, strict=True):
        own = costs[(costs["train_length"] == train_length) & (costs["corpus"] == corpus)]
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


def _thousands(value: float, _: object) -> str:
    if not value:
        return "0"
    return f"{value / 1000:g}k"


def recall_plot(frame: DataFrame, train_length: int, style: Style = SCREEN) -> Figure:
    """Recall by distance (`analysis.recall_by_distance`): the mean over seeds in a band from the
    lowest to the highest one, a panel per method.
    """
    methods = [pos_emb for pos_emb in RECALL_METHODS if pos_emb in set(frame["pos_emb"])]
    figure, panels = new_figure(style, len(methods), 3, 0.8, sharex=True, sharey=True)
    for axes, pos_emb in zip(panels, methods, strict=True):
        # The mean in a band from the lowest to the highest seed.
        by_distance = frame[frame["pos_emb"] == pos_emb].groupby("distance")["recall"]
        values = 100 * by_distance.agg(["mean", "min", "max"])
        looks = _looks(style, pos_emb)
        low, high, color = values["min"], values["max"], looks["color"]
        axes.fill_between(values.index, low, high, color=color, alpha=0.25, linewidth=0)
        axes.plot(values.index, values["mean"], **looks)

        # The axes.
        width = 0.1 * style.size
        axes.axvline(train_length, color=GRAY, linewidth=width, linestyle="dashed", zorder=1)
        axes.set_title(display_name(Method(pos_emb)), loc="left")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator([2, 16, 64, 512]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
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
    by_position.set_title("loss minus ALiBi's (nats)", loc="left")
    by_position.set_xlabel(f"position / {train_length:,}")
    multiples = differences["position"] / train_length
    _draw_runs(by_position, differences.assign(x=multiples, y=differences["difference"]), style)
    _scale_by_length(by_position, style)
    _scale_nats(by_position)

    by_step.set_title("in-context score", loc="left")
    by_step.set_xlabel("step")
    _draw_runs(by_step, progress.rename(columns={"step": "x", "score": "y"}), style)
    by_step.xaxis.set_major_formatter(FuncFormatter(_thousands))
    legend_above(figure, style, _handles(style, progress))
    return figure


def _draw_runs(axes: Axes, frame: DataFrame, style: Style) -> None:
    """y by x, a thin line per run of METHODS."""
    for pos_emb in METHODS:
        runs = frame[frame["pos_emb"] == pos_emb]
        looks = {
            **_looks(style, pos_emb),
            "linewidth": 0.1 * style.size,
            "markersize": 0.35 * style.size,
        }
        for _, run in runs.sort_values("x").groupby("seed"):
            axes.plot(run["x"], run["y"], **looks)
    axes.axhline(0, color=GRAY, linewidth=0.1 * style.size, zorder=1)


def _scale_by_length(axes: Axes, style: Style) -> None:
    """x is a length divided by the training length, which is marked."""
    axes.axvline(1, color=GRAY, linewidth=0.1 * style.size, linestyle="dashed", zorder=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(MULTIPLES))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_locator(NullLocator())


def _scale_nats(axes: Axes) -> None:
    """y is a difference in nats: linear near 0, logarithmic elsewhere."""
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in NATS if low <= tick <= high]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _looks(style: Style, pos_emb: str) -> dict[str, Any]:
    return line_style(style, line_numbers({"": pos_emb})[""])


def _handles(style: Style, frame: DataFrame) -> list[Line2D]:
    """The entries of the legend."""
    handles = []
    for pos_emb in METHODS:
        if pos_emb in set(frame["pos_emb"]):
            looks = _looks(style, pos_emb)
            handles.append(Line2D([], [], label=display_name(Method(pos_emb)), **looks))
    return handles
