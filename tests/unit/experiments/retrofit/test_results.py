"""The table and the figure of the retrofit experiment."""

import pytest
from pandas import DataFrame, concat

from experiments.retrofit import results
from megatron.reporting.style import SCREEN

LENGTHS = [32 * factor for factor in results.FACTORS]


@pytest.fixture
def losses():
    """Seeds 1 and 2: the control grows by 1 per doubling, the kernel by 0.5, windows by 0."""
    rows = []
    for seed in (1, 2):
        for variant, steps, slope in (
            ("control", 0, 1.0),
            ("window", 0, 0.0),
            ("control", results.STEPS, 1.0),
            ("kerple_log", results.STEPS, 0.5),
        ):
            for doubling, length in enumerate(LENGTHS):
                loss = 2 + slope * doubling + seed * 0.01 * (variant == "kerple_log")
                row = {"seed": seed, "variant": variant, "steps": steps}
                rows.append({**row, "length": length, "loss": loss})
    return DataFrame(rows)


def test_table(losses):
    table = results.retrofit_table(losses).splitlines()
    assert table[2:] == [
        "| nothing | 0 | 2 | 2.00 | 4.00 | 6.00 | 8.00 |",
        "| window of L | 0 | 2 | 2.00 | 2.00 | 2.00 | 2.00 |",
        "| nothing | 300 | 2 | 2.00 | 4.00 | 6.00 | 8.00 |",
        "| KERPLE (log) | 300 | 2 | 2.01 | 3.01 | 4.01 | 5.01 |",
    ]


def test_losses_by_steps(losses):
    frames = [losses[losses["steps"] == results.STEPS].assign(steps=each) for each in (0, 30, 100)]
    frames += [losses[losses["steps"] == results.STEPS].assign(steps=each) for each in (300, 1000)]
    every = concat(frames)
    is_second_control = (every["variant"] == "control") & (every["seed"] == 2)
    table = results.retrofit_steps(every[~is_second_control]).splitlines()
    assert table[0].startswith("| added, loss at 16 L | seeds | 0 steps |")
    assert table[2:] == [
        "| nothing | 1 | 6.00 | 6.00 | 6.00 | 6.00 | 6.00 |",
        "| KERPLE (log) | 2 | 4.01 | 4.01 | 4.01 | 4.01 | 4.01 |",
    ]


def test_differences_are_paired(losses):
    rows = results.retrofit_differences(losses)
    # 0.01 and 0.02 above: their mean, and t(0.975, 1) = 12.706 times 0.005.
    assert "| nothing | L | +0.015 | [-0.049, +0.079] |" in rows
    assert "| window of L | 16 L | +2.015 |" in rows
    only = losses[losses["seed"] == 1]
    assert "| nothing | L | +0.010 | – |" in results.retrofit_differences(only)


def test_plot(losses):
    figure = results.retrofit_plot({"first": losses, "second": losses[losses["seed"] == 1]}, SCREEN)
    assert [axes.get_title() for axes in figure.axes] == ["first", "second"]
    last = []
    for axes in figure.axes:
        lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
        assert lines["nothing, 0 steps"] == [2, 3, 4, 5, 6, 7, 8]
        last.append(lines["KERPLE (log), 300 steps"][-1])
    assert last == pytest.approx([5.015, 5.01])


def test_plot_without_the_variants_that_lack_a_seed(losses):
    lacks = (losses["variant"] == "window") & (losses["seed"] == 2)
    (axes,) = results.retrofit_plot({"first": losses[~lacks]}, SCREEN).axes
    labels = [line.get_label() for line in axes.get_lines()]
    assert labels == ["nothing, 0 steps", "nothing, 300 steps", "KERPLE (log), 300 steps"]


def test_records_are_read():
    found = results.read_models()["demo"]
    assert {"control", "window"} <= set(found["variant"])
    assert not found["loss"].isna().any()
