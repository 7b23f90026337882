"""Methods in inference modes: the table of differences and the heat map."""

import math
import statistics

import pytest

from megatron.reporting.aggregate import measurements
from megatron.reporting.modes import heat_map, mode_figures, mode_tables
from tests.support.records import record

LOSSES = {
    ("alibi", "full"): [3.0, 3.2, 3.4, 3.6],
    ("alibi", "sinks@4+508"): [2.9, 3.0, 3.3, 3.4],
    ("rotary", "full"): [7.0, 7.1, 7.2, 7.3],
    ("rotary", "sinks@4+508"): [2.8, 3.0, 3.1, 3.4],
}


def records(length=2048):
    found = []
    for (pos_emb, mode), losses in LOSSES.items():
        keys = {
            "mode": mode,
            "targets": "same",
            "documents": 4,
            "groups": {"tokens": [250] * 4, "losses": losses},
        }
        found.append(record(pos_emb, length, math.exp(statistics.fmean(losses)), **keys))
    keys = {
        "mode": "full+log@64",
        "note": "is not supported: pos_emb rotary rotates",
        "groups": None,
        "targets": None,
    }
    return [*found, record("rotary", length, None, **keys)]


def test_a_setting_with_several_modes_has_a_table_and_a_figure():
    other = record("alibi", 4096, 20.0, corpus="arxiv")  # a setting with one mode has no table
    again = [{**first, "seed": 2} for first in records() if first["pos_emb"] == "alibi"]
    # Rows of a method are together, in whatever order it was measured.
    (table,) = mode_tables([*reversed(records()), *again, other])
    assert [row.labels for row in table.rows] == [
        ("Rotary", "sinks@4+508 (1 seed)"),
        ("ALiBi", "sinks@4+508"),
    ]
    assert table.columns == ("2,048",), "not those of another setting"
    assert [row.cells[0].text for row in table.rows] == ["-4.0750 ± 0.0629", "-0.1500 ± 0.0289"]
    assert "standard error over documents" in table.notes[0]
    (figure,) = mode_figures([*records(), other])
    assert figure.name == table.name
    assert mode_tables([row for row in records() if row["mode"] != "full"]) == []


def test_titles_name_the_protocol():
    rows = [*records(), *({**row, "protocol": "last-k@8"} for row in records())]
    for found in (mode_tables(rows), mode_figures(rows)):
        first, second = (entry.title for entry in found)
        assert first != second


def test_the_modes_of_one_method_have_no_heat_map():
    """They are the lines of its figure of perplexities."""
    assert mode_figures([row for row in records() if row["pos_emb"] == "alibi"]) == []


def test_ties_in_a_heat_map_are_all_framed():
    rows = [
        record(name, 512, math.exp(loss))
        for name, loss in (("alibi", 3.001), ("rpe", 3.004), ("fire", 3.2))
    ]
    losses = measurements([*rows, {**rows[2], "mode": "window@9"}], "extrapolation", "loss")
    (panel, _) = (axes for axes in heat_map(losses, losses.settings[0]).axes if axes.get_visible())
    assert len(panel.patches) == 2
    assert [text.get_text() for text in panel.texts if text.get_weight() == "bold"] == [
        "3.00",
        "3.00",
    ]


def test_fewer_seeds_are_not_framed():
    """A mean over other seeds also differs because of the seeds."""
    rows = [
        {**record(name, 512, math.exp(loss + seed / 8)), "seed": seed, "mode": mode}
        for name, loss, count in (("alibi", 3.0, 3), ("rpe", 3.2, 3), ("rotary", 2.5, 2))
        for mode in ("full", "window@9")
        for seed in range(count)
    ]
    losses = measurements(rows, "extrapolation", "loss")
    panel, _ = (axes for axes in heat_map(losses, losses.settings[0]).axes if axes.get_visible())
    assert [text.get_text() for text in panel.texts] == ["3.12"] * 2 + ["3.33"] * 2 + ["2.56"] * 2
    assert [frame.get_xy() for frame in panel.patches] == [(-0.5, -0.5), (0.5, -0.5)]
    assert panel.images[0].get_clim()[0] == pytest.approx(3.125)


def test_heat_map():
    rows = [*records(512), *records(2048)]
    losses = measurements(rows, "extrapolation", "loss")
    figure = heat_map(losses, losses.settings[0])
    *panels, bar = [axes for axes in figure.axes if axes.get_visible()]
    assert "nats per token" in bar.get_xlabel()
    assert bar.get_xlim() == (0, 1)
    assert "GitHub" in figure.get_suptitle()
    assert [axes.get_title(loc="left") for axes in panels] == ["length 512", "length 2,048"]
    for axes in panels:
        values = axes.images[0].get_array()
        assert values[:, :2].flatten().tolist() == pytest.approx([3.3, 3.15, 7.15, 3.075])
        assert [text.get_text() for text in axes.texts] == [
            "3.30",
            "3.15",
            "–",
            "7.15",
            "3.08",
            "n/a",
        ]
        (frame,) = axes.patches  # around the best
        assert frame.get_xy() == (0.5, 0.5)
