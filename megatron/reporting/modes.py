"""Methods in inference modes: heat maps of the loss, and the best combination of both at each length."""

import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from megatron.reporting.aggregate import AnyRecord, Measurements, Method, Setting, measurements
from megatron.reporting.differences import Difference, PairedLosses
from megatron.reporting.figures import ReportFigure
from megatron.reporting.formatting import NOT_AVAILABLE, NOT_MEASURED, format_number, slug
from megatron.reporting.paper_tables import setting_title
from megatron.reporting.published import display_name
from megatron.reporting.style import CHARACTER, COLORS, SCREEN, SMALL, Style, new_figure
from megatron.reporting.tables import Cell, Row, Table

COLOR_RANGE = 1.0  # nats per token above the lowest loss at which colors end
BEST_NOTE = (
    "The best combination is the one with the lowest loss, chosen on the same tokens, so its loss is slightly too low. "
    "Differences, from the same method in mode full and from the runner-up (the combination with the second lowest "
    "loss), compare the same tokens; ± is the standard error over documents. A difference within two standard errors "
    "does not decide which combination is better."
)


@dataclass(frozen=True)
class Best:
    """The combination of method and mode with the lowest loss at a length.

    Attributes:
        loss: mean over the seeds, in nats per token.
        difference: the loss minus that of the same method in mode full; None in that mode, or if not measured.
        runner_up: the combination with the second lowest loss; None if no other has a result.
        lead: the loss minus that of the runner-up; None without one, or if they did not score the same tokens.
    """

    setting: Setting
    length: int
    method: Method
    loss: float
    difference: Difference | None
    runner_up: Method | None
    lead: Difference | None

    def __str__(self) -> str:
        parts = []
        if self.difference is not None and self.runner_up != Method(self.method.pos_emb):
            parts.append(f"{self.difference} against full")
        if self.runner_up is not None:
            difference = "" if self.lead is None else f"{self.lead} against "
            undecided = self.lead is not None and not self.lead.significant
            parts.append(
                f"{difference}the runner-up, {_in_mode(self.runner_up)}"
                + (", within two standard errors" if undecided else "")
            )
        text = f"{_in_mode(self.method)}, loss {format_number(self.loss)}"
        return f"{text} ({'; '.join(parts)})" if parts else text

    def to_json(self) -> dict[str, object]:
        difference, runner_up, lead = self.difference, self.runner_up, self.lead
        return {
            "protocol": self.setting.protocol,
            "length": self.length,
            "pos_emb": self.method.pos_emb,
            "mode": self.method.mode,
            "loss": self.loss,
            "minus_full": None if difference is None else difference.mean,
            "minus_full_stderr": None if difference is None else difference.stderr,
            "runner_up_pos_emb": None if runner_up is None else runner_up.pos_emb,
            "runner_up_mode": None if runner_up is None else runner_up.mode,
            "minus_runner_up": None if lead is None else lead.mean,
            "minus_runner_up_stderr": None if lead is None else lead.stderr,
        }


def _in_mode(method: Method) -> str:
    return f"{display_name(Method(method.pos_emb))} in mode {method.mode}"


def best_combinations(records: Sequence[AnyRecord]) -> list[Best]:
    """The best combination for each setting and length, by the mean over the seeds that all combinations with results
    have, which also give the differences; none if there is no such seed, or if the setting has only one mode. If
    combinations were measured on different tokens, only those on the tokens of the first one are compared.
    """
    losses = measurements(records, "extrapolation", "loss")
    found = []
    for setting in losses.settings:
        methods = [method for other, method in losses.lines if other == setting]
        if len({method.mode for method in methods}) < 2:
            continue
        measured = losses.select([setting]).frame.dropna(subset="value")
        for length, cell in measured.fillna({"targets": ""}).groupby("length"):
            same = cell[cell["targets"] == cell["targets"].iloc[0]]
            by_seed = {method: rows.set_index("seed")["value"] for method, rows in same.groupby("method", sort=False)}
            seeds = set.intersection(*(set(values.index) for values in by_seed.values())) if by_seed else set()
            if not seeds:
                continue
            known = {method: float(values[values.index.isin(seeds)].mean()) for method, values in by_seed.items()}
            paired = PairedLosses(record for record in records if record.get("seed") in seeds)
            method, *others = sorted(known, key=known.__getitem__)
            difference = lead = None
            if method.mode != "full":
                difference = paired.difference((setting, method, length), (setting, Method(method.pos_emb), length))
            if others:
                lead = paired.difference((setting, method, length), (setting, others[0], length))
            found.append(Best(setting, length, method, known[method], difference, others[0] if others else None, lead))
    return found


