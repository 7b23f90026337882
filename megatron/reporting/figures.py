"""The figures of evaluation results: perplexity by length, and passkey accuracy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pandas import DataFrame, concat

from megatron.reporting.aggregate import AnyRecord, Measurements, Method, measurements, method_of
from megatron.reporting.formatting import format_length, slug
from megatron.reporting.paper_tables import (
    compares_modes,
    lengths_notes,
    modes_of,
    setting_title,
)
from megatron.reporting.published import corpus_name, display_name, line_numbers, load_published
from megatron.reporting.style import (
    CHARACTER,
    GRAY,
    SCREEN,
    SMALL,
    Style,
    bands_label,
    draw_band,
    legend_above,
    length_ticks,
    line_style,
    log_perplexity_axis,
    mark_train_length,
    new_figure,
    panel_title,
    render,
    seeds_caption,
    thousands,
)

# Ratio of the largest to the smallest perplexity above which the axis is logarithmic.
LOG_AXIS_RATIO = 4.0
# Lines within this ratio of the smallest perplexity are then shown enlarged in a second panel.
ZOOM_RATIO = 1.5


@dataclass(frozen=True)
class ReportFigure:
    """name: file name without extension. caption: printed below. draw: in a style."""

    name: str
    title: str
    caption: str
    draw: Callable[[Style], Figure]

    @cached_property
    def png(self) -> bytes:
        return render(self.draw)

    @property
    def pdf(self) -> bytes:
        return render(self.draw, format="pdf")


# -- perplexity by length -------------------------------------------------------------------------


def perplexity_figures(records: Sequence[AnyRecord]) -> list[ReportFigure]:
    """Perplexity by length: a figure per corpus, model size, training length and protocol with a
    value. The methods are in the order of the tables.
    """
    pos_embs = list(dict.fromkeys(method_of(record).pos_emb for record in records))
    ordered = load_published("kerple-3").ordered(map(Method, pos_embs))
    order = [method.pos_emb for method in ordered]
    records = sorted(records, key=lambda record: order.index(method_of(record).pos_emb))
    perplexities = measurements(records, "extrapolation", "perplexity")
    figures = []
    for setting in perplexities.settings:
        group = perplexities.select([setting])
        if not group.num_seeds:
            continue
        title = corpus_name(setting.corpus)
        if setting.train_length:
            title += f", trained at length {setting.train_length:,}"
        caption = f"Perplexity by sequence length, protocol {setting.protocol}."
        caption += seeds_caption(group.seeds)
        for note in lengths_notes(group):
            caption += f" {note}"
        draw = partial(perplexity_plot, group, pos_embs=pos_embs)
        figure = ReportFigure(f"extrapolation-{setting.name}", title, caption, draw)
        figures.append(figure)
    return figures


def perplexity_plot(
    perplexities: Measurements, style: Style = SCREEN, *, pos_embs: Iterable[str] = ()
) -> Figure:
    """One line per method and a panel per mode, for one setting; a single method has one line per
    mode instead.

    Bands show the spread over the seeds. If large values make the axis logarithmic, a second panel
    shows the lowest lines on a linear axis. The legend has the order of the measurements. pos_embs:
    see `line_numbers`.
    """
    # Each line has a name and a panel. With one panel, both go into the name.
    (setting,) = perplexities.settings
    curves: dict[Method, DataFrame] = {}
    for method in perplexities.methods:
        curve = perplexities.by_seed(setting, method)
        if len(curve):
            curves[method] = curve
    title = ""
    several_panels = len({method.pos_emb for method in curves}) > 1 < len(modes_of(curves))
    labels = {method: (display_name(method), "") for method in curves}
    if compares_modes(list(curves)):
        title = display_name(Method(next(iter(curves)).pos_emb))
        labels = {method: (method.mode, "") for method in curves}
    elif several_panels:
        for method in curves:
            panel = method.mode
            if panel == "full":
                panel = ""
            labels[method] = display_name(Method(method.pos_emb)), panel

    # A panel per mode.
    numbers = line_numbers({labels[method][0]: method.pos_emb for method in curves}, pos_embs)
    ranges: dict[str, list[tuple[float, float]]] = {}
    for method, curve in curves.items():
        mean = curve.mean(axis=1)
        ranges.setdefault(labels[method][1], []).append((mean.min(), mean.max()))
    figure, panels, columns = _mode_panels(style, ranges)

    # The axes, and the lines of each panel.
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        length_ticks(axes, style, perplexities.lengths, columns)
    for index, (axes, mode) in enumerate(panels):
        if setting.train_length is not None:
            mark_train_length(axes, style, setting.train_length, label=index == 0)
        for method, curve in curves.items():
            label, line_mode = labels[method]
            if line_mode == mode:
                look = line_style(style, numbers[label])
                mean = curve.mean(axis=1)
                (handles[label],) = axes.plot(curve.index, mean, label=label, zorder=3, **look)
                draw_band(axes, curve, look["color"])
    seeds = concat([curve.count(axis=1) for curve in curves.values()])
    bands = bands_label(seeds)
    figure.supxlabel(f"sequence length (tokens){bands}")
    legend_above(figure, style, [handles[label] for label in numbers], title)
    return figure


def _mode_panels(
    style: Style, ranges: Mapping[str, Sequence[tuple[float, float]]]
) -> tuple[Figure, list[tuple[Axes, str]], int]:
    """A figure with a panel per mode. If the lines are far apart, the perplexity axis is
    logarithmic and a second panel shows the lowest lines on a linear axis. The other panels share
    their perplexity axis.

    ranges: mode -> (smallest, largest perplexity) of each line. Returns the figure, the panels with
    their modes, and the number of columns.
    """
    every = [bound for lines in ranges.values() for line in lines for bound in line]
    panels: list[tuple[str, tuple[float, float] | None]] = []  # mode, limits of the axis if zoomed
    for mode, lines in ranges.items():
        panels.append((mode, None))
        low, high = min(low for low, _ in lines), max(high for _, high in lines)
        lowest = [high for _, high in lines if high <= ZOOM_RATIO * low]
        if high > LOG_AXIS_RATIO * low and len(lowest) > 1:
            margin = 0.12 * (max(lowest) - low) or 0.05 * low
            panels.append((mode, (low - margin, max(lowest) + 2 * margin)))

    # The axes of the panels.
    columns = style.columns(len(panels))
    figure, all_axes = new_figure(style, len(panels), columns, sharex=True)
    for axes, (mode, zoom) in zip(all_axes, panels, strict=True):
        if zoom is None and axes is not all_axes[0]:
            axes.sharey(all_axes[0])
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
        thousands(axes, "y")
        axes.set_ylabel("perplexity")
        titles = []
        if len(ranges) > 1:
            titles.append(mode or "full")
        if zoom is not None:
            titles.append("zoom")
            axes.set_ylim(*zoom)
        elif max(every) > LOG_AXIS_RATIO * min(every):
            log_perplexity_axis(axes, min(every), max(every))
        panel_title(axes, style, columns, ", ".join(titles))
    modes = [mode for mode, _ in panels]
    return figure, list(zip(all_axes, modes, strict=True)), columns


# -- passkey retrieval ----------------------------------------------------------------------------


def passkey_figures(records: Iterable[AnyRecord]) -> list[ReportFigure]:
    """A figure per corpus, model size and training length, with one heat map of the mean accuracy
    per method.
    """
    accuracies = measurements(records, "passkey", "accuracy")
    figures = []
    for setting in accuracies.settings:
        group = accuracies.select([setting])
        methods = load_published("kerple-3").ordered(group.methods)
        lengths = group.lengths
        depths = sorted(group.frame["depth"].unique())

        # The mean over the seeds, [depth, length].
        grids = {}
        for method in methods:
            rows = group.frame[group.frame["method"] == method]
            means = rows.groupby(["depth", "length"])["value"].mean().unstack()
            grid = means.reindex(index=depths, columns=lengths).to_numpy(dtype=float)
            grids[display_name(method)] = 100 * grid
        title = f"Passkey retrieval, {corpus_name(setting.corpus)}"
        if setting.train_length:
            title += f", trained at {setting.train_length:,}"
        figure = ReportFigure(
            slug("passkey", setting.corpus or "text", setting.size, setting.train_length).lower(),
            f"Passkey retrieval: {setting_title(setting)}",
            "Percentage of prompts answered with the complete pass key, by prompt length and depth "
            "of the pass key. Crosses: not available.",
            partial(passkey_plot, grids, depths, lengths, title),
        )
        figures.append(figure)
    return figures


def passkey_plot(
    grids: Mapping[str, "np.ndarray[Any, Any]"],
    depths: Sequence[float],
    lengths: Sequence[int],
    title: str,
    style: Style = SCREEN,
) -> Figure:
    """A heat map of percentages `[depth, length]` per method."""
    title_width = SMALL * CHARACTER * (max(map(len, grids)) + 1) + 1
    columns = style.columns(len(grids), max(8.0, 1.4 * len(lengths) + 3, title_width))
    aspect = (1.4 * len(depths) + 3) * style.em * columns / style.width
    figure, panels = new_figure(style, len(grids), columns, aspect, sharex=True, sharey=True)
    for axes, (name, grid) in zip(panels, grids.items(), strict=True):
        panel_title(axes, style, columns, name, margin=1)
        image = _heat_map(axes, style, grid)
        axes.set_xticks(range(len(lengths)), map(format_length, lengths), rotation=90)
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])

    # One color bar, as all panels have the same range.
    bar = figure.colorbar(
        image, ax=panels, label="accuracy (%)", fraction=0.04, aspect=25, pad=0.01
    )
    bar.outline.set_visible(False)
    figure.suptitle(title, size=style.size)
    figure.supxlabel("prompt length (tokens)")
    figure.supylabel("depth of the pass key")
    return figure


def _heat_map(axes: Axes, style: Style, grid: "np.ndarray[Any, Any]") -> Any:
    """Percentages as colors and as numbers. Returns the image."""
    image = axes.imshow(grid, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for (row, column), accuracy in np.ndenumerate(grid):
        # High accuracies are bright.
        text, color = f"{accuracy:.0f}", "white"
        if not np.isfinite(accuracy):
            text, color = "×", GRAY
        elif accuracy > 60:
            color = "black"
        size = 0.75 * SMALL * style.size
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=color)
    return image
