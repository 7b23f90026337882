"""Tables from small records: layout, best values, daggers against scipy, published rows."""

import math

import numpy as np
import pytest
from scipy import stats

from megatron.config import UserError
from megatron.reporting.layout import Cell, PaperTable, Row, Section, written
from megatron.reporting.rendering import comma_separated, latex, markdown, markup
from megatron.reporting.statistics import p_value, significantly_better
from megatron.reporting.tables import perplexity_tables, resolution_tables
from tests.support.records import record, seeds

LOG = [21.4, 21.9, 22.3, 20.8, 21.5]
ALIBI = [22.5, 22.8, 23.4, 21.9, 22.6]
T5 = [21.3, 22.0, 22.2, 20.9, 21.6]


def only(tables, prefix):
    found = [table for table in tables if table.name.startswith(prefix)]
    assert len(found) == 1
    return found[0]


def test_kerple_s_layout_marks_and_published_row():
    records = seeds("rpe", 1024, T5) + seeds("alibi", 1024, ALIBI) + seeds("kerple_log", 1024, LOG)
    table = only(perplexity_tables(records), "kerple-3")
    assert table.columns == ("KERPLE (log)", "ALiBi", "T5"), "in the paper's order"
    assert table.lines[0] == Section("GitHub")
    ours, theirs = table.rows
    assert (ours.stub, theirs.stub, theirs.published) == ("1024", "1024, paper", True)
    assert ours.cells == (
        Cell("21.58 ± 0.56", best=True),
        Cell("22.64 ± 0.54", worse=True),
        Cell("21.60 ± 0.52"),
    )
    assert theirs.cells == (Cell("3.04 ± 0.14"), Cell("3.15 ± 0.17", worse=True), Cell("3.02 ± 0.14"))
    assert any("5 seeds" in note for note in table.notes)


def test_golden_markdown_latex_and_csv():
    table = PaperTable(
        "name",
        "A_title",
        "Extrp.",
        ("KERPLE (log)", "b_c"),
        (
            Section("GitHub"),
            Row("512", (Cell("3.40 ± 0.20", best=True), Cell("3.90 ± 0.10", worse=True))),
            Row("512, paper", (Cell("3.40 ± 0.20"), Cell("")), published=True),
        ),
        ("5 % of it.",),
    )
    assert markdown(table).splitlines() == [
        "## A\\_title",
        "",
        "| Extrp. | KERPLE (log) | b\\_c |",
        "| :-- | --: | --: |",
        "| **GitHub** |  |  |",
        "| 512 | **3.40 ± 0.20** | 3.90 ± 0.10 † |",
        "| *512, paper* | *3.40 ± 0.20* |  |",
        "",
        "- 5 % of it.",
    ]
    assert comma_separated(table).splitlines() == [
        "section,Extrp.,published,KERPLE (log),b_c",
        "GitHub,512,no,3.40 ± 0.20,3.90 ± 0.10 †",
        'GitHub,"512, paper",yes,3.40 ± 0.20,',
    ]
    assert latex(table).splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\caption{\textbf{A\_title.} 5 \% of it.}",
        r"\label{tab:name}",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"Extrp. & KERPLE (log) & b\_c \\",
        r"\midrule",
        r"\multicolumn{3}{l}{\textit{GitHub}} \\",
        r"\midrule",
        r"512 & \textbf{3.40 $\pm$ 0.20} & 3.90 $\pm$ 0.10$^\dagger$ \\",
        r"{\footnotesize\itshape 512, paper} & {\footnotesize\itshape 3.40 $\pm$ 0.20} &  \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    assert '<th scope="row">512</th><td class="best"><strong>3.40 ± 0.20</strong></td>' in markup(table)
    with pytest.raises(ValueError, match="rows x have not 2 cells"):
        PaperTable("n", "t", "", ("a", "b"), (Row("x", (Cell("1"),)),))


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("draw", range(4))
def test_the_dagger_is_scipy_s_paired_test(shift, draw):
    chance = np.random.default_rng(draw)
    ours = 20 + chance.normal(size=5)
    theirs = ours + shift + 0.1 * chance.normal(size=5)
    statistic, p = stats.ttest_rel(ours, theirs)
    # And the formula: t = mean(d) / (std(d) / sqrt(n)), n - 1 degrees of freedom, both tails.
    difference = ours - theirs
    t = difference.mean() / (difference.std(ddof=1) / math.sqrt(5))
    assert t == pytest.approx(statistic)
    assert p == pytest.approx(2 * stats.t.sf(abs(t), 4))
    first, second = dict(enumerate(ours)), dict(enumerate(theirs))
    assert p_value(first, second) == pytest.approx(p)
    expected = bool(p < 0.05 and t < 0)
    assert significantly_better(first, second) is expected
    assert not significantly_better(second, first) or t > 0
    records = seeds("kerple_log", 512, list(ours)) + seeds("alibi", 512, list(theirs))
    row = only(perplexity_tables(records), "kerple-3").rows[0]
    assert [cell.worse for cell in row.cells] == [False, expected]


