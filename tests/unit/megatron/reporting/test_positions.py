"""Losses by position, read back from the axes."""

import math

import numpy as np
import pytest

from megatron.reporting.positions import position_figures
from megatron.reporting.style import SCREEN
from megatron.utils.errors import UserError
from tests.support.records import record


def positions(
    mode: str, seed: int, losses: list[float], pos_emb: str = "kerple_log", **keys: object
) -> dict:
    fields = {
        "kind": "positions",
        "edges": [0, 10, 20, 40],
        "losses": losses,
        "mode": mode,
        "targets": "ab",
    }
    return {**record(pos_emb, 40, None, seed), **fields, **keys}


def drawn(records):
    (figure,) = position_figures(records)
    return figure, figure.draw(SCREEN).axes


def test_differences_from_the_first_method():
    records = [positions("full", seed, [3.0 + seed, 2.0, 1.0], "alibi") for seed in (1, 2, 3, 4)]
    records += [positions("full", seed, [3.0, 2.0, 0.9 + seed / 10]) for seed in (1, 2, 3)]
    records.append(positions("full", 1, [9.0, 9.0, 9.0], "sinusoidal"))
    records.append(positions("full", 1, [3.0, 2.0, 1.0], "rpe", targets="cd"))
    figure, (axes,) = drawn(records)
    (line,) = [line for line in axes.lines if line.get_label() == "ALiBi"]
    assert list(line.get_xdata()) == [5.0, 15.0, 30.0]
    np.testing.assert_allclose(line.get_ydata(), [2.0, 0.0, -0.1], atol=1e-12)
    (band,) = axes.collections
    np.testing.assert_allclose(band.get_datalim(axes.transData).intervaly, [-0.2, 3.0])
    assert figure.title == "Loss by position at length 40: GitHub"
    assert "over 3 seeds" in figure.caption
    assert "Not shown, with a median of more than 1 nat: Sinusoidal." in figure.caption
    assert figure.caption.endswith("Not shown, measured with other texts, bins or seeds: T5.")


def test_differences_are_of_one_mode():
    losses = {
        "kerple_log": {"full": 1.0, "window@10": 2.0},
        "alibi": {"full": 1.5, "window@10": 1.8},
    }
    records = []
    for pos_emb, by_mode in losses.items():
        for mode, loss in by_mode.items():
            records.append(positions(mode, 1, [3.0, 2.0, loss], pos_emb))
    figure, panels = drawn(records)
    last = []
    for axes in panels:
        (line,) = [line for line in axes.lines if line.get_label() == "ALiBi"]
        last.append(line.get_ydata()[-1])
    np.testing.assert_allclose(last, [0.5, -0.2])
    assert "minus that of KERPLE (log) by position" in figure.caption


def test_a_single_method_has_its_perplexity_or_a_line_per_mode():
    figure, (axes,) = drawn([positions("full", 1, [3.0, 2.0, 1.0])])
    np.testing.assert_allclose(axes.lines[0].get_ydata(), np.exp([3.0, 2.0, 1.0]))
    assert figure.title.startswith("Perplexity by position")
    figure, (axes,) = drawn(
        [positions("full", seed, [3.0, 2.0, 1.0], f"method {seed}") for seed in (1, 2)]
    )
    assert [line.get_label() for line in axes.lines] == ["method 1", "method 2"], (
        "without a common seed"
    )
    assert figure.caption.endswith("No other method has the texts, bins and seeds of method 1.")
    _, (axes,) = drawn(
        [
            positions(mode, 1, [3.0, 2.0, loss])
            for mode, loss in (("full", 1.0), ("window@10", None))
        ]
    )
    (line,) = [line for line in axes.lines if line.get_label() == "KERPLE (log), window@10"]
    np.testing.assert_allclose(line.get_ydata(), [0.0, 0.0, math.nan])


def test_a_position_figure_per_protocol():
    records = [
        positions("full", 1, [3.0, 2.0, 1.0], protocol=name)
        for name in ("non-overlapping", "last-k@16")
    ]
    assert [figure.name for figure in position_figures(records)] == [
        "positions-github-12x768-512-non-overlapping-40",
        "positions-github-12x768-512-last-k-16-40",
    ]


def test_the_scored_end_of_a_segment():
    _, (axes,) = drawn([positions("full", 1, [None, None, 1.0], protocol="last-k@16")])
    assert axes.get_xlim() == (30.0, 40.0)
    _, (axes,) = drawn([positions("full", 1, [None, 2.0, 1.0])])
    assert axes.get_xlim() == (0.0, 40.0)


def test_seeds_with_different_bins_are_rejected():
    with pytest.raises(UserError, match="different bins"):
        position_figures(
            [
                positions("full", 1, [3.0, 2.0, 1.0]),
                positions("full", 2, [3.0, 2.0], edges=[0, 20, 40]),
            ]
        )


def test_many_bins_are_averaged():
    edges = list(range(0, 68, 2))
    records = [
        positions("full", 1, list(range(33)), name, edges=edges) for name in ("kerple_log", "alibi")
    ]
    records[1]["losses"] = [2 * loss / 100 + loss for loss in records[0]["losses"]]
    figure, (axes,) = drawn(records)
    (line,) = [line for line in axes.lines if line.get_label() == "ALiBi"]
    assert list(line.get_xdata()) == [3.0 + 6 * index for index in range(11)]
    np.testing.assert_allclose(line.get_ydata(), [0.02 + 0.06 * index for index in range(11)])
    assert figure.caption.endswith("Points are means of 3 adjacent bins.")
