"""The common style of all figures: their width, fonts, colors, axes and legends."""

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from pandas import DataFrame

from megatron.reporting.formatting import format_number

# Okabe and Ito's palette for the color-blind; markers and line styles distinguish the lines in
# grayscale. The numbers of colors (7) and markers (8) have no common divisor, so the first 56
# combinations are different.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = (
    ("o", 0.6),
    ("s", 0.55),
    ("^", 0.65),
    ("D", 0.5),
    ("v", 0.65),
    ("P", 0.75),
    ("X", 0.75),
    ("*", 1.0),
)  # em
LINE_STYLES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))
GRAY = "#666666"

SMALL = 0.9  # size of panel titles, tick labels and legends relative to other text
CHARACTER = 0.6  # width of a character, in em
PANEL = 14.0  # the narrowest panel, in em


@dataclass(frozen=True)
class Style:
    """width: of a figure in inches. size: of the text in points. dpi: pixels per inch of a PNG."""

    width: float
    size: float = 10.0
    dpi: int = 240

    @property
    def em(self) -> float:
        """The size of the text in inches."""
        return self.size / 72

    @property
    def ems(self) -> float:
        """The width of a figure in em."""
        return self.width / self.em

    @property
    def parameters(self) -> Any:
        """matplotlib's parameters, which `render` sets."""
        line, small = self.size / 13, SMALL * self.size
        return {
            "font.family": "DejaVu Sans",
            "pdf.fonttype": 42,  # TrueType: text stays text
            "ps.fonttype": 42,
            # Sizes of text.
            "font.size": self.size,
            "axes.labelsize": self.size,
            "figure.labelsize": self.size,
            "axes.titlesize": small,
            "xtick.labelsize": small,
            "ytick.labelsize": small,
            "legend.fontsize": small,
            # Widths of lines, lengths of ticks and distances.
            "axes.linewidth": line,
            "xtick.major.width": line,
            "ytick.major.width": line,
            "lines.linewidth": 2 * line,
            "xtick.major.size": 4 * line,
            "ytick.major.size": 4 * line,
            "xtick.major.pad": 4 * line,
            "ytick.major.pad": 4 * line,
            "axes.labelpad": 0.5 * self.size,
            "axes.titlepad": 0.5 * self.size,
        }

    def columns(self, count: int, narrowest: float = PANEL) -> int:
        """How many of `count` panels are side by side if each is at least `narrowest` em wide. Rows
        are about equally long.
        """
        if not count:
            return 1
        most = max(1, min(count, int(self.ems / narrowest)))
        return math.ceil(count / math.ceil(count / most))


# At 5 inches, the text of a figure that a browser fits to a screen of 420 pixels is about 10 pixels
# high.
SCREEN = Style(width=5.0, size=10.0)


def render(
    draw: Callable[[Style], Figure], style: Style = SCREEN, format: Literal["png", "pdf"] = "png"
) -> bytes:
    """The contents of a PNG or PDF file without version and date, so that equal results give equal
    files.

    Dollar signs in names are drawn as they are, not read as math. Long names are shortened.
    """
    stream = io.BytesIO()
    varying = {"png": "Software", "pdf": "CreationDate"}[format]
    with rc_context(style.parameters):
        figure = draw(style)
        longest = int(style.ems / CHARACTER)
        for text in figure.findobj(Text):
            text.set_parse_math(False)
            lines = text.get_text().split("\n")
            text.set_text("\n".join(_shortened(line, longest) for line in lines))
        figure.savefig(stream, format=format, metadata={varying: None})
    return stream.getvalue()


def _shortened(line: str, longest: int) -> str:
    if len(line) <= longest:
        return line
    return f"{line[: longest - 1]}…"


