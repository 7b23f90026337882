"""Figures of all experiments: a panel per corpus, and in it a thin line or a point per run."""

import itertools
from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator
from pandas import DataFrame, concat

from kerple.positional.alibi import alibi_slopes
from megatron.reporting.aggregate import AnyRecord, Method
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
RANGE = 0.35  # nats to each side in `score_plot`


def cost_plot(costs: DataFrame, train_length: int, style: Style = SCREEN) -> Figure:
    """The cost of extrapolation (`analysis.costs`) by length; 0 at the training length, where a
    window has all keys.
    """
    figure = _lines(_with_start(costs, train_length), train_length, style)
    figure.supylabel("cost of extrapolation (nats)")
    figure.supxlabel("sequence length / training length")
    return figure


def position_plot(differences: DataFrame, train_length: int, style: Style = SCREEN) -> Figure:
    """The loss by position minus that of ALiBi (`analysis.position_differences`)."""
    figure = _lines(
        differences.rename(columns={"position": "x", "difference": "y"}), train_length, style
    )
    figure.supylabel("loss minus ALiBi's (nats)")
    figure.supxlabel("position / training length")
    return figure


def score_plot(scores: DataFrame, style: Style = SCREEN) -> Figure:
    """The loss of each run by its in-context score (`analysis.in_context_scores`); gray: methods
    not in METHODS.
    """
    corpora, figure, panels = _panels(scores, style, sharex=True)
    others = Line2D([], [], label="others", color=GRAY, linestyle="none", marker=".")
    for axes, corpus in zip(panels, corpora, strict=True):
        # Other methods in gray, below those that are named.
        own = scores[scores["corpus"] == corpus]
        rest = own[~own["pos_emb"].isin(METHODS)]
        axes.plot(rest["score"], rest["loss"], color=GRAY, linestyle="none", marker=".")
        for pos_emb in METHODS:
            runs, looks = own[own["pos_emb"] == pos_emb], _looks(style, pos_emb)
            axes.plot(runs["score"], runs["loss"], **(looks | {"linestyle": "none"}))

        # All panels have the same range of losses.
        middle = (own["loss"].min() + own["loss"].max()) / 2
        axes.set_ylim(middle - RANGE, middle + RANGE)
        axes.xaxis.set_major_locator(MultipleLocator(0.2))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1f}"))
    figure.supxlabel("in-context score (nats)")
    figure.supylabel("loss at the training length")
    legend_above(figure, style, [*_handles(style, scores, linestyle="none"), others])
    return figure


