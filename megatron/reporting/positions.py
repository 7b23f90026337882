"""The figures of the loss by position (KERPLE, Figures 5 and 7)."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pandas import DataFrame

from megatron.reporting.aggregate import AnyRecord, Method, Setting, method_of, setting_of
from megatron.reporting.figures import ReportFigure
from megatron.reporting.paper_tables import compares_modes, modes_of
from megatron.reporting.published import corpus_name, display_name, line_numbers, load_published
from megatron.reporting.style import (
    SCREEN,
    Style,
    bands_label,
    draw_band,
    legend_above,
    line_style,
    mark_train_length,
    new_figure,
    panel_title,
    seeds_caption,
    thousands,
)
from megatron.utils.errors import UserError

# Points of a line of differences: adjacent bins are averaged, because single ones are noisy.
MAX_POINTS = 16
# Lines with a larger median difference, in nats, are left out: the others would look alike.
FAR = 1.0

PositionRecords = Mapping[int | None, AnyRecord]  # of one method, by seed
Curves = Mapping[Method, DataFrame]  # a row per bin, indexed by its center, and a column per seed


def position_figures(records: Iterable[AnyRecord]) -> list[ReportFigure]:
    """A figure per setting and length: the loss by position minus that of the first method in the
    order of the tables, on the same text and, unless modes of one method are compared, in the same
    mode. The variation of the text, which all methods share, cancels. Methods without a difference
    from the first one are left out; if there are only such methods, or a single one, the figure
    shows perplexities.
    """
    # Records of all seeds, by setting and length.
    records = list(records)
    pos_embs = list(dict.fromkeys(method_of(record).pos_emb for record in records))
    figures = []
    groups: dict[tuple[Setting, int], dict[Method, dict[int | None, AnyRecord]]] = {}
    for record in records:
        if record["kind"] == "positions" and record.get("losses"):
            by_method = groups.setdefault((setting_of(record), record["length"]), {})
            by_method.setdefault(method_of(record), {})[record.get("seed")] = record
    for (setting, length), by_method in groups.items():
        # Differences from the first method. They are empty without common texts.
        first, *others = load_published("kerple-3").ordered(by_method)
        name = display_name(first)
        one_method = compares_modes(list(by_method))
        bins_of_curve = len(curve_of(by_method[first]))
        differences: dict[Method, DataFrame] = {}
        unpaired = []
        for method in others:
            reference = first
            if not one_method:
                reference = Method(first.pos_emb, method.mode)
            if method == reference:
                continue
            curve = curve_of(by_method[method], by_method.get(reference, {}))
            if curve.shape[1]:
                differences[method] = _smooth(curve)
            else:
                unpaired.append(display_name(method))
        if differences:
            if not one_method:
                name = display_name(Method(first.pos_emb))
            what = f"Loss (nats per token) minus that of {name}"
            label = f"loss minus that of {name}"
            notes = " The differences are those on the same text; below 0 is better."
            bins = _bins_per_point(bins_of_curve)
            if bins > 1:
                notes += f" Points are means of {bins} adjacent bins."

            # A diverged method would flatten the others, so it is only named.
            curves, far = {}, []
            for method, curve in differences.items():
                if curve.mean(axis=1).abs().median() <= FAR:
                    curves[method] = curve
                else:
                    far.append(display_name(method))
            if not curves:
                curves, far = differences, []
            if far:
                notes += f" Not shown, with a median of more than {FAR:g} nat: {', '.join(far)}."
            if unpaired:
                names = ", ".join(unpaired)
                notes += f" Not shown, measured with other texts, bins or seeds: {names}."
        else:
            # Without differences, the methods are plotted themselves.
            what, label, notes, curves = "Perplexity", "perplexity", "", {}
            if others:
                notes = f" No other method has the texts, bins and seeds of {name}."
            for method in (first, *others):
                curves[method] = np.exp(curve_of(by_method[method]).clip(upper=700.0))

        # A panel per mode; a single method has one panel, with a line per mode.
        panels: dict[str, dict[Method, DataFrame]] = {"": curves}
        modes = modes_of(curves)
        if len(modes) > 1 and not one_method:
            panels = {mode: {} for mode in modes}
            for method, curve in curves.items():
                panels[method.mode][method] = curve

        # Plotting waits until the figure is rendered.
        caption = seeds_caption(curve.shape[1] for curve in curves.values()) + notes
        title = f"{what.partition(' (')[0]} by position at length {length:,}"
        draw = partial(
            position_plot, panels, length, setting.train_length, pos_embs=pos_embs, label=label
        )
        figure = ReportFigure(
            f"positions-{setting.name}-{length}",
            f"{title}: {corpus_name(setting.corpus)}",
            f"{what} by position in segments of {length:,} tokens, protocol {setting.protocol} "
            f"(KERPLE, Figures 5 and 7).{caption}",
            draw,
        )
        figures.append(figure)
    return figures


def curve_of(records: PositionRecords, reference: PositionRecords | None = None) -> DataFrame:
    """The loss by position, or the difference from the reference for the seeds that were measured
    on the same text in the same bins: a row per bin, indexed by its center, and a column per seed.

    Raises UserError if the seeds have different bins.
    """
    edges = list(next(iter(records.values()))["edges"])
    if any(list(record["edges"]) != edges for record in records.values()):
        raise UserError(
            "losses by position: the seeds of one method have different bins; evaluate them with "
            "the same options"
        )
    columns = {}
    for seed, record in records.items():
        losses = np.array(record["losses"], dtype=float)
        if reference is not None:
            # Seeds without a comparable record are left out.
            other = reference.get(seed)
            if other is None or other["targets"] != record["targets"]:
                continue
            if list(other["edges"]) != edges:
                continue
            losses -= np.array(other["losses"], dtype=float)
        columns[seed] = losses
    centers = [(start + end) / 2 for start, end in itertools.pairwise(edges)]
    return DataFrame(columns, index=centers)


def _bins_per_point(bins: int) -> int:
    return -(-bins // MAX_POINTS)


def _smooth(curve: DataFrame) -> DataFrame:
    """The means of adjacent bins, at most MAX_POINTS, indexed by the means of their centers."""
    points = np.arange(len(curve)) // _bins_per_point(len(curve))
    return curve.reset_index(names="center").groupby(points).mean().set_index("center")


def position_plot(
    panels: Mapping[str, Curves],
    length: int,
    train_length: int | None,
    style: Style = SCREEN,
    *,
    label: str,
    pos_embs: Sequence[str] = (),
) -> Figure:
    """A panel per title, in it a line per method. A mode that is the title of the panel is not
    repeated in the legend.

    Args:
        label: of the y axis.
        pos_embs: see `line_numbers`.
    """
    columns = style.columns(len(panels), 20)
    figure, all_axes = new_figure(style, len(panels), columns, sharex=True)

    # The name of each line, and where the first one starts.
    names: dict[tuple[str, Method], str] = {}
    numbered: dict[str, str] = {}
    first = length
    for title, curves in panels.items():
        for method, curve in curves.items():
            name = display_name(method)
            if method.mode == title:
                name = display_name(Method(method.pos_emb))
            names[title, method] = name
            numbered[name] = method.pos_emb
            first = min([first, *curve.dropna(how="all").index])
    numbers = line_numbers(numbered, pos_embs)

    # The last-k protocol scores only the end of a segment.
    left = first if length / 2 < first < length else 0
    handles: dict[str, Any] = {}
    seeds = []
    for index, (axes, (title, curves)) in enumerate(zip(all_axes, panels.items(), strict=True)):
        if label != "perplexity":
            axes.axhline(0, color="#444444", linewidth=0.1 * style.size, zorder=1)

        # The lines and their bands.
        for method, curve in curves.items():
            name = names[title, method]
            mean = curve.mean(axis=1)
            look = line_style(style, numbers[name]) | {"marker": None}
            (handles[name],) = axes.plot(curve.index, mean, label=name, zorder=3, **look)
            draw_band(axes, curve, look["color"])
            seeds.append(curve.shape[1])

        # The axes.
        panel_title(axes, style, columns, title)
        thousands(axes)
        axes.set_xlim(left, length)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        if train_length and left <= train_length < length:
            mark_train_length(axes, style, train_length, label=index == 0)
    figure.supxlabel(f"position in the segment (tokens){bands_label(seeds)}")
    figure.supylabel(label)
    legend_above(figure, style, [handles[name] for name in numbers])
    return figure
