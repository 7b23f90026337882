"""What is plotted, read back from the axes."""

import io
import math

import matplotlib.image
import numpy as np
import pytest

from megatron.reporting import figures
from megatron.reporting.aggregate import measurements
from megatron.utils.errors import UserError
from tests.support.records import passkey_record, record, seeds

LENGTHS = (128, 256, 512)


def records_of(values, **keys):
    """`method -> perplexities at LENGTHS` as records."""
    return [
        record(name, length, perplexity, **{"train_length": 128, **keys})
        for name, perplexities in values.items()
        for length, perplexity in zip(LENGTHS, perplexities, strict=True)
    ]


TWO_METHODS = records_of({"kerple_log": (101.3, 100.5, 100.3), "rotary": (115.3, 131.0, 157.7)})
ONE_DIVERGES = records_of({"a": (20, 19, 18), "b": (21, 20, 19), "rotary": (25, 900, 30_000)})


def plot(records):
    return figures.perplexity_plot(measurements(records, "extrapolation", "perplexity"))


def data(axes):
    return {line.get_label(): line.get_data() for line in axes.lines}


def test_perplexity_by_length():
    records = [*seeds("kerple_log", 512, [3.0, 3.4]), *seeds("kerple_log", 1024, [2.8, 3.0]), record("rpe", 512, 3.1)]
    (figure,) = figures.perplexity_figures([*records, record("rpe", 1024, None)])
    assert figure.name == "extrapolation-github-12x768-512-non-overlapping"
    assert figure.title == "GitHub, trained at length 512"
    assert figure.caption.endswith("bands: ± one standard deviation, over 2 seeds.")
    (axes,) = figure.figure.axes
    lines = data(axes)
    assert list(lines["KERPLE (log)"][0]) == [512, 1024]
    np.testing.assert_allclose(lines["KERPLE (log)"][1], [3.2, 2.9])
    assert list(lines["T5"][0]) == [512], "a length without a value is left out"
    (band,) = axes.collections
    low, high = band.get_datalim(axes.transData).intervaly
    deviation = np.std([3.0, 3.4], ddof=1)
    assert (low, high) == (pytest.approx(2.9 - np.std([2.8, 3.0], ddof=1)), pytest.approx(3.2 + deviation))
    legend = [text.get_text() for text in figure.figure.legends[0].get_texts()]
    assert legend == ["T5", "KERPLE (log)"], "from the highest right end to the lowest"
    assert figure.png[:4] == b"\x89PNG"
    assert figure.pdf[:5] == b"%PDF-"
    image = matplotlib.image.imread(io.BytesIO(figure.png))
    assert image.shape[0] > 500
    assert image[..., :3].std() > 0.02, "not blank"


@pytest.mark.parametrize(
    ("records", "panels", "lines"),
    [
        (TWO_METHODS, 1, 2),
        (records_of({"learned": (None, None, None)}), 1, 0),
        (ONE_DIVERGES, 2, 3),
        (records_of({"sinusoidal": (25, 900, 1e30)}), 1, 1),
        (records_of({f"method {index}": (20 + index, 19, 18) for index in range(20)}), 1, 20),
        (records_of({"a": (20, 20, 20)}, train_length=None) + records_of({"a": (20, 20, 20)}, train_length=64), 1, 2),
        ([record("a", 128, 20.0)], 1, 1),
    ],
    ids=["two", "none", "two panels", "enormous", "many", "training lengths", "a point"],
)
def test_shapes_of_results(records, panels, lines):
    figure = plot(records)
    figure.draw_without_rendering()
    assert len(figure.axes) == panels
    plotted = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert len(plotted) == lines


def test_the_second_panel_enlarges_the_lowest_lines():
    first, second = plot(ONE_DIVERGES).axes
    assert (first.get_yscale(), second.get_yscale()) == ("log", "linear")
    low, high = second.get_ylim()
    assert 17 < low < 18
    assert 21 < high < 23


def test_lines_differ_in_grayscale():
    (axes,) = plot(records_of({f"method {index}": (20, 19, 18) for index in range(7)})).axes
    lines = [line for line in axes.lines if line.get_label().startswith("method")]
    assert len({line.get_marker() for line in lines}) == 7
    assert len({line.get_color() for line in lines}) == 7
    assert [line.get_linestyle() for line in lines] == ["-", "--", "--", "--", "-", "--", "--"]


