"""The style of figures: settings, sizes, fonts, legends and names."""

import io

import matplotlib.image
import pytest

from megatron.reporting.figures import perplexity_figures
from megatron.reporting.style import SCREEN, Style, render
from tests.support.records import record

METHODS = (
    "kerple_log",
    "kerple_power_ap_",
    "alibi",
    "rpe",
    "rotary",
    "sinusoidal",
    "fire",
    "dape_kerple",
)
LENGTHS = tuple(128 * 2**index for index in range(7))
RECORDS = [
    record(method, length, 20.0 * (1 + index if method == "rotary" else 1), mode=mode)
    for method in METHODS
    for mode in ("full", "window@128", "blockwise")
    for index, length in enumerate(LENGTHS)
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("width", [3.25, 6.75])
def test_figures_have_the_width_and_everything_is_inside(width):
    (figure,) = perplexity_figures(RECORDS)
    style = Style(width, size=8.0)
    boxes = []

    def draw(style):
        drawn = figure.draw(style)
        drawn.canvas.draw()
        renderer = drawn.canvas.get_renderer()
        boxes.append(
            (
                drawn.bbox,
                drawn.get_tightbbox(renderer),
                drawn.dpi,
                drawn.legends[0].get_window_extent(),
            )
        )
        boxes.extend(
            text.get_window_extent()
            for axes in drawn.axes
            for text in [axes.xaxis.label, axes.yaxis.label]
        )
        return drawn

    picture = render(draw, style)
    (page, used, dpi, legend), *_ = boxes
    assert page.width / dpi == pytest.approx(width)
    assert (used.x0 > -0.02, used.x1 < width + 0.02, used.y0 > -0.02) == (True, True, True), used
    assert legend.y0 > 0.5 * page.height, "above the axes"
    image = matplotlib.image.imread(io.BytesIO(picture))
    assert image.shape[1] == round(width * dpi)
    assert image[..., :3].std() > 0.02, "not blank"


def test_fonts_are_embedded_as_type_42():
    (figure,) = perplexity_figures(RECORDS[:7])
    pdf = figure.pdf
    assert b"DejaVuSans" in pdf
    assert b"/CIDFontType2" in pdf, "TrueType"
    assert b"/Type3" not in pdf


def test_equal_figures_are_equal_files():
    (figure,) = perplexity_figures(RECORDS[:7])
    assert render(figure.draw, format="pdf") == render(figure.draw, format="pdf")
    assert render(figure.draw) == render(figure.draw)


def test_names_are_drawn_as_they_are():
    """A dollar sign starts math in matplotlib, and wrong math is an error."""
    hostile = [
        record(name, length, 3.0)
        for name in (r"$\frac{$", r"\$a$^$", "x" * 300)
        for length in (32, 64)
    ]
    (figure,) = perplexity_figures(hostile)
    assert figure.png.startswith(b"\x89PNG")
    drawn = []

    def draw(style):
        drawn.append(figure.draw(style))
        return drawn[0]

    assert render(draw, SCREEN, "pdf").startswith(b"%PDF")
    texts = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert texts == [r"$\frac{$", r"\$a$^$", "x" * 59 + "…"]
