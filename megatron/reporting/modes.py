"""Methods in inference modes: heat maps of the loss, and differences from mode full."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from megatron.reporting.aggregate import (
    AnyRecord,
    Measurements,
    Method,
    Setting,
    comparable_means,
    measurements,
)
from megatron.reporting.differences import PairedLosses
from megatron.reporting.figures import ReportFigure
from megatron.reporting.formatting import (
    NOT_AVAILABLE,
    NOT_MEASURED,
    best_texts,
    format_length,
    format_number,
    slug,
)
from megatron.reporting.paper_tables import (
    compares_modes,
    modes_of,
    setting_title,
    settings_notes,
)
from megatron.reporting.published import display_name
from megatron.reporting.style import CHARACTER, COLORS, SCREEN, SMALL, Style, new_figure
from megatron.reporting.tables import Table

COLOR_RANGE = 1.0  # nats per token above the lowest loss at which colors end


def mode_tables(records: Sequence[AnyRecord]) -> list[Table]:
    """A table per setting with more than one mode: a row per method and mode that it supports, with
    its loss minus that of the same method in mode full, by length.
    """
    losses, paired = measurements(records, "extrapolation", "loss"), PairedLosses(records)
    tables = []
    for setting in _settings(losses):
        selected = losses.select([setting])
        methods = dict.fromkeys(method.pos_emb for method in selected.methods)
        modes = dict.fromkeys(method.mode for method in selected.methods if method.mode != "full")
        rows = []
        for reference, mode in product(map(Method, methods), modes):
            # A pair of cells per length.
            method = replace(reference, mode=mode)
            pairs = []
            for length in selected.lengths:
                pairs.append(((setting, method, length), (setting, reference, length)))
            if not losses.by_seed(setting, method).empty:
                rows.append(((display_name(reference), mode), pairs))
        if any(paired.difference(*pair) for _, pairs in rows for pair in pairs):
            table = Table(
                slug("modes", setting.name).lower(),
                f"Loss minus that of the same method in mode full, {_title(setting)}",
                ("Method", "Mode"),
                tuple(map(format_length, selected.lengths)),
                paired.rows(rows),
                (paired.note(rows), *settings_notes(selected)),
            )
            tables.append(table)
    return tables


def mode_figures(records: Sequence[AnyRecord]) -> list[ReportFigure]:
    """A heat map per setting with more than one mode and method. The modes of a single method are
    the lines of its figure of perplexities.
    """
    losses = measurements(records, "extrapolation", "loss")
    figures = []
    for setting in _settings(losses):
        selected = losses.select([setting])
        if compares_modes(selected.methods):
            continue
        figure = ReportFigure(
            slug("modes", setting.name).lower(),
            f"Methods and inference modes: {_title(setting)}",
            "Loss (nats per token) by method and inference mode, a panel per length; the lowest "
            "loss is framed, and others that are printed the same, but none with fewer seeds than "
            "others. "
            f"Losses more than {COLOR_RANGE:g} nat above it have the darkest color. "
            f"{NOT_AVAILABLE}: the method does not support the mode or the length; "
            f"{NOT_MEASURED}: not measured.",
            partial(heat_map, selected, setting),
        )
        figures.append(figure)
    return figures


def heat_map(losses: Measurements, setting: Setting, style: Style = SCREEN) -> Figure:
    """A panel per length: methods by modes, colored by the loss above the lowest one."""
    # Room for the labels of rows and columns, in units of the panel's cells.
    methods = list(dict.fromkeys(method.pos_emb for method in losses.methods))
    modes = list(dict.fromkeys(method.mode for method in losses.methods))
    names = [display_name(Method(pos_emb)) for pos_emb in methods]
    labels = SMALL * CHARACTER * max(map(len, names))
    ticks = SMALL * CHARACTER * max(map(len, modes))
    columns = style.columns(len(losses.lengths), labels + 3.2 * len(modes) + 1)
    aspect = (1.8 * len(methods) + ticks + 2) * style.em / (style.width / columns)

    # Blank panels with methods and modes as ticks.
    figure, panels = new_figure(style, len(losses.lengths), columns, aspect)
    figure.set_figheight(figure.get_figheight() + 7 * style.em)  # the title and the color bar
    for axes, length in zip(panels, losses.lengths, strict=True):
        # The mean over the seeds and the text of each cell, row by row.
        cells, means, texts = [], [], []
        for pos_emb, mode in product(methods, modes):
            cell = losses.values(setting, Method(pos_emb, mode), length)
            mean, text = math.nan, NOT_MEASURED
            if cell is not None:
                mean = cell.mean()
                text = format_number(mean, 3)
            cells.append(cell)
            means.append(mean)
            texts.append(text)
        values = np.reshape(means, (len(methods), len(modes)))
        axes.set_title(f"length {length:,}", loc="left")
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set_xticks(range(len(modes)), modes, rotation=90)
        axes.set_yticks(range(len(methods)), names)
        axes.tick_params(length=0, labelbottom=True)

        # Colors start at the lowest loss of this length, of cells with the same seeds.
        comparable = comparable_means(cells)
        lowest = 0.0
        if not np.isnan(comparable).all():
            lowest = np.nanmin(comparable)
        axes.imshow(values, cmap="viridis_r", vmin=lowest, vmax=lowest + COLOR_RANGE, aspect="auto")

        # The number in each cell, with a frame around the lowest.
        framed = best_texts(comparable, texts, "lowest")
        size = 0.75 * SMALL * style.size
        for (row, column), value in np.ndenumerate(values):
            index = row * len(modes) + column
            label = axes.text(column, row, texts[index], ha="center", va="center", size=size)
            if value > lowest + COLOR_RANGE / 2:
                label.set_color("white")  # on a dark cell
            if framed[index]:
                label.set_fontweight("bold")
                corner = (column - 0.5, row - 0.5)
                width = 0.2 * style.size
                frame = Rectangle(corner, 1, 1, fill=False, edgecolor=COLORS[1], linewidth=width)
                axes.add_patch(frame)

    # One color bar, as all panels have the same range.
    bar = figure.colorbar(
        ScalarMappable(Normalize(0, COLOR_RANGE), "viridis_r"),
        ax=panels,
        label="nats per token above the lowest",
        extend="max",
        location="bottom",
        fraction=0.04,
        aspect=40,
        pad=0.01,
    )
    bar.outline.set_visible(False)
    characters = int(style.ems / CHARACTER)
    title = textwrap.fill(
        f"Loss (nats per token), {_title(setting)}", characters, break_on_hyphens=False
    )
    figure.suptitle(title, size=style.size)
    return figure


def _settings(losses: Measurements) -> list[Setting]:
    """Those with a loss and with more than one mode."""
    found = []
    for setting in losses.settings:
        selected = losses.select([setting])
        if selected.num_seeds and len(modes_of(selected.methods)) > 1:
            found.append(setting)
    return found


def _title(setting: Setting) -> str:
    return f"{setting_title(setting)}, protocol {setting.protocol}"
