"""What is plotted, read back from the axes."""

import io

import matplotlib.image
import numpy as np
import pytest

from megatron.reporting import figures
from megatron.reporting.aggregate import measurements
from megatron.reporting.style import SCREEN
from tests.support.records import passkey_record, record, seeds

LENGTHS = (128, 256, 512)


def records_of(values, **keys):
    """`method -> perplexities at LENGTHS` as records."""
    return [
        record(name, length, perplexity, **{"train_length": 128, **keys})
        for name, perplexities in values.items()
        for length, perplexity in zip(LENGTHS, perplexities, strict=True)
    ]


def plot(records):
    return figures.perplexity_plot(measurements(records, "extrapolation", "perplexity"))


def data(axes):
    return {line.get_label(): line.get_data() for line in axes.lines}


def test_perplexity_by_length():
    records = [
        *seeds("kerple_log", 512, [3.0, 3.4, 3.2]),
        *seeds("kerple_log", 1024, [2.8, 3.0, 2.9]),
    ]
    records.append(record("rpe", 512, 3.1))
    (figure,) = figures.perplexity_figures([*records, record("rpe", 1024, None)])
    assert figure.name == "extrapolation-github-12x768-512-non-overlapping"
    assert figure.title == "GitHub, trained at length 512"
    assert figure.caption.endswith("bands: ± one standard deviation, over up to 3 seeds.")
    drawn = figure.draw(SCREEN)
    (axes,) = drawn.axes
    lines = data(axes)
    assert list(lines["KERPLE (log)"][0]) == [512, 1024]
    np.testing.assert_allclose(lines["KERPLE (log)"][1], [3.2, 2.9])
    assert list(lines["T5"][0]) == [512], "a length without a value is left out"
    (band,) = axes.collections
    low, high = band.get_datalim(axes.transData).intervaly
    deviation = np.std([3.0, 3.4, 3.2], ddof=1)
    assert (low, high) == (
        pytest.approx(2.9 - np.std([2.8, 3.0, 2.9], ddof=1)),
        pytest.approx(3.2 + deviation),
    )
    legend = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert legend == ["KERPLE (log)", "T5"], "the order of the tables"
    assert figure.pdf[:5] == b"%PDF-"
    image = matplotlib.image.imread(io.BytesIO(figure.png))
    assert image.shape[0] > 500
    assert image[..., :3].std() > 0.02, "not blank"


def test_a_setting_without_a_value_has_no_figure():
    assert not figures.perplexity_figures(records_of({"learned": (None, None, None)}))


def test_lines_differ_in_grayscale():
    figure = plot(
        records_of(
            {**{f"method {index}": (20, 19, 18) for index in range(20)}, "x": (25, 900, 30_000)}
        )
    )
    figure.draw_without_rendering()
    axes, _ = figure.axes  # and a panel of the lines that do not diverge
    lines = [line for line in axes.lines if line.get_label().startswith("method")]
    assert len(lines) == 20
    lines = lines[:7]
    assert len({line.get_marker() for line in lines}) == 7
    assert len({line.get_color() for line in lines}) == 7
    assert [line.get_linestyle() for line in lines] == ["-", "--", "--", "--", "-", "--", "--"]


def test_modes_are_panels_in_which_methods_look_the_same():
    records = [
        record(name, 128, 20.0, mode=mode)
        for mode in ("full", "window@64")
        for name in ("rpe", "alibi")
    ]
    records.append(record("rotary", 128, 900.0))
    figure = plot(records)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "full",
        "full, zoom",
        "window@64",
        "",
    ]
    assert [axes.get_yscale() for axes in figure.axes if axes.get_visible()] == [
        "log",
        "linear",
        "log",
    ]
    assert figure.axes[0].get_ylim() == figure.axes[2].get_ylim() != figure.axes[1].get_ylim()
    looks = [
        (line.get_color(), line.get_marker(), line.get_linestyle())
        for axes in figure.axes
        for line in axes.lines
        if line.get_label() == "ALiBi"
    ]
    assert len(looks) == 3
    assert len(set(looks)) == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["T5", "ALiBi", "Rotary"]


def test_modes_of_one_method_are_lines_of_one_panel():
    modes = ("full", "window@64", "sinks@4+60")
    rows = [
        row
        for mode in modes
        for row in seeds("rpe", 128, [20.0, 21.0], mode=mode, train_length=128)
    ]
    figure = plot(rows)
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines if line.get_label() in modes] == list(modes)
    assert figure.legends[0].get_title().get_text() == "T5"
    assert "bands: ± one standard deviation over 2 seeds" in figure.get_supxlabel()
    assert "bands" not in plot(rows[::2]).get_supxlabel()


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
    drawn = figure.draw(SCREEN)
    assert drawn.get_suptitle() == "Passkey retrieval, GitHub, trained at 512"
    assert drawn.axes[-1].get_ylabel() == "accuracy (%)", "the color bar"
    panels = {axes.get_title(loc="left"): axes for axes in drawn.axes if axes.get_visible()}
    assert list(panels)[:4] == ["KERPLE (log)", "ALiBi", "T5", "FIRE"], "in the paper's order"
    np.testing.assert_allclose(panels["ALiBi"].images[0].get_array(), [[20, 20], [70, 70]])
    assert [text.get_text() for text in panels["FIRE"].texts] == ["20", "×", "70", "×"]


def test_the_caption_says_that_lengths_were_measured_on_different_texts():
    records = [record("alibi", 128, 20.0, tokens=4096), record("alibi", 256, 21.0, tokens=4096)]
    (figure,) = figures.perplexity_figures(records)
    assert "not comparable" not in figure.caption
    records.append(record("alibi", 512, 19.0, tokens=8192))
    (figure,) = figures.perplexity_figures(records)
    assert "values at different lengths are not comparable" in figure.caption
