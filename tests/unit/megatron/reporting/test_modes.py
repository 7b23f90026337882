"""Methods in inference modes: the best combination with its paired error, the table and the heat map."""

import json
import math
import statistics

import pytest

from megatron.reporting.aggregate import measurements
from megatron.reporting.modes import (
    best_combinations,
    best_notes,
    heat_map,
    mode_figures,
    mode_tables,
)
from megatron.reporting.summary import summary_table, write_summary
from tests.support.records import record

LOSSES = {
    ("alibi", "full"): [3.0, 3.2, 3.4, 3.6],
    ("alibi", "sinks@4+508"): [2.9, 3.0, 3.3, 3.4],
    ("rotary", "full"): [7.0, 7.1, 7.2, 7.3],
    ("rotary", "sinks@4+508"): [2.8, 3.0, 3.1, 3.4],
}


def records(length=2048):
    return [
        record(
            pos_emb,
            length,
            math.exp(statistics.fmean(losses)),
            mode=mode,
            targets="same",
            groups={"tokens": [250] * 4, "losses": losses},
        )
        for (pos_emb, mode), losses in LOSSES.items()
    ] + [
        record(
            "rotary",
            length,
            None,
            mode="full+log@64",
            note="is not supported: pos_emb rotary rotates",
            groups=None,
            targets=None,
        )
    ]


def test_the_best_combination():
    (best,) = best_combinations(records())
    assert (best.method.pos_emb, best.method.mode, best.length) == ("rotary", "sinks@4+508", 2048)
    differences = [
        one - other for one, other in zip(LOSSES["rotary", "sinks@4+508"], LOSSES["rotary", "full"], strict=True)
    ]
    assert best.loss == pytest.approx(3.075)
    assert best.difference.mean == pytest.approx(statistics.fmean(differences))
    assert best.difference.stderr == pytest.approx(statistics.stdev(differences) / 2)
    assert best.to_json()["minus_full"] == best.difference.mean
    leads = [
        one - other for one, other in zip(LOSSES["rotary", "sinks@4+508"], LOSSES["alibi", "sinks@4+508"], strict=True)
    ]
    assert (best.runner_up.pos_emb, best.runner_up.mode) == ("alibi", "sinks@4+508")
    assert best.lead.mean == pytest.approx(statistics.fmean(leads))
    assert best.lead.stderr == pytest.approx(statistics.stdev(leads) / 2)
    assert best.to_json()["minus_runner_up"] == best.lead.mean
    assert str(best) == (
        "Rotary in mode sinks@4+508, loss 3.075 (-4.075 ± 0.063 against full; -0.075 ± 0.048 against the runner-up, "
        "ALiBi in mode sinks@4+508, within two standard errors)"
    )
    assert best_combinations([row for row in records() if row["mode"] == "full"]) == []
    assert best_notes([row for row in records() if row["mode"] == "full"]) == []


def test_differences_of_the_best_combination_are_those_of_the_common_seeds():
    """Rotary has one seed; in the second one of ALiBi, best and runner-up are exchanged."""
    rotary = [row for row in records() if (row["pos_emb"], row["mode"]) == ("rotary", "full")]
    first, second = ([row for row in records() if row["pos_emb"] == "alibi"] for _ in range(2))
    for row in second:
        losses = LOSSES["alibi", "full" if row["mode"] != "full" else "sinks@4+508"]
        row |= {"seed": 2, "loss": statistics.fmean(losses), "groups": {"tokens": [250] * 4, "losses": losses}}
    (expected,) = best_combinations([*first, *rotary])
    (best,) = best_combinations([*first, *second, *rotary])
    assert (best.method.pos_emb, best.method.mode) == ("alibi", "sinks@4+508")
    assert (best.difference, best.lead) == (expected.difference, expected.lead)


def test_the_best_combination_compares_the_same_tokens():
    (rotary,) = (entry for entry in records() if (entry["pos_emb"], entry["mode"]) == ("rotary", "sinks@4+508"))
    others = [entry for entry in records() if (entry["pos_emb"], entry["mode"]) != ("rotary", "sinks@4+508")]
    (best,) = best_combinations([*others, {**rotary, "targets": "other"}])
    assert (best.method.pos_emb, best.method.mode) == ("alibi", "sinks@4+508")


def test_tables_and_files(tmp_path):
    other = record("alibi", 2048, 20.0, corpus="arxiv")  # a setting with one mode has no table
    (table,) = mode_tables(
        [*reversed(records()), other]
    )  # rows of a method are together, in whatever order it was measured
    assert [row.labels for row in table.rows] == [("Rotary", "sinks@4+508"), ("ALiBi", "sinks@4+508")]
    assert [row.cells[0].text for row in table.rows] == ["-4.0750 ± 0.0629", "-0.1500 ± 0.0289"]
    summary = summary_table(records())
    texts = [cell.text for line in summary.rows if hasattr(line, "cells") for cell in line.cells]
    assert "-4.0750 ± 0.0629" in texts
    assert any("Best at length 2,048" in note for note in summary.notes)
    names = [path.name for path in write_summary(records(), tmp_path)]
    (figure,) = mode_figures(records())
    assert names == ["extrapolation.json", "extrapolation.md", "extrapolation.png", f"{figure.name}.png"]
    assert json.loads((tmp_path / "extrapolation.json").read_text())["best"][0]["mode"] == "sinks@4+508"


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
        assert [text.get_text() for text in axes.texts] == ["3.30", "3.15", "–", "7.15", "3.08", "n/a"]
        (frame,) = axes.patches  # around the best
        assert frame.get_xy() == (0.5, 0.5)