def test_no_dagger_without_pairs():
    assert p_value({1: 2.0}, {1: 3.0}) is None
    assert p_value({1: 2.0, 2: 2.0}, {3: 3.0, 4: 3.0}) is None
    assert p_value({1: 2.0, 2: 3.0}, {1: 2.0, 2: 3.0}) is None
    assert significantly_better({1: 2.0, 2: 3.0, 3: 4.0}, {1: 3.0, 2: 4.0, 3: 5.0}), "the same difference every time"


def test_another_reference():
    records = seeds("kerple_log", 512, LOG) + seeds("alibi", 512, ALIBI)
    rows = only(perplexity_tables(records, ("alibi", "full")), "kerple-3").rows
    assert not any(cell.worse for cell in rows[0].cells)


def test_complicated_and_gaussian_kernels_have_tables_of_their_own_and_unknown_methods_stay():
    names = ("kerple_log", "kerple_bias_wht", "kerple_log3", "kerple_gaussian", "brand_new")
    tables = perplexity_tables([record(name, 512, 20.0 + place) for place, name in enumerate(names)])
    assert only(tables, "kerple-3").columns == ("KERPLE (log)", "brand_new")
    assert only(tables, "kerple-5").columns == ("(bias+wht)", "(3-para-log)"), "an alias is the same method"
    assert only(tables, "kerple-6").columns == ("(2-para-bias)",)
    assert only(tables, "kerple-5").rows[1].cells[0].text == "3.44 ± 0.21"


def test_what_is_missing_says_why_and_published_rows_need_the_same_setting():
    records = [record("learned", 512, 3.5), record("learned", 1024, None, note="positions end at 511")]
    records += [record("kerple_log", 512, 3.4, train_length=512)]
    table = only(perplexity_tables(records), "kerple-3")
    assert [[cell.text for cell in row.cells] for row in table.rows if not row.published] == [
        ["3.400", "3.500"],
        ["–", "n/a"],
    ]
    assert "n/a: learned at 1024: positions end at 511." in table.notes
    small = {"path": "a", "iteration": 1, "fingerprint": "f", "layers": 4, "hidden_size": 128}
    for keys in (
        {"train_length": 128},
        {"protocol": "sliding@256"},
        {"protocol": "kerple@8"},
        {"protocol": "non-overlapping by document"},
        {"corpus": "python_stdlib"},
        {"checkpoint": small},
        {"checkpoint": None},
    ):
        other = only(perplexity_tables([record("kerple_log", 512, 3.4, **keys)]), "kerple-3")
        assert not any(row.published for row in other.rows)


def test_modes_are_columns_behind_their_method():
    records = [record("alibi", 512, 4.0), record("kerple_log", 512, 3.4)]
    records += [record("kerple_log", 512, 3.6, mode="window@512")]
    assert only(perplexity_tables(records), "kerple-3").columns == ("KERPLE (log)", "KERPLE (log), window@512", "ALiBi")


def test_dape_s_layout():
    keys = {"protocol": "last-k@256", "corpus": "arxiv"}
    records = [record("dape_kerple", length, 4.0 - length / 1e4, **keys) for length in (512, 8192)]
    records += [record("alibi", length, 4.6, **keys) for length in (512, 8192)]
    (table,) = perplexity_tables(records)
    assert table.columns == ("512", "8192")
    assert [row.stub for row in table.rows] == ["ALiBi", "ALiBi, paper", "DAPE-Kerple", "DAPE-Kerple, paper"]
    assert [cell.text for cell in table.rows[3].cells] == ["4.51", "3.86"]
    assert [[cell.best for cell in row.cells] for row in table.rows if not row.published] == [[False] * 2, [True] * 2]


