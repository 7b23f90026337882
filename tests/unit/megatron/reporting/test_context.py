"""The table and the figure of context utilization."""

import pytest

from megatron.reporting.context import context_figures, context_tables
from megatron.reporting.style import SCREEN
from megatron.reporting.tables import markdown
from tests.support.records import record


def context(pos_emb, differences, stderrs, seed=1, contexts=(64, 128), **keys):
    keys = {"protocol": "last-k@16", "contexts": list(contexts), **keys}
    return {
        **record(pos_emb, 512, 9.0, seed, **keys),
        "kind": "context",
        "differences": differences,
        "stderrs": stderrs,
    }


RECORDS = [
    context("kerple_log", [0.31, 0.2], [0.01, 0.004]),
    context("kerple_log", [0.33, 0.2], [0.01, 0.004], seed=2),
    context("alibi", [0.01, -0.02], [0.02, None], mode="window@64"),
    context("learned", [], [], contexts=(), note="positions end at 127"),
]


def test_table():
    (table,) = context_tables(RECORDS)
    assert table.name == "context-github-12x768-512-last-k-16-512"
    rows = {row.labels[0]: [cell.text for cell in row.cells] for row in table.lines}
    assert table.columns == ("k = 64", "k = 128")
    assert rows == {
        "KERPLE (log)": ["+0.320 ± 0.014", "+0.2000 ± 0.0000"],  # over seeds
        "ALiBi, window@64": ["+0.010 ± 0.020", "-0.02000"],  # over documents
        "learned": ["n/a", "n/a"],
    }
    assert any(note.startswith("n/a: learned: positions end at 127") for note in table.notes)
    assert "loss with the full context" in markdown(table, "#")


def test_results_on_different_tokens_have_a_note():
    def notes(*targets):
        records = [context(name, [0.3, 0.2], [0.01, 0.02], targets=digest) for name, digest in targets]
        (table,) = context_tables(records)
        return " ".join(table.notes)

    assert "not comparable: methods or seeds were scored on different tokens" in notes(("alibi", "a"), ("rpe", "b"))
    assert "different tokens" not in notes(("alibi", "a"), ("rpe", "a"))


def test_figure():
    (figure,) = context_figures(RECORDS)
    (axes,) = figure.draw(SCREEN).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["KERPLE (log)"].get_xdata()) == [64, 128]
    assert list(lines["KERPLE (log)"].get_ydata()) == pytest.approx([0.32, 0.2])
    low, high = (getattr(axes.collections[1].get_paths()[0].vertices[:, 1], name)() for name in ("min", "max"))
    assert (low, high) == pytest.approx((-0.02, 0.03))  # the band of alibi
    assert context_figures([RECORDS[-1]]) == []
