"""The common style of all figures, and the figures of evaluation results: perplexity by length and by position, and
passkey accuracy.
"""

import io
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from megatron.reporting.aggregate import AnyRecord, Measurements, Method, Setting, measurements, method_of, setting_of
from megatron.reporting.formatting import format_number, slug
from megatron.reporting.paper_tables import setting_title
from megatron.reporting.published import corpus_name, display_name, published
from megatron.utils.errors import UserError

# Okabe and Ito's palette for the color-blind; markers and line styles distinguish the lines in grayscale. The numbers
# of colors (7) and markers (8) have no common divisor, so the first 56 combinations are different.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = (("o", 6.0), ("s", 5.5), ("^", 6.5), ("D", 5.0), ("v", 6.5), ("P", 7.5), ("X", 7.5), ("*", 10.0))
LINE_STYLES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))
GRAY = "#666666"
MAX_TEXT = 80  # characters of a label

LOG_AXIS_RATIO = 4.0  # ratio of the largest to the smallest perplexity above which the axis is logarithmic
ZOOM_RATIO = 1.5  # lines within this ratio of the smallest perplexity are then shown enlarged in a second panel


@dataclass(frozen=True)
class ReportFigure:
    """name: file name without extension. caption: printed below. description: alternative text."""

    name: str
    title: str
    caption: str
    description: str
    figure: Figure

    @cached_property
    def png(self) -> bytes:
        return save_figure(self.figure)

    @cached_property
    def pdf(self) -> bytes:
        return save_figure(self.figure, "pdf")


def save_figure(figure: Figure, format: Literal["png", "pdf"] = "png") -> bytes:
    """The contents of a PNG or PDF file without version and date, so that equal results give equal files.

    Names are drawn as they are, although matplotlib reads dollar signs as math; long ones are shortened.
    """
    for text in figure.findobj(Text):
        text.set_parse_math(False)
        if len(text.get_text()) > MAX_TEXT:
            text.set_text(f"{text.get_text()[: MAX_TEXT - 1]}…")
    stream = io.BytesIO()
    with rc_context({"pdf.fonttype": 42}):  # TrueType: text stays text
        figure.savefig(stream, format=format, metadata={"Software" if format == "png" else "CreationDate": None})
    return stream.getvalue()


# -- style ------------------------------------------------------------------------------------------------------------


