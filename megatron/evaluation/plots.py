"""The extrapolation curve: perplexity against length, one line per method and mode."""

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from megatron.evaluation.rows import Row
from megatron.evaluation.tables import Series, group, lengths_of, number

# Okabe and Ito's palette, told apart by the colour-blind; markers and line styles tell the lines apart in grey. Seven
# colours and eight markers share no divisor, so that 56 lines pass before a pair comes back.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))

# Beyond this ratio of the largest perplexity to the smallest, a linear axis would flatten the good methods into one
# line.
LOGARITHMIC_RATIO = 4.0


def draw(rows: Sequence[Row], title: str) -> bytes:
    """The plot as a PNG."""
    figure = Figure(figsize=(7.6, 4.7), layout="constrained", dpi=160)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    series = [one for one in group(rows) if any(one.perplexities.values())]
    for index, one in enumerate(series):
        _line(axes, one, index, _label(one, series))
    _axes(axes, rows, series)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)
    if series:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9.5, handlelength=3.2)
    else:
        axes.text(0.5, 0.5, "no perplexity to show", transform=axes.transAxes, ha="center", va="center")
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _line(axes: Axes, series: Series, index: int, label: str) -> None:
    lengths = sorted(length for length, values in series.perplexities.items() if values)
    means = [series.mean(length) for length in lengths]
    colour = COLOURS[index % len(COLOURS)]
    axes.plot(
        lengths,
        means,
        label=label,
        color=colour,
        marker=MARKERS[index % len(MARKERS)],
        linestyle=STYLES[index % len(STYLES)],
        linewidth=1.8,
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.8,
        zorder=3 + index / 100,
    )
    deviations = [series.deviation(length) or 0.0 for length in lengths]
    if any(deviations):
        low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
        high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
        axes.fill_between(lengths, low, high, color=colour, alpha=0.15, linewidth=0, zorder=2)


def _label(series: Series, all_series: Sequence[Series]) -> str:
    parts = [series.pos_emb]
    if series.mode != "full" or len({one.mode for one in all_series}) > 1:
        parts.append(series.mode)
    if len({one.train_length for one in all_series}) > 1 and series.train_length is not None:
        parts.append(f"trained at {series.train_length:,}")
    return ", ".join(parts)


def _axes(axes: Axes, rows: Sequence[Row], series: Sequence[Series]) -> None:
    lengths = lengths_of(rows)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if len(lengths) > 8:
        axes.tick_params(axis="x", rotation=45)
    axes.set_xlabel("length of the text (tokens)")
    means = [one.mean(length) for one in series for length, values in one.perplexities.items() if values]
    if means and max(means) > LOGARITHMIC_RATIO * min(means):
        axes.set_yscale("log")
        decades = max(means) / min(means) > 100
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if decades else (1.0, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel("perplexity (logarithmic)")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.set_ylabel("perplexity")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    trained = sorted({one.train_length for one in series if one.train_length is not None})
    if len(trained) == 1:
        axes.axvline(trained[0], color="#888888", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        axes.annotate(
            "training length",
            (trained[0], 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2),
            textcoords="offset points",
            fontsize=8.5,
            color="#666666",
            va="top",
        )


def _tick(value: float) -> str:
    return (
        f"{value:,.0f}"
        if value >= 10 and value == round(value)
        else number(value).rstrip("0").rstrip(".")
        if value < 1000
        else f"{value:,.0f}"
    )
