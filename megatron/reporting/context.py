"""Context utilization: tables and figures of what models gain from the context beyond k tokens."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from megatron.reporting.aggregate import (
    DIFFERENT_TARGETS,
    AnyRecord,
    Method,
    Setting,
    have_different_targets,
    measurements,
    method_of,
    records_by_seed,
)
from megatron.reporting.figures import ReportFigure
from megatron.reporting.formatting import NOT_AVAILABLE, NOT_MEASURED, format_difference, slug
from megatron.reporting.paper_tables import setting_title
from megatron.reporting.published import display_name, line_numbers, load_published
from megatron.reporting.style import (
    SCREEN,
    Style,
    fill_band,
    legend_above,
    length_ticks,
    line_style,
    mark_train_length,
    new_figure,
)
from megatron.reporting.tables import Cell, Row, Table

Gain = tuple[float, float | None]  # mean difference in nats, and its error: over seeds, or documents with one seed
Gains = dict[Method, dict[int, Gain]]  # by tokens of context; empty if no value is available

ERROR_NOTE = "± is the standard error over documents, or with several seeds the standard deviation over the seeds."


def context_tables(records: Iterable[AnyRecord]) -> list[Table]:
    """A table per setting and length with a row per method and mode, and a column per amount of context."""
    tables = []
    for (setting, length), (gains, notes) in _gains(records).items():
        contexts = sorted({size for by_context in gains.values() for size in by_context})
        rows = []
        for method, by_context in gains.items():
            missing = NOT_MEASURED if by_context else NOT_AVAILABLE
            known = {size: format_difference(*difference) for size, difference in by_context.items()}
            texts = [known.get(size, missing) for size in contexts]
            rows.append(Row((display_name(method),), tuple(map(Cell, texts))))
        tables.append(
            Table(
                slug("context", setting.name, length).lower(),
                f"Loss gained from the context beyond k tokens, {setting_title(setting)}, length {length:,}",
                ("Method",),
                tuple(f"k = {size:,}" for size in contexts),
                tuple(rows),
                ("Loss with k tokens of context minus the loss with the full context (nats per token).", *notes),
            )
        )
    return tables


def context_figures(records: Iterable[AnyRecord]) -> list[ReportFigure]:
    """A figure per setting and length: the difference by k, a line per method and mode."""
    records = list(records)
    pos_embs = list(dict.fromkeys(method_of(record).pos_emb for record in records))
    figures = []
    for (setting, length), (gains, notes) in _gains(records).items():
        measured = {method: by_context for method, by_context in gains.items() if by_context}
        if measured:
            names = ", ".join(map(display_name, measured))
            figures.append(
                ReportFigure(
                    slug("context", setting.name, length).lower(),
                    f"Context utilization at length {length:,}: {setting_title(setting)}",
                    f"Loss with k tokens of context minus that of the same tokens with {length:,}. Bands: {notes[0]}",
                    f"Line plot of the difference of the loss by tokens of context for {names}.",
                    partial(context_plot, measured, setting.train_length, pos_embs=pos_embs),
                )
            )
    return figures


def context_plot(
    gains: Mapping[Method, Mapping[int, Gain]],
    train_length: int | None,
    style: Style = SCREEN,
    *,
    pos_embs: Sequence[str] = (),
) -> Figure:
    """One line per method and mode, with a band of ± the error."""
    figure, (axes,) = new_figure(style)
    handles: list[Any] = []
    numbers = line_numbers({display_name(method): method.pos_emb for method in gains}, pos_embs)
    for method, by_context in gains.items():
        style_kwargs, contexts = line_style(style, numbers[display_name(method)]), list(by_context)
        means, errors = zip(*by_context.values(), strict=True)
        handles += axes.plot(contexts, means, label=display_name(method), zorder=3, **style_kwargs)
        fill_band(axes, contexts, means, [error or 0.0 for error in errors], style_kwargs["color"])
    length_ticks(axes, style, sorted(set().union(*gains.values())), 1)
    axes.axhline(0, color="#999999", linewidth=0.8, linestyle=(0, (1, 2)))
    if train_length is not None:
        mark_train_length(axes, style, train_length)
    axes.set_ylabel("loss gained (nats per token)")
    figure.supxlabel("tokens of context")
    legend_above(figure, style, handles)
    return figure


def _gains(records: Iterable[AnyRecord]) -> dict[tuple[Setting, int], tuple[Gains, list[str]]]:
    """The differences and the notes by setting and length, methods in the order of KERPLE's tables."""
    records = list(records)
    measurements(records, "context", "loss")  # rejects two results of the same seed
    found = {}
    for key, by_method in records_by_seed(records, "context").items():
        gains, notes = {}, [ERROR_NOTE]
        if have_different_targets(record for by_seed in by_method.values() for record in by_seed.values()):
            notes.append(f"The values are not comparable: {DIFFERENT_TARGETS}")
        for method in load_published("kerple-3").ordered(by_method):
            own = by_method[method].values()
            measured = [record for record in own if record["differences"]]
            by_size: dict[int, list[tuple[float, float | None]]] = {}
            for record in measured:
                columns = record["contexts"], record["differences"], record["stderrs"]
                for size, difference, stderr in zip(*columns, strict=True):
                    by_size.setdefault(size, []).append((difference, stderr))
            gains[method] = {size: _gain(by_size[size]) for size in sorted(by_size)}
            reasons = dict.fromkeys(str(record["note"]) for record in own if not record["differences"])
            notes += [f"{NOT_AVAILABLE}: {display_name(method)}: {reason}." for reason in reasons]
        found[key] = gains, notes
    return found


def _gain(seeds: list[Gain]) -> Gain:
    """The mean over the seeds, with the error of `ERROR_NOTE`."""
    if len(seeds) == 1:
        return seeds[0]
    means = [mean for mean, _ in seeds]
    return statistics.fmean(means), statistics.stdev(means)