def test_modes_share_color_and_marker():
    records = [record("alibi", 128, 20.0, mode=mode) for mode in ("full", "window@64", "blockwise")]
    (axes,) = plot(records).axes
    lines = {line.get_label(): line for line in axes.lines}
    full, window = lines["alibi"], lines["alibi, window@64"]
    assert (full.get_color(), full.get_marker()) == (window.get_color(), window.get_marker())
    assert (full.get_markerfacecolor(), window.get_markerfacecolor()) == (full.get_color(), "white")
    styles = {str(figures.line_style(0, mode)["linestyle"]) for mode in range(3)}
    assert len(styles) == 3


def positions(mode: str, seed: int, losses: list[float], **keys: object) -> dict:
    fields = {"kind": "positions", "edges": [0, 10, 20, 40], "losses": losses, "mode": mode}
    return {**record("kerple_log", 40, None, seed), **fields, **keys}


def test_perplexity_by_position():
    records = [positions("full", 1, [3.0, 2.0, 1.0]), positions("full", 2, [3.2, 2.2, 1.2])]
    records += [positions("window@10", 1, [3.0, 2.1, None]), positions("blockwise", 1, [3.0, 2.2, 1.5])]
    (figure,) = figures.position_figures(records)
    (axes,) = figure.figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    x, y = lines["KERPLE (log)"].get_data()
    assert list(x) == [5.0, 15.0, 30.0]
    np.testing.assert_allclose(y, [(math.exp(a) + math.exp(a + 0.2)) / 2 for a in (3.0, 2.0, 1.0)])
    x, y = lines["KERPLE (log), window@10"].get_data()
    np.testing.assert_allclose(y, [math.exp(3.0), math.exp(2.1), math.nan])
    assert lines["KERPLE (log)"].get_color() == lines["KERPLE (log), window@10"].get_color()
    assert lines["KERPLE (log)"].get_linestyle() != lines["KERPLE (log), window@10"].get_linestyle()
    assert "mean over 2 seeds. Hollow markers" in figure.caption


def test_a_position_figure_per_protocol():
    records = [positions("full", 1, [3.0, 2.0, 1.0], protocol=name) for name in ("non-overlapping", "last-k@16")]
    assert [figure.name for figure in figures.position_figures(records)] == [
        "positions-github-12x768-512-non-overlapping-40",
        "positions-github-12x768-512-last-k-16-40",
    ]


def test_seeds_with_different_bins_are_rejected():
    with pytest.raises(UserError, match="different bins"):
        figures.position_figures(
            [positions("full", 1, [3.0, 2.0, 1.0]), positions("full", 2, [3.0, 2.0], edges=[0, 20, 40])]
        )


def test_passkey_heat_maps():
    records = [
        passkey_record(name, length, depth, accuracy + depth / 2, seed=seed)
        for name in ("alibi", "kerple_log", "rpe", "fire")
        for length in (512, 1024)
        for depth in (0, 1)
        for seed, accuracy in ((1, 0.1), (2, 0.3))
        if (name, length) != ("fire", 1024)
    ]
    records += [passkey_record("fire", 1024, 0, None)]
    (figure,) = figures.passkey_figures(records)
    assert figure.name == "passkey-github-12x768-512"
    panels = {axes.get_title(loc="left"): axes for axes in figure.figure.axes if axes.get_visible()}
    assert list(panels)[:4] == ["KERPLE (log)", "ALiBi", "T5", "FIRE"], "in the paper's order"
    np.testing.assert_allclose(panels["ALiBi"].images[0].get_array(), [[0.2, 0.2], [0.7, 0.7]])
    assert [text.get_text() for text in panels["FIRE"].texts] == ["20%", "×", "70%", "×"]
    assert "ALiBi 45%" in figure.description


def test_names_are_drawn_as_they_are():
    """A dollar sign starts math in matplotlib, and wrong math is an error."""
    hostile = [record(name, length, 3.0) for name in (r"$\frac{$", r"\$a$^$", "x" * 300) for length in (32, 64)]
    figure = figures.perplexity_figures(hostile)[0]
    assert figure.png.startswith(b"\x89PNG")
    assert figure.pdf.startswith(b"%PDF")
    texts = [text.get_text() for text in figure.figure.legends[0].get_texts()]
    assert texts == [r"$\frac{$", r"\$a$^$", "x" * 79 + "…"]
