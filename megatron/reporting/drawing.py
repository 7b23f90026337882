"""What all figures have in common: a look that is readable in grey and by the colour-blind, PNG and PDF."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# Okabe and Ito's palette, told apart by the colour-blind; markers and line styles tell the lines apart in grey. Seven
# colours and eight markers share no divisor, so that 56 methods pass before a pair comes back.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = (("o", 6.5), ("s", 6), ("^", 7), ("D", 5.5), ("v", 7), ("P", 8), ("X", 8), ("*", 11))
LINE_STYLES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))

DOTS_PER_INCH = 160
# Text in the PDF stays text (TrueType), as journals want it.
_SAVING = {"pdf.fonttype": 42, "svg.fonttype": "none"}
GREY = "#666666"


@dataclass(frozen=True)
class PaperFigure:
    """`name` is a file's stem; `caption` is printed below; `description` is for who does not see the picture."""

    name: str
    title: str
    caption: str
    description: str
    figure: Figure

    def png(self) -> bytes:
        return self._saved("png", metadata={"Software": None})

    def pdf(self) -> bytes:
        # Without a date, so that the same results give the same file.
        return self._saved("pdf", metadata={"CreationDate": None})

    def _saved(self, kind: str, metadata: dict[str, None]) -> bytes:
        stream = io.BytesIO()
        with rc_context(_SAVING):
            self.figure.savefig(stream, format=kind, metadata=metadata)
        return stream.getvalue()


def new_figure(
    rows: int = 1, columns: int = 1, width: float = 8.0, height: float = 4.4, **options: object
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained", dpi=DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color="#dddddd", linewidth=0.7)
        one.set_axisbelow(True)
    return figure, list(axes.flat)


def method_style(index: int) -> dict[str, object]:
    """A colour, a line style and a marker for the line of that number, alike in no two of the first 56."""
    marker, size = MARKERS[index % len(MARKERS)]
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": LINE_STYLES[index % len(LINE_STYLES)],
        "marker": marker,
        "markersize": size - 1.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
        "linewidth": 1.6,
    }


def mode_style(index: int) -> dict[str, object]:
    """The line of the mode of that number, for methods that are told apart by colour and marker."""
    return {"linestyle": LINE_STYLES[index % len(LINE_STYLES)]}


def head_styles(order: Sequence[int]) -> dict[int, dict[str, object]]:
    """For lines of one kind: from dark to light in the given order (a scale that is even in grey), styles by turns."""
    scale = colormaps["cividis"]
    last = max(1, len(order) - 1)
    return {
        line: {
            "color": scale(0.88 * place / last),
            "linestyle": LINE_STYLES[place % len(LINE_STYLES)],
            "linewidth": 1.6,
        }
        for place, line in enumerate(order)
    }


def thousands(axes: Axes, which: str = "x") -> None:
    """Whole numbers with a comma at the thousands."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def outside_legend(figure: Figure, axes: Axes, columns: int = 1, **options: object) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="outside right center",
            frameon=False,
            fontsize=9,
            handlelength=3.2,
            ncols=columns,
            **options,
        )
