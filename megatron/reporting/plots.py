"""The extrapolation curve: perplexity against length, one line per method and mode."""

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from megatron.evaluation.records import ExtrapolationRecord
from megatron.reporting.aggregate import Series, common_train_length, group, lengths_of, number
from megatron.reporting.drawing import COLORS, LINE_STYLES, MARKERS

# Beyond this ratio of the largest perplexity to the smallest the axis is logarithmic.
LOGARITHMIC_RATIO = 4.0
# Then a second panel shows, on a linear axis, what lies within this ratio of the smallest: the methods that hold.
HOLDING_RATIO = 1.5


def draw(rows: Sequence[ExtrapolationRecord], title: str) -> bytes:
    """The plot as a PNG."""
    image = io.BytesIO()
    figure(rows, title).savefig(image, format="png")
    return image.getvalue()


def figure(rows: Sequence[ExtrapolationRecord], title: str) -> Figure:
    """The plot, with a second panel for the lowest curves where the others leave them no room."""
    series = [one for one in group(rows) if one.lengths]
    means = [one.mean(length) for one in series for length in one.lengths]
    low, high = (min(means), max(means)) if means else (1.0, 1.0)
    logarithmic = high > LOGARITHMIC_RATIO * low
    holding = [one for one in series if max(map(one.mean, one.lengths)) <= HOLDING_RATIO * low]
    panels = 2 if logarithmic and len(holding) > 1 else 1

    drawn = Figure(figsize=(8.0, 4.6 if panels == 1 else 7.4), layout="constrained", dpi=160)
    FigureCanvasAgg(drawn)
    every = drawn.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    for axes in every:
        _lines(axes, series)
        _axes(axes, rows)
        _training_length(axes, common_train_length(rows), label=axes is every[0])
    every[0].set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)
    every[-1].set_xlabel("length of the text (tokens)")
    if logarithmic:
        _logarithmic(every[0], low, high)
    if panels == 2:
        every[1].set_ylim(*_limits(holding))
        every[1].set_title("the lowest, enlarged on a linear axis", loc="left", fontsize=9.5, color="#444444")
    if means:
        _legend(drawn, every[0], series)
    else:
        every[0].text(0.5, 0.5, "no perplexity to show", transform=every[0].transAxes, ha="center", va="center")
    return drawn


def _lines(axes: Axes, series: Sequence[Series]) -> None:
    """A colour and a marker for each method; line style and filling for the mode, or the style for the method too."""
    methods = list(dict.fromkeys((one.pos_emb, one.train_length) for one in series))
    modes = list(dict.fromkeys((one.mode, one.protocol, one.corpus) for one in series))
    for one in series:
        method = methods.index((one.pos_emb, one.train_length))
        mode = modes.index((one.mode, one.protocol, one.corpus))
        colour, (marker, size) = COLORS[method % len(COLORS)], MARKERS[method % len(MARKERS)]
        means = [one.mean(length) for length in one.lengths]
        axes.plot(
            one.lengths,
            means,
            label=_label(one, series),
            color=colour,
            linestyle=LINE_STYLES[(mode if len(modes) > 1 else method) % len(LINE_STYLES)],
            linewidth=1.8,
            marker=marker,
            markersize=size,
            markerfacecolor=colour if mode == 0 else "white",
            markeredgecolor="white" if mode == 0 else colour,
            markeredgewidth=0.7 if mode == 0 else 1.2,
            zorder=3,
        )
        deviations = [one.deviation(length) or 0.0 for length in one.lengths]
        if any(deviations):
            low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
            high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
            axes.fill_between(one.lengths, low, high, color=colour, alpha=0.13, linewidth=0, zorder=2)


def _label(series: Series, every: Sequence[Series]) -> str:
    parts = [series.pos_emb]
    if series.mode != "full":
        parts.append(series.mode)
    if len({one.train_length for one in every}) > 1 and series.train_length is not None:
        parts.append(f"trained at {series.train_length:,}")
    parts += [getattr(series, name) or "unknown" for name in ("protocol", "corpus") if len(_all(every, name)) > 1]
    return ", ".join(parts)


def _all(every: Sequence[Series], name: str) -> set[object]:
    return {getattr(one, name) for one in every}


def _legend(figure: Figure, axes: Axes, series: Sequence[Series]) -> None:
    """Beside the plot, from the highest end of a line to the lowest, as the lines leave it."""
    handles, _ = axes.get_legend_handles_labels()
    ends = sorted(zip(series, handles, strict=True), key=lambda pair: pair[0].mean(pair[0].lengths[-1]), reverse=True)
    figure.legend(
        handles=[handle for _, handle in ends],
        loc="outside right center",
        frameon=False,
        fontsize=9.5,
        handlelength=3.2,
    )


def _axes(axes: Axes, rows: Sequence[ExtrapolationRecord]) -> None:
    lengths = lengths_of(rows)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if len(lengths) > 8:
        axes.tick_params(axis="x", rotation=45)
    axes.set_ylabel("perplexity")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _training_length(axes: Axes, trained: int | None, *, label: bool) -> None:
    if trained is not None:
        axes.axvline(trained, color="#888888", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    if trained is not None and label:
        axes.annotate(
            "training length",
            (trained, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2),
            textcoords="offset points",
            fontsize=8.5,
            color="#666666",
            va="top",
        )


def _logarithmic(axes: Axes, low: float, high: float) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 1000 * low else (1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.10g}" if value < 1e6 else number(value, 1))
    )
    axes.set_ylabel("perplexity (logarithmic axis)")


def _limits(series: Sequence[Series]) -> tuple[float, float]:
    """The range of these lines and a margin."""
    means = [one.mean(length) for one in series for length in one.lengths]
    margin = 0.12 * (max(means) - min(means)) or 0.05 * min(means)
    return min(means) - margin, max(means) + 2 * margin