def new_figure(
    style: Style, panels: int = 1, columns: int = 1, aspect: float | None = None, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with this many axes, row by row.

    Args:
        aspect: height of a panel divided by its width (default: 0.62, or 0.8 if there are several
            columns); no panel is less than 9 em high.
        options: of `Figure.subplots`. With `sharex`, only the lowest panel of each column has tick
            labels.
    """
    rows = math.ceil(panels / columns)
    if aspect is None:
        aspect = 0.62 if columns == 1 else 0.8
    panel = max(aspect * style.width / columns, 9 * style.em)
    height = rows * (panel + 1.5 * style.em) + 2 * style.em
    figure = Figure(figsize=(style.width, height), layout="constrained", dpi=style.dpi)
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.07 * style.size)
        axes.set_axisbelow(True)

    # The grid can have more axes than panels; the lowest panels have the labels.
    for axes in grid[panels:]:
        axes.set_visible(False)
    for axes in grid[max(0, panels - columns) : panels]:
        axes.tick_params(labelbottom=True)
    return figure, grid[:panels]


def line_style(style: Style, line: int) -> dict[str, Any]:
    """Color, marker and dashes of a line."""
    color, (marker, size) = COLORS[line % len(COLORS)], MARKERS[line % len(MARKERS)]
    return {
        "color": color,
        "linestyle": LINE_STYLES[line % len(LINE_STYLES)],
        "marker": marker,
        "markersize": 0.9 * size * style.size,
        "markeredgecolor": "white",
        "markeredgewidth": 0.06 * style.size,
    }


def fill_band(
    axes: Axes, x: Sequence[float], mean: Sequence[float], deviation: Sequence[float], color: str
) -> None:
    """A band of ± this deviation around a line."""
    low, high = np.subtract(mean, deviation), np.add(mean, deviation)
    axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0, zorder=2)


def draw_band(axes: Axes, values: DataFrame, color: str) -> None:
    """A band of ± one standard deviation over the seeds, if there are several.

    values: a row per point, indexed by its x coordinate, and a column per seed.
    """
    if values.shape[1] > 1:
        mean, deviation = values.mean(axis=1), values.std(axis=1).fillna(0.0)
        fill_band(axes, values.index.tolist(), mean.tolist(), deviation.tolist(), color)


def seeds_caption(numbers: Iterable[int]) -> str:
    """What `draw_band` draws around lines of these numbers of seeds; empty if all have one seed."""
    seeds = _seeds(numbers)
    if not seeds:
        return ""
    return f" Lines: mean; bands: ± one standard deviation, over {seeds}."


def bands_label(numbers: Iterable[int]) -> str:
    """Like `seeds_caption`, as a second line of an axis label."""
    seeds = _seeds(numbers)
    if not seeds:
        return ""
    return f"\nbands: ± one standard deviation over {seeds}"


def _seeds(numbers: Iterable[int]) -> str:
    *fewer, most = sorted(set(numbers))
    if most == 1:
        return ""
    if fewer:
        return f"up to {most} seeds"
    return f"{most} seeds"


def panel_title(axes: Axes, style: Style, columns: int, text: str, margin: float = 5.0) -> None:
    """A title of one of `columns` panels that are side by side, shortened to the width of the
    panel.

    margin: in em, for the labels to the left of the panel.
    """
    longest = int((style.ems / columns - margin) / (SMALL * CHARACTER))
    axes.set_title(_shortened(text, longest), loc="left")


def thousands(axes: Axes, which: str = "x") -> None:
    """Thousands separators in the tick labels of an axis."""

    def label(value: float, _: object) -> str:
        if value < 1e7:
            return f"{value:,.10g}"
        return format_number(value, 1)

    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    axis.set_major_formatter(FuncFormatter(label))


def length_ticks(axes: Axes, style: Style, lengths: Sequence[int], columns: int) -> None:
    """A logarithmic axis with a tick at each length; the labels are rotated if they do not fit."""
    axes.set_xscale("log", base=2)
    room = style.ems / columns - 5
    if sum(CHARACTER * len(f"{length:,}") + 0.5 for length in lengths) > room:
        axes.tick_params(axis="x", rotation=90)
    step = math.ceil(1.4 * len(lengths) / room)
    axes.xaxis.set_major_locator(FixedLocator(lengths[::-1][::step][::-1]))
    axes.xaxis.set_minor_locator(NullLocator())
    thousands(axes)


def legend_above(figure: Figure, style: Style, handles: Sequence[Any], title: str = "") -> None:
    """A legend above the axes, with as many columns as fit, and a title of the figure above it.

    The figure grows by its height.
    """
    longest = max((len(handle.get_label()) for handle in handles), default=0)
    columns = style.columns(len(handles), SMALL * (CHARACTER * longest + 5))
    height = 1.3 * SMALL * math.ceil(len(handles) / columns) + 1
    if title:
        height += 2
    figure.set_figheight(figure.get_figheight() + height * style.em)
    figure.legend(
        handles=handles,
        loc="outside upper center",
        title=title,
        title_fontproperties={"size": 1.1 * style.size, "weight": "bold"},
        frameon=False,
        ncols=columns,
        handlelength=3,
        columnspacing=1.5,
        labelspacing=0.3,
    )


def mark_train_length(axes: Axes, style: Style, length: int, *, label: bool) -> None:
    axes.axvline(
        length, color="#888888", linewidth=0.1 * style.size, linestyle=(0, (2, 2)), zorder=1
    )
    if label:
        axes.annotate(
            "training length",
            (length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0.3, -0.2),
            textcoords="offset fontsize",
            fontsize=SMALL * style.size,
            color=GRAY,
            va="top",
        )


def log_perplexity_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_yscale("log")
    steps: tuple[float, ...] = (1.0, 2.0, 5.0)
    if high > 100 * low:
        steps = (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("perplexity (log scale)")
    thousands(axes, "y")
