"""The tables and the figure of the length tests."""

from dataclasses import replace

from megatron.chomsky.experiment import DECODER_SETTINGS
from megatron.reporting.length_tests import distance_table, length_figure, length_table
from megatron.reporting.style import SCREEN

SETTINGS = replace(DECODER_SETTINGS, train_longest=64, test_longest=130)


def result(task, pos_emb, seed, short, long, bins):
    values = {
        "accuracies": {"64": short, "128": long},
        "distances": {"64": {"32": [1, 2]}, "128": bins},
    }
    return {"task": task, "pos_emb": pos_emb, "seed": seed, "score": long, **values}


RESULTS = [
    result("associative_recall", "none", 0, 0.5, 0.2, {"16": [10, 100], "64": [30, 100]}),
    result("associative_recall", "none", 1, 0.7, 0.4, {"16": [30, 100], "64": [50, 100]}),
    result("copying", "none", 0, 1.0, 0.5, {"64": [50, 100]}),
    result("copying", "rotary", 0, 1.0, 0.25, {"64": [25, 100]}),
]


def rows(table):
    """One list per line: a section's title, or a method and its cells."""
    return [
        [line.title] if hasattr(line, "title") else [*line.labels, *(c.text for c in line.cells)]
        for line in table.lines
    ]


def test_accuracy_by_length():
    table = length_table(RESULTS, SETTINGS)
    assert table.columns == ("64*", "128")
    assert rows(table) == [
        ["copying (random guessing: 3.8)"],
        ["none", "100", "50.0"],
        ["rotary", "100", "25.0"],
        ["associative recall (random guessing: 1.6)"],
        ["none", "60 ± 10", "30 ± 10"],  # the standard deviation is 14
    ]
    assert [cell.best for cell in table.lines[1].cells] == [True, True]
    assert [cell.best for cell in table.lines[2].cells] == [True, False]
    assert any("standard error over up to 2 seeds;" in note for note in table.notes)


def test_a_mean_over_fewer_seeds_is_not_bold():
    lucky = result("associative_recall", "rotary", 1, 0.9, 0.9, {"64": [90, 100]})
    for table in (length_table, distance_table):
        none, rotary = table([*RESULTS[:2], lucky], SETTINGS).rows
        assert [cell.best for cell in none.cells] == [False, False]
        assert [cell.best for cell in rotary.cells] == [False, False]


def test_accuracy_by_distance_at_the_longest_length():
    table = distance_table(RESULTS, SETTINGS)
    assert "at length 128" in table.title
    assert table.columns == ("16–31", "64–127")
    assert rows(table)[1:3] == [["none", "–", "50.0"], ["rotary", "–", "25.0"]]
    assert rows(table)[4] == ["none", "20 ± 10", "40 ± 10"]


def test_figure():
    panels = length_figure(RESULTS, SETTINGS, SCREEN).axes
    assert len(panels) == 4
    by_length, by_distance = panels[2].get_lines()[0], panels[3].get_lines()[0]
    assert (list(by_length.get_xdata()), [round(y) for y in by_length.get_ydata()]) == (
        [64, 128],
        [60, 30],
    )
    assert (list(by_distance.get_xdata()), [round(y) for y in by_distance.get_ydata()]) == (
        [16, 64],
        [20, 40],
    )
    vertices = panels[2].collections[0].get_paths()[0].vertices
    assert (round(vertices[:, 1].min()), round(vertices[:, 1].max())) == (20, 70)  # the bands