def test_lex_s_layout_and_resolution():
    model = {"path": None, "iteration": 1, "fingerprint": "f", "layers": 24, "hidden_size": 1024}
    keys = {"corpus": "arxiv", "train_length": 1024, "checkpoint": model}
    records = [record("xpos", 2048, 16.0, **keys), record("xpos", 2048, 15.5, mode="blockwise", **keys)]
    records += [record("alibi", 2048, 15.4, **keys)]
    tables = perplexity_tables(records)
    lex = only(tables, "lex-24x1024-1024")
    assert [row.stub for row in lex.rows] == ["ALiBi", "ALiBi, paper", "xPos", "LEX", "LEX, paper"]
    assert any("which protocol the paper used" in note for note in lex.notes)
    assert [row.stub for row in only(tables, "lex-modes").rows] == ["xPos", "xPos + BCA"]
    resolution = [
        {**one, "kind": "resolution", "resolution": value} for one, value in zip(records, (0.5, 1.1, 0.8), strict=True)
    ]
    (table,) = resolution_tables(resolution)
    best = [row.stub for row in table.rows if any(cell.best for cell in row.cells)]
    assert best == ["LEX"], "the highest"
    assert next(row for row in table.rows if row.stub == "LEX, paper").cells[0].text == "1.08"


def test_two_checkpoints_of_one_seed_are_refused():
    first = record("alibi", 512, 4.0)
    there = {**first["checkpoint"], "path": "elsewhere"}
    other = record("alibi", 512, 4.1, checkpoint={**there, "iteration": 20, "fingerprint": "others"})
    with pytest.raises(UserError, match=r"nowhere/alibi/1 at iteration 10 and elsewhere at iteration 20"):
        perplexity_tables([first, other])
    again = record("alibi", 512, 4.0, checkpoint={**first["checkpoint"], "fingerprint": "trained again"})
    with pytest.raises(UserError, match="two checkpoints give results for alibi"):
        perplexity_tables([first, again])
    moved = record("alibi", 512, 4.0, checkpoint=there)
    assert only(perplexity_tables([first, moved]), "kerple-3").rows[0].cells[0].text == "4.000"


def test_options_of_a_method_and_sizes_of_a_model_are_told_apart():
    keys = {"protocol": "last-k@256", "corpus": "arxiv"}
    records = [record(name, 512, 4.0, **keys) for name in ("dape_kerple", "dape_kerple (variant Concat)")]
    (table,) = perplexity_tables(records)
    assert [row.stub for row in table.rows] == ["DAPE-Kerple", "DAPE-Kerple, paper", "DAPE-Kerple (variant Concat)"]
    large = {"path": "b", "iteration": 1, "fingerprint": "l", "layers": 24, "hidden_size": 1024}
    tables = perplexity_tables([*records, record("dape_kerple", 512, 3.0, checkpoint=large, **keys)])
    assert [table.name for table in tables] == ["dape-12x768-512-last-k-256", "dape-24x1024-512-last-k-256"]
    assert [row.stub for row in tables[1].rows] == ["DAPE-Kerple"]


def test_the_number_of_tokens_and_texts_that_differ():
    records = seeds("kerple_log", 512, LOG) + seeds("alibi", 512, ALIBI)
    assert "1,000 tokens are scored." in only(perplexity_tables(records), "kerple-3").notes
    notes = only(perplexity_tables([*records, record("rpe", 512, 3.0, tokens=500)]), "kerple-3").notes
    assert "GitHub at 512: not all are of the same text (500 or 1,000 tokens), so they do not compare." in notes


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([23.9], "23.90"),
        ([23.0, 24.0], "23.50 ± 0.71"),
        ([5507.0, 2507.0], "4007 ± 2121"),
        ([2.7501, 2.7499], "2.750 ± 0.000"),
        ([], "n/a"),
        ([3.2e9], "3.20e+09"),
    ],
)
def test_numbers(values, text):
    assert written(values) == text