def new_figure(
    rows: int = 1, columns: int = 1, width: float = 8.0, height: float = 4.6, dpi: int = 160, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with this grid of axes, row by row. options: of `Figure.subplots`."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=dpi)
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
    return figure, list(grid.flat)


def line_style(method: int, mode: int | None = None, *, hollow: bool = False) -> dict[str, Any]:
    """The style of a line: color and marker by method, line style by mode if there are several, else by method.

    hollow: with hollow markers, for inference modes other than `full`.
    """
    color, (marker, size) = COLORS[method % len(COLORS)], MARKERS[method % len(MARKERS)]
    return {
        "color": color,
        "linestyle": LINE_STYLES[(method if mode is None else mode) % len(LINE_STYLES)],
        "linewidth": 1.7,
        "marker": marker,
        "markersize": size,
        "markerfacecolor": "white" if hollow else color,
        "markeredgecolor": color if hollow else "white",
        "markeredgewidth": 1.2 if hollow else 0.7,
    }


def thousands(axes: Axes, which: str = "x") -> None:
    """Thousands separators in the tick labels of an axis."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.10g}" if value < 1e7 else format_number(value, 1))
    )


def legend_outside(figure: Figure, handles: Sequence[Any], columns: int = 1) -> None:
    """A legend to the right of the axes."""
    figure.legend(
        handles=handles, loc="outside right center", frameon=False, fontsize=9, handlelength=3.2, ncols=columns
    )


def mark_train_length(axes: Axes, length: int, label: bool = True) -> None:
    axes.axvline(length, color="#888888", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    if label:
        axes.annotate(
            "training length",
            (length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2),
            textcoords="offset points",
            fontsize=8.5,
            color=GRAY,
            va="top",
        )


def log_perplexity_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 1000 * low else (1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("perplexity (log scale)")
    thousands(axes, "y")


# -- perplexity by length ---------------------------------------------------------------------------------------------


def perplexity_figures(records: Iterable[AnyRecord]) -> list[ReportFigure]:
    """Perplexity by length: a figure per corpus, model size, training length and protocol."""
    perplexities = measurements(records, "extrapolation", "perplexity")
    figures = []
    for setting in perplexities.settings:
        group = perplexities.select([setting])
        trained = f", trained at length {setting.train_length}" if setting.train_length else ""
        caption = f"Perplexity by sequence length, protocol {setting.protocol}."
        if group.num_seeds > 1:
            caption += f" Lines: mean; bands: ± one standard deviation, over {group.num_seeds} seeds."
        names = ", ".join(map(display_name, group.methods))
        figure = ReportFigure(
            f"extrapolation-{setting.name}",
            corpus_name(setting.corpus) + trained,
            caption,
            f"Line plot of perplexity by sequence length for {names}.",
            perplexity_plot(group, lambda pos_emb: display_name(Method(pos_emb))),
        )
        figures.append(figure)
    return figures


def perplexity_plot(perplexities: Measurements, name: Callable[[str], str] = str, title: str = "") -> Figure:
    """One line per setting and method, with a band of one standard deviation.

    If large values make the axis logarithmic, a second panel shows the lowest lines on a linear axis.

    Args:
        name: the label of a `pos-emb`.
    """
    curves = {line: perplexities.curve(*line) for line in perplexities.lines}
    curves = {line: curve for line, curve in curves.items() if len(curve)}
    low = min((curve["mean"].min() for curve in curves.values()), default=1.0)
    high = max((curve["mean"].max() for curve in curves.values()), default=1.0)
    lowest = [curve for curve in curves.values() if curve["mean"].max() <= ZOOM_RATIO * low]
    logarithmic = high > LOG_AXIS_RATIO * low
    panels = 2 if logarithmic and len(lowest) > 1 else 1

    train_lengths = {setting.train_length for setting in perplexities.settings}
    train_length = train_lengths.pop() if len(train_lengths) == 1 else None
    figure, panel_axes = new_figure(panels, 1, height=4.6 if panels == 1 else 7.4, sharex=True)
    for axes in panel_axes:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(perplexities.lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        thousands(axes)
        if len(perplexities.lengths) > 8:
            axes.tick_params(axis="x", rotation=45)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
        thousands(axes, "y")
        axes.set_ylabel("perplexity")
        if train_length is not None:
            mark_train_length(axes, train_length, label=axes is panel_axes[0])

    methods = list(dict.fromkeys((method.pos_emb, setting.train_length) for setting, method in curves))
    modes = list(dict.fromkeys((method.mode, setting.protocol, setting.corpus) for setting, method in curves))
    for (setting, method), curve in curves.items():
        mode = modes.index((method.mode, setting.protocol, setting.corpus))
        style = line_style(
            methods.index((method.pos_emb, setting.train_length)), mode if len(modes) > 1 else None, hollow=mode > 0
        )
        deviation = curve["std"].fillna(0.0)
        for axes in panel_axes:
            label = _line_label(setting, method, list(curves), name)
            axes.plot(curve.index.tolist(), curve["mean"].tolist(), label=label, zorder=3, **style)
            if deviation.any():
                band = (curve["mean"] - deviation).tolist(), (curve["mean"] + deviation).tolist()
                axes.fill_between(curve.index.tolist(), *band, color=style["color"], alpha=0.13, linewidth=0, zorder=2)

    first, last = panel_axes[0], panel_axes[-1]
    first.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)
    last.set_xlabel("sequence length (tokens)")
    if logarithmic:
        log_perplexity_axis(first, low, high)
    if panels == 2:
        top = max(curve["mean"].max() for curve in lowest)
        margin = 0.12 * (top - low) or 0.05 * low
        last.set_ylim(low - margin, top + 2 * margin)
        last.set_title("lowest perplexities, linear scale", loc="left", fontsize=9.5, color="#444444")
    if curves:  # the legend lists the lines in the order of their right ends, from top to bottom
        ends = [curve["mean"].iloc[-1] for curve in curves.values()]
        handles, _ = first.get_legend_handles_labels()
        legend_outside(figure, [handles[index] for index in sorted(range(len(ends)), key=lambda i: -ends[i])])
    else:
        first.text(0.5, 0.5, "no perplexity available", transform=first.transAxes, ha="center", va="center")
    return figure


def _line_label(
    setting: Setting, method: Method, lines: Sequence[tuple[Setting, Method]], name: Callable[[str], str]
) -> str:
    """The method, its mode, and the parts of the setting that differ between the lines."""
    parts = [name(method.pos_emb)]
    if method.mode != "full":
        parts.append(method.mode)
    if setting.train_length is not None and len({setting.train_length for setting, _ in lines}) > 1:
        parts.append(f"trained at {setting.train_length:,}")
    for part in ("protocol", "corpus", "size"):
        if len({getattr(setting, part) for setting, _ in lines}) > 1:
            parts.append(getattr(setting, part) or f"unknown {part}")
    return ", ".join(parts)


# -- perplexity by position -------------------------------------------------------------------------------------------

# One seed's (bin edges, losses); there is one more edge than losses.
PositionCurve = tuple[Sequence[float], Sequence[float | None]]


def position_figures(records: Iterable[AnyRecord]) -> list[ReportFigure]:
    """KERPLE's Figures 5 and 7: perplexity by position, a figure per setting and length."""
    curves: dict[tuple[Setting, int], dict[Method, list[PositionCurve]]] = {}
    for record in records:
        if record["kind"] == "positions":
            by_method = curves.setdefault((setting_of(record), record["length"]), {})
            by_method.setdefault(method_of(record), []).append((record["edges"], record["losses"]))
    return [_position_figure(setting, length, by_method) for (setting, length), by_method in curves.items()]


def _position_figure(setting: Setting, length: int, curves: Mapping[Method, Sequence[PositionCurve]]) -> ReportFigure:
    figure, (axes,) = new_figure(height=4.8)
    methods = published("kerple-3").ordered(curves)
    pos_embs = list(dict.fromkeys(method.pos_emb for method in methods))
    modes = sorted({method.mode for method in methods}, key=lambda mode: (mode != "full", mode))
    lowest, medians = [], []
    for method in methods:
        centers, perplexities = mean_position_curve(curves[method])
        mode = modes.index(method.mode) if len(modes) > 1 else None
        style = line_style(pos_embs.index(method.pos_emb), mode, hollow=method.mode != "full")
        axes.plot(centers, perplexities, label=display_name(method), markevery=0.1, **style)
        finite = [perplexity for perplexity in perplexities if math.isfinite(perplexity)]
        if finite:
            lowest.append(min(finite))
            medians.append(statistics.median(finite))
    axes.set_ylabel("perplexity")
    thousands(axes, "y")
    if lowest and max(medians) > LOG_AXIS_RATIO * min(lowest):
        log_perplexity_axis(axes, min(lowest), max(medians))
    thousands(axes)
    axes.set_xlim(0, length)
    axes.set_xlabel("position in the segment (tokens)")
    if setting.train_length and setting.train_length < length:
        mark_train_length(axes, setting.train_length)
    legend_outside(figure, axes.get_legend_handles_labels()[0])

    num_seeds = max(map(len, curves.values()))
    caption = f"Perplexity by position in segments of {length:,} tokens, protocol {setting.protocol}"
    caption += " (KERPLE, Figures 5 and 7)"
    caption += f", mean over {num_seeds} seeds." if num_seeds > 1 else "."
    if modes != ["full"]:
        caption += " Hollow markers: inference modes other than full."
    return ReportFigure(
        f"positions-{setting.name}-{length}",
        f"Perplexity by position at length {length:,}: {corpus_name(setting.corpus)}",
        caption,
        f"Line plot of perplexity by position for {', '.join(map(display_name, methods))}.",
        figure,
    )


def mean_position_curve(curves: Sequence[PositionCurve]) -> tuple[list[float], list[float]]:
    """(centers of the bins, perplexity): exp of each seed's loss, averaged over the seeds that have one.

    Raises UserError if the seeds have different bins.
    """
    edges = list(curves[0][0])
    if any(list(other_edges) != edges for other_edges, _ in curves):
        raise UserError(
            "losses by position: the seeds of one method have different bins; evaluate them with the same options"
        )
    centers = [(start + end) / 2 for start, end in itertools.pairwise(edges)]
    perplexities = []
    for losses in zip(*(losses for _, losses in curves), strict=True):
        values = [math.exp(min(loss, 700.0)) for loss in losses if loss is not None]
        perplexities.append(statistics.fmean(values) if values else math.nan)
    return centers, perplexities


# -- passkey retrieval ------------------------------------------------------------------------------------------------


def passkey_figures(records: Iterable[AnyRecord]) -> list[ReportFigure]:
    """A figure per corpus, model size and training length, with one heat map of the mean accuracy per method."""
    accuracies = measurements(records, "passkey", "accuracy")
    figures = []
    for setting in accuracies.settings:
        group = accuracies.select([setting])
        methods, lengths = published("kerple-3").ordered(group.methods), group.lengths
        depths = sorted(group.frame["depth"].unique())
        columns = min(3, len(methods))
        rows = math.ceil(len(methods) / columns)
        width = max(4.6, 0.6 + columns * max(1.8, 0.62 * len(lengths)))
        height = 0.9 + rows * (0.7 + 0.36 * len(depths))
        figure, panels = new_figure(rows, columns, width=width, height=height, sharex=True, sharey=True)
        averages = []
        for axes, method in zip(panels, methods, strict=False):
            means = group.frame[group.frame["method"] == method].groupby(["depth", "length"])["value"].mean()
            grid = means.unstack().reindex(index=depths, columns=lengths).to_numpy(dtype=float)  # [depth, length]
            image = _heat_map(axes, grid, depths, lengths, display_name(method))
            if np.isfinite(grid).any():
                averages.append(f"{display_name(method)} {np.nanmean(grid):.0%}")
        for axes in panels[len(methods) :]:
            axes.set_visible(False)
        for axes in panels[max(0, len(methods) - columns) : len(methods)]:  # the last panel of each column
            axes.tick_params(labelbottom=True)
        bar = figure.colorbar(image, ax=panels, label="accuracy", format="{x:.0%}", fraction=0.05)
        bar.outline.set_visible(False)
        figure.supxlabel("prompt length (tokens)", fontsize=10)
        figure.supylabel("depth of the pass key", fontsize=10)
        report_figure = ReportFigure(
            slug("passkey", setting.corpus or "text", setting.size, setting.train_length).lower(),
            f"Passkey retrieval: {setting_title(setting)}",
            "Share of prompts answered with the complete pass key, by prompt length and depth of the pass key. "
            "Crosses: not available.",
            f"Heat maps of the accuracy. Mean over lengths and depths: {', '.join(averages) or 'not available'}.",
            figure,
        )
        figures.append(report_figure)
    return figures


def _heat_map(
    axes: Axes, grid: "np.ndarray[Any, Any]", depths: Sequence[float], lengths: Sequence[int], title: str
) -> Any:
    """Accuracies `[depth, length]` as colors and as numbers. Returns the image."""
    image = axes.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=8)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for (row, column), accuracy in np.ndenumerate(grid):
        text, color = ("×", GRAY)
        if np.isfinite(accuracy):
            text, color = f"{accuracy:.0%}", "black" if accuracy > 0.6 else "white"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
    return image
