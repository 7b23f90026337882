"""Passkey retrieval: a table of accuracies, and heat maps over length and depth."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from megatron.reporting.drawing import GREY, PaperFigure, new_figure
from megatron.reporting.layout import NOT_AVAILABLE, NOT_MEASURED, Cell, PaperTable, Row, Section
from megatron.reporting.published import display_name, published
from megatron.reporting.results import Measurements, Method, Setting, in_order, measurements, slug
from megatron.reporting.tables import CORPORA

COLUMNS = 3
# Its lightness grows evenly, so that it reads the same in grey and to the colour-blind.
SCALE = "cividis"


def passkey_tables(records: Sequence[Mapping[str, Any]]) -> list[PaperTable]:
    """For each corpus and training length: methods down, lengths across, a section per depth and one of their mean."""
    tables = []
    for setting, by_depth in _by_depth(records).items():
        methods, lengths = _axes(by_depth, setting)
        lines: list[Row | Section] = []
        if len(by_depth) > 1:
            lines.append(Section("Mean over depths"))
            for method in methods:
                found = [_over_depths(by_depth, setting, method, length) for length in lengths]
                lines.append(Row(display_name(method), tuple(map(_cell, found))))
        for depth, one in by_depth.items():
            lines.append(Section(f"Depth {depth:g}"))
            for method in methods:
                found = [_values(one, setting, method, length) for length in lengths]
                lines.append(Row(display_name(method), tuple(map(_cell, found))))
        notes = ["Prompts answered with the whole number, in per cent."]
        seeds = {record.get("seed") for record in records if record["kind"] == "passkey"}
        if len(seeds) > 1:
            notes.append(f"Mean ± standard deviation over {len(seeds)} seeds.")
        tables.append(
            PaperTable(
                _name(setting),
                f"Passkey retrieval, {_of(setting)}",
                "Method",
                tuple(f"{length}" for length in lengths),
                tuple(lines),
                (*notes, *_reasons(by_depth, setting)),
            )
        )
    return tables


def passkey_figures(records: Sequence[Mapping[str, Any]]) -> list[PaperFigure]:
    """For each corpus and training length a heat map per method, length across and depth down; means over seeds."""
    figures = []
    for setting, by_depth in _by_depth(records).items():
        methods, lengths = _axes(by_depth, setting)
        columns = min(COLUMNS, len(methods))
        rows = -(-len(methods) // columns)
        width, height = (
            max(4.6, 0.6 + columns * max(1.8, 0.62 * len(lengths))),
            0.9 + rows * (0.7 + 0.36 * len(by_depth)),
        )
        figure, axes = new_figure(rows, columns, width=width, height=height, sharex=True, sharey=True)
        described = []
        for one, method in zip(axes, methods, strict=False):
            grid = np.array(
                [
                    [statistics.fmean(_values(found, setting, method, length) or [np.nan]) for length in lengths]
                    for found in by_depth.values()
                ]
            )
            image = _heat_map(one, grid, list(by_depth), lengths, display_name(method))
            if np.isfinite(grid).any():
                described.append(f"{display_name(method)} {np.nanmean(grid):.0%}")
        for one in axes[len(methods) :]:
            one.set_visible(False)
        for one in axes[max(0, len(methods) - columns) : len(methods)]:  # the last of each column
            one.tick_params(labelbottom=True)
        bar = figure.colorbar(image, ax=axes, label="accuracy", format="{x:.0%}", fraction=0.05)
        bar.outline.set_visible(False)
        figure.supxlabel("length of the prompt (tokens)", fontsize=10)
        figure.supylabel("depth of the key", fontsize=10)
        figures.append(
            PaperFigure(
                _name(setting),
                f"Passkey retrieval: {_of(setting)}",
                "Share of prompts answered with the whole number, by the length of the prompt and the depth of the key "
                "in it. Crosses: not available.",
                f"Heat maps of the accuracy; over all lengths and depths {', '.join(described) or 'not available'}.",
                figure,
            )
        )
    return figures


def _heat_map(axes: Axes, grid: np.ndarray, depths: Sequence[float], lengths: Sequence[int], title: str):
    """Accuracies `[depth, length]`, each also as a number."""
    image = axes.imshow(grid, cmap=colormaps[SCALE], vmin=0, vmax=1, aspect="auto")
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=8)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for (row, column), value in np.ndenumerate(grid):
        known = np.isfinite(value)
        text, colour = (f"{value:.0%}", "black" if value > 0.6 else "white") if known else ("×", GREY)
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    return image


def _by_depth(records: Sequence[Mapping[str, Any]]) -> dict[Setting, dict[float, Measurements]]:
    depths = sorted({record["depth"] for record in records if record["kind"] == "passkey"})
    found: dict[Setting, dict[float, Measurements]] = {}
    for depth in depths:
        at_depth = measurements([one for one in records if one.get("depth") == depth], "passkey", "accuracy")
        for setting in at_depth.values:
            found.setdefault(setting, {})[depth] = at_depth
    return found


def _axes(by_depth: Mapping[float, Measurements], setting: Setting) -> tuple[list[Method], list[int]]:
    methods = dict.fromkeys(method for one in by_depth.values() for method in one.methods([setting]))
    lengths = sorted({length for one in by_depth.values() for length in one.lengths([setting])})
    return in_order(list(methods), published("kerple-3").methods), lengths


def _values(found: Measurements, setting: Setting, method: Method, length: int) -> list[float] | None:
    """Of each seed; None where nothing was measured."""
    if not found.tried(setting, method, length):
        return None
    return list(found.of(setting, method, length).values())


def _over_depths(
    by_depth: Mapping[float, Measurements], setting: Setting, method: Method, length: int
) -> list[float] | None:
    """Of each seed that has all depths, the mean over them; None where one was not measured."""
    if not all(one.tried(setting, method, length) for one in by_depth.values()):
        return None
    found = [one.of(setting, method, length) for one in by_depth.values()]
    return [statistics.fmean(one[seed] for one in found) for seed in found[0] if all(seed in one for one in found)]


def _cell(values: list[float] | None) -> Cell:
    if values is None:
        return Cell(NOT_MEASURED)
    if not values:
        return Cell(NOT_AVAILABLE)
    text = f"{100 * statistics.fmean(values):.0f}"
    return Cell(f"{text} ± {100 * statistics.stdev(values):.0f}" if len(values) > 1 else text)


def _reasons(by_depth: Mapping[float, Measurements], setting: Setting) -> list[str]:
    found: dict[tuple[Method, str], set[int]] = {}
    for one in by_depth.values():
        for (place, method, length), reason in one.reasons.items():
            if place == setting:
                found.setdefault((method, reason), set()).add(length)
    return [
        f"{NOT_AVAILABLE}: {display_name(method)} at {', '.join(map(str, sorted(lengths)))}: {reason}."
        for (method, reason), lengths in found.items()
    ]


def _of(setting: Setting) -> str:
    trained = f", trained at length {setting.train_length}" if setting.train_length else ""
    size = f", {setting.size}" if setting.size else ""
    return CORPORA.get(setting.corpus.lower(), setting.corpus) + size + trained


def _name(setting: Setting) -> str:
    return slug("passkey", setting.corpus, setting.size, setting.train_length)
