"""The table and the figure of the Chomsky-hierarchy benchmark."""

from dataclasses import replace

from megatron.chomsky.experiment import ExperimentSettings
from megatron.reporting.chomsky import chomsky_figure, chomsky_table
from megatron.reporting.tables import markdown

SETTINGS = ExperimentSettings(train_longest=40, test_longest=42)


def result(task, pos_emb, seed, *accuracies):
    lengths = map(str, SETTINGS.test_lengths)
    score = sum(accuracies) / len(accuracies)
    by_length = dict(zip(lengths, accuracies, strict=True))
    return {"task": task, "pos_emb": pos_emb, "seed": seed, "score": score, "accuracies": by_length}


RESULTS = [
    result("binary_addition", "none", 0, 0.5, 0.4),
    result("binary_addition", "none", 1, 0.6, 0.5),
    result("even_pairs", "none", 0, 0.5, 0.5),
    result("even_pairs", "dape_kerple", 0, 1.0, 0.9),
]


def test_table():
    lines = markdown(chomsky_table(RESULTS, SETTINGS), "#").splitlines()
    assert lines[0] == "# Tasks of the Chomsky hierarchy"
    assert lines[4:6] == [  # in the order of the benchmark
        "| regular | even pairs | 50.0 | **95.0** |",
        "| context-sensitive | binary addition | 50.0 ± 7.1 | – |",
    ]
    assert (
        "averaged over the test lengths 41 to 42 (training lengths 1 to 40; 10,000 steps"
        in lines[-1]
    )
    (note,) = chomsky_table(RESULTS, replace(SETTINGS, test_longest=70, test_every=20)).notes
    assert "the test lengths 41 to 61 in steps of 20 (" in note
    assert "standard deviation" in note
    (note,) = chomsky_table(RESULTS[2:], SETTINGS).notes
    assert "standard deviation" not in note  # of one seed


def test_a_mean_over_fewer_seeds_is_not_bold():
    lucky = result("binary_addition", "rotary", 1, 0.9, 0.9)
    other = [result("binary_addition", "alibi", seed, 0.3, 0.3) for seed in (0, 1)]
    (row,) = chomsky_table([*RESULTS[:2], lucky, *other], SETTINGS).rows
    assert [cell.text for cell in row.cells] == ["50.0 ± 7.1", "90.0", "30.0"]
    assert [cell.best for cell in row.cells] == [True, False, False]


def test_figure():
    panels = [axes for axes in chomsky_figure(RESULTS, SETTINGS).axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == ["even pairs", "binary addition"]
    (mean, _) = panels[1].get_lines()  # and the line of random guessing
    assert list(mean.get_xdata()) == [41, 42]
    assert [round(value) for value in mean.get_ydata()] == [55, 45]