def mode_tables(records: Sequence[AnyRecord]) -> list[Table]:
    """A table per setting with more than one mode: a row per method and mode that it supports, with its loss minus that
    of the same method in mode full, by length. The notes name the best combination.
    """
    losses, paired = measurements(records, "extrapolation", "loss"), PairedLosses(records)
    best = best_combinations(records)
    tables = []
    for setting in dict.fromkeys(found.setting for found in best):
        selected = losses.select([setting])
        methods = dict.fromkeys(method.pos_emb for method in selected.methods)
        modes = dict.fromkeys(method.mode for method in selected.methods if method.mode != "full")
        rows = []
        for reference, mode in product(map(Method, methods), modes):
            line = setting, replace(reference, mode=mode)
            if not losses.curve(*line).empty:
                keys = [((*line, length), (setting, reference, length)) for length in losses.lengths]
                texts = [paired.text(*pair) for pair in keys]
                rows.append(Row((display_name(reference), mode), tuple(map(Cell, texts))))
        notes = [f"Best at length {found.length:,}: {found}." for found in best if found.setting == setting]
        tables.append(
            Table(
                slug("modes", setting.name).lower(),
                f"Loss minus that of the same method in mode full, {setting_title(setting)}",
                ("Method", "Mode"),
                tuple(f"{length:,}" for length in losses.lengths),
                tuple(rows),
                (*notes, BEST_NOTE),
            )
        )
    return tables


def mode_figures(records: Sequence[AnyRecord]) -> list[ReportFigure]:
    """A heat map per setting with more than one mode."""
    losses = measurements(records, "extrapolation", "loss")
    figures = []
    for setting in dict.fromkeys(found.setting for found in best_combinations(records)):
        title = f"Methods and inference modes: {setting_title(setting)}"
        figures.append(
            ReportFigure(
                slug("modes", setting.name).lower(),
                title,
                "Loss (nats per token) by method and inference mode, a panel per length; the lowest loss is framed. "
                f"Losses more than {COLOR_RANGE:g} nat above it have the darkest color. {NOT_AVAILABLE}: the method "
                f"does not support the mode; {NOT_MEASURED}: not measured.",
                "Heat map of the loss by method and inference mode for each length.",
                partial(heat_map, losses.select([setting]), setting),
            )
        )
    return figures


def heat_map(losses: Measurements, setting: Setting, style: Style = SCREEN) -> Figure:
    """A panel per length: methods by modes, colored by how far the loss is above the lowest one of the length."""
    # Room for the labels of rows and columns, in units of the panel's cells.
    methods = list(dict.fromkeys(method.pos_emb for method in losses.methods))
    modes = list(dict.fromkeys(method.mode for method in losses.methods))
    names = [display_name(Method(pos_emb)) for pos_emb in methods]
    labels, ticks = (SMALL * CHARACTER * max(map(len, texts)) for texts in (names, modes))
    columns = style.columns(len(losses.lengths), labels + 3.2 * len(modes) + 1)
    aspect = (1.8 * len(methods) + ticks + 2) * style.em / (style.width / columns)

    # Blank panels with methods and modes as ticks.
    figure, panels = new_figure(style, len(losses.lengths), columns, aspect)
    for axes, length in zip(panels, losses.lengths, strict=True):
        cells = [[_mean(losses, setting, Method(method, mode), length) for mode in modes] for method in methods]
        values = np.array(cells, dtype=float)
        axes.set_title(f"length {length:,}", loc="left")
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set_xticks(range(len(modes)), modes, rotation=90)
        axes.set_yticks(range(len(methods)), names)
        axes.tick_params(length=0, labelbottom=True)

        # Colors start at the lowest loss of this length.
        lowest = np.nanmin(values) if not np.isnan(values).all() else 0.0
        axes.imshow(values, cmap="viridis_r", vmin=lowest, vmax=lowest + COLOR_RANGE, aspect="auto")

        # The number in each cell, with a frame around the lowest.
        for (row, column), value in np.ndenumerate(values):
            dark = value > lowest + COLOR_RANGE / 2
            measured = losses.values(setting, Method(methods[row], modes[column]), length) is not None
            text = format_number(value, 3) if not np.isnan(value) else NOT_AVAILABLE if measured else NOT_MEASURED
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                size=0.75 * SMALL * style.size,
                weight="bold" if value == lowest else "normal",
                color="white" if dark else "black",
            )
            if value == lowest:
                box = (column - 0.5, row - 0.5), 1, 1
                axes.add_patch(Rectangle(*box, fill=False, edgecolor=COLORS[1], linewidth=0.2 * style.size))

    # One color bar, as all panels have the same range.
    bar = figure.colorbar(
        ScalarMappable(Normalize(0, COLOR_RANGE), "viridis_r"),
        ax=panels,
        label="loss above the lowest (nats per token)",
        extend="max",
        location="bottom",
        fraction=0.04,
        aspect=40,
        pad=0.01,
    )
    bar.outline.set_visible(False)
    title = textwrap.fill(f"Loss (nats per token), {setting_title(setting)}", int(style.width / style.em / CHARACTER))
    figure.suptitle(title, size=style.size)
    return figure


def best_notes(records: Iterable[AnyRecord]) -> list[str]:
    """The best combinations, one sentence each, and how they were chosen."""
    best = best_combinations(list(records))
    several = len({found.setting for found in best}) > 1
    notes = []
    for found in best:
        place = f" ({setting_title(found.setting)})" if several else ""
        notes.append(f"Best at length {found.length:,}{place}: {found}.")
    return [*notes, BEST_NOTE] if notes else []


def _mean(losses: Measurements, setting: Setting, method: Method, length: int) -> float | None:
    """The mean over the seeds; None if there is no value."""
    values = losses.values(setting, method, length)
    known = [] if values is None else values.dropna().tolist()
    return statistics.fmean(known) if known else None