def effective_length_plot(records: Iterable[AnyRecord], style: Style = SCREEN) -> Figure:
    """The effective length of each head of each run, divided by the training length; last row:
    ALiBi in the paper.
    """
    # A row per head.
    rows = []
    for record in records:
        if record["kind"] == "effective_length" and record["pos_emb"] in METHODS:
            for length in itertools.chain(*record["effective_lengths"]):
                relative = length / record["train_length"]
                rows.append((record["corpus"], record["pos_emb"], relative))
    frame = DataFrame(rows, columns=["corpus", "pos_emb", "length"])
    methods = [pos_emb for pos_emb in METHODS if pos_emb in set(frame["pos_emb"])]
    corpora, figure, panels = _panels(frame, style, sharex=True, sharey=True)
    for axes, corpus in zip(panels, corpora, strict=True):
        for row, pos_emb in enumerate(methods):
            lengths = frame[(frame["corpus"] == corpus) & (frame["pos_emb"] == pos_emb)]["length"]
            looks = _looks(style, pos_emb) | {"linestyle": "none"}
            axes.plot(lengths, [row] * len(lengths), alpha=0.6, **looks)

        # ALiBi in the paper, and the training length.
        paper = [(2 // slope + 1) / 512 for slope in alibi_slopes(12)]
        axes.plot(paper, [len(methods)] * len(paper), color=GRAY, linestyle="none", marker="|")
        axes.axvline(1, color=GRAY, linestyle="dashed", linewidth=0.1 * style.size)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator([1 / 64, 1, 64]))
        axes.xaxis.set_major_formatter(FuncFormatter(_multiple))
        axes.xaxis.set_minor_locator(NullLocator())
    labels = [display_name(Method(pos_emb)) for pos_emb in methods] + ["ALiBi (paper)"]
    panels[0].set_yticks(range(len(labels)), labels)
    panels[0].invert_yaxis()
    figure.supxlabel("effective length of a head / training length")
    return figure


def _thousands(value: float, _: object) -> str:
    if not value:
        return "0"
    return f"{value / 1000:g}k"


def _multiple(value: float, _: object) -> str:
    if value < 1:
        return f"1/{1 / value:g}"
    return f"{value:g}×"


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
    costs: DataFrame,
    differences: DataFrame,
    progress: DataFrame,
    train_length: int,
    style: Style = SCREEN,
) -> Figure:
    """The cost of extrapolation by length, the loss by position minus that of ALiBi, and the
    in-context score during training (`analysis.training_progress`).
    """
    figure, panels = new_figure(style, 3, 3, 1.5)
    titles = "cost (nats)", "minus ALiBi (nats)", "in-context score"
    frames = {
        "length": _with_start(costs, train_length),
        "position": differences.rename(columns={"position": "x", "difference": "y"}),
    }

    # Two panels by length or position, in training lengths.
    for axes, title, (label, frame) in zip(panels, titles, frames.items(), strict=False):
        axes.set_title(title, loc="left")
        axes.set_xlabel(f"{label} / {train_length:,}")
        _draw_runs(axes, frame.assign(x=frame["x"] / train_length), style)
        _scale_by_length(axes, style)
        _scale_nats(axes)

    # One during training.
    panels[2].set_title(titles[2], loc="left")
    panels[2].set_xlabel("step")
    _draw_runs(panels[2], progress.rename(columns={"step": "x", "score": "y"}), style)
    panels[2].xaxis.set_major_formatter(FuncFormatter(_thousands))
    legend_above(figure, style, _handles(style, costs))
    return figure


def _with_start(costs: DataFrame, train_length: int) -> DataFrame:
    """The costs as y by x, with 0 at the training length, where a window has all keys."""
    frame = costs.rename(columns={"length": "x", "cost": "y"})
    return concat([frame.assign(x=train_length, y=0.0).drop_duplicates(), frame])


def _lines(frame: DataFrame, train_length: int, style: Style) -> Figure:
    """y by x, a panel per corpus, on axes that all panels share."""
    corpora, figure, panels = _panels(frame, style, sharex=True, sharey=True)
    for axes, corpus in zip(panels, corpora, strict=True):
        own = frame[frame["corpus"] == corpus]
        _draw_runs(axes, own.assign(x=own["x"] / train_length), style)
        _scale_by_length(axes, style)
    _scale_nats(panels[0])
    legend_above(figure, style, _handles(style, frame))
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


def _panels(frame: DataFrame, style: Style, **options: Any) -> tuple[list[str], Figure, list[Axes]]:
    """A panel per corpus, side by side, with its name as the title."""
    corpora = sorted(frame["corpus"].unique(), key=corpus_sort_key)
    figure, panels = new_figure(style, len(corpora), len(corpora), 1.5, **options)
    for axes, corpus in zip(panels, corpora, strict=True):
        axes.set_title(corpus_name(corpus), loc="left")
    return corpora, figure, panels


def _looks(style: Style, pos_emb: str) -> dict[str, Any]:
    return line_style(style, line_numbers({"": pos_emb})[""])


def _handles(style: Style, frame: DataFrame, **looks: Any) -> list[Line2D]:
    """The entries of the legend."""
    handles = []
    for pos_emb in METHODS:
        if pos_emb in set(frame["pos_emb"]):
            own = _looks(style, pos_emb) | looks
            handles.append(Line2D([], [], label=display_name(Method(pos_emb)), **own))
    return handles
