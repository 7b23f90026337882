"""The layouts of the papers: rows, columns, best values, daggers, published rows and notes."""

import pytest

from megatron.reporting.paper_tables import passkey_tables, perplexity_tables, resolution_tables
from megatron.reporting.published import load_published
from megatron.reporting.tables import Cell, Row, Section
from tests.support.records import passkey_record, record, seeds

LOG = [21.4, 21.9, 22.3, 20.8, 21.5]
ALIBI = [22.5, 22.8, 23.4, 21.9, 22.6]
T5 = [21.3, 22.0, 22.2, 20.9, 21.6]


def only(tables, prefix):
    """The only table whose name starts with `prefix`."""
    (table,) = (table for table in tables if table.name.startswith(prefix))
    return table


def labels(table):
    return [row.labels[0] for row in table.rows]


def test_kerple_s_layout():
    records = seeds("rpe", 1024, T5) + seeds("alibi", 1024, ALIBI) + seeds("kerple_log", 1024, LOG)
    table = only(perplexity_tables(records), "kerple-3")
    assert table.columns == ("KERPLE (log)", "ALiBi", "T5"), "in the paper's order"
    assert table.lines[0] == Section("GitHub")
    ours, theirs = table.rows
    assert (ours.labels, theirs.labels, theirs.published) == (("1,024",), ("1,024, paper",), True)
    assert ours.cells == (
        Cell("21.58 ± 0.56", best=True),
        Cell("22.64 ± 0.54", worse=True),
        Cell("21.60 ± 0.52"),
    )
    assert theirs.cells == (
        Cell("3.04 ± 0.14"),
        Cell("3.15 ± 0.17", worse=True),
        Cell("3.02 ± 0.14"),
    )
    assert "Mean ± standard deviation over 5 seeds." in table.notes
    assert "Scored tokens: 1,000." in table.notes
    assert any(note.startswith("†: KERPLE (log) is significantly better") for note in table.notes)
    assert "In the paper's rows, † is copied from the paper." in table.notes


@pytest.mark.parametrize("name", ["kerple-3", "kerple-5"])
def test_published_values_are_printed_as_in_the_paper(name):
    paper = load_published(name)
    records = [
        record(method.pos_emb, length, 20.0, corpus=corpus)
        for corpus in paper.values
        for method in paper.methods
        for length in paper.lengths
    ]
    rows = [row for row in only(perplexity_tables(records), name).rows if row.published]
    texts = [cell.text + " †" * cell.worse for row in rows for cell in row.cells]
    expected = [
        paper.values[corpus][method][index]
        for corpus in paper.values
        for index in range(len(paper.lengths))
        for method in paper.methods
    ]
    assert texts == expected
    assert len(texts) == {"kerple-3": 108, "kerple-5": 36}[name]


def test_complicated_and_gaussian_kernels_have_their_own_tables():
    names = ("kerple_log", "kerple_power_ap_ap", "kerple_log3", "kerple_gaussian", "brand_new")
    tables = perplexity_tables(
        [record(name, 512, 20.0 + index) for index, name in enumerate(names)]
    )
    assert only(tables, "kerple-3").columns == ("KERPLE (log)", "brand_new")
    assert only(tables, "kerple-5").columns == ("KERPLE (bias+wht)", "KERPLE (3-para-log)")
    assert only(tables, "kerple-6").columns == ("KERPLE (2-para-bias)",)


def test_missing_values_have_a_reason():
    records = [
        record("learned", 512, 3.5),
        record("learned", 1024, None, note="positions end at 511"),
    ]
    records += [record("alibi", 512, None, note=None), record("kerple_log", 512, 3.4)]
    table = only(perplexity_tables(records), "kerple-3")
    assert [[cell.text for cell in row.cells] for row in table.rows if not row.published] == [
        ["3.400", "n/a", "3.500"],
        ["–", "–", "n/a"],
    ]
    assert table.notes[-2:] == (
        "n/a: ALiBi at 512: the value overflows a float.",
        "n/a: learned at 1,024: positions end at 511.",
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"train_length": 128},
        {"protocol": "sliding@256"},
        {"protocol": "kerple@8"},
        {"corpus": "python_stdlib"},
        {
            "checkpoint": {
                "path": "a",
                "iteration": 1,
                "fingerprint": "f",
                "layers": 4,
                "hidden_size": 128,
            }
        },
        {"checkpoint": None},
    ],
    ids=str,
)
def test_published_rows_need_the_same_setting(keys):
    table = only(perplexity_tables([record("kerple_log", 512, 3.4, **keys)]), "kerple-3")
    assert not any(row.published for row in table.rows)


def test_methods_are_rows_and_modes_are_sections():
    """The best value and the daggers are those of a mode; KERPLE's table has only the mode full."""
    records = (
        seeds("alibi", 512, ALIBI) + seeds("kerple_log", 512, LOG) + [record("fire", 1024, 20.0)]
    )
    for mode, best in (("window@512", 23.0), ("blockwise", 24.0)):
        records += seeds("alibi", 512, [best, best], mode=mode)
        records += seeds("kerple_log", 512, [best + 1, best + 2], mode=mode)
    tables = perplexity_tables(records)
    assert only(tables, "kerple-3").columns == ("KERPLE (log)", "ALiBi", "FIRE")
    table = only(tables, "perplexity")
    assert (table.name, table.columns) == (
        "perplexity-12x768-512-non-overlapping",
        ("512", "1,024"),
    )
    assert table.lines == (
        Section("GitHub, full"),
        Row(("KERPLE (log)",), (Cell("21.58 ± 0.56", best=True), Cell("–"))),
        Row(("ALiBi",), (Cell("22.64 ± 0.54", worse=True), Cell("–"))),
        Row(("FIRE",), (Cell("–"), Cell("20.00"))),
        Section("GitHub, blockwise"),
        Row(("KERPLE (log)",), (Cell("25.50 ± 0.71"), Cell("–"))),
        Row(("ALiBi",), (Cell("24.00", best=True), Cell("–"))),
        Section("GitHub, window@512"),
        Row(("KERPLE (log)",), (Cell("24.50 ± 0.71"), Cell("–"))),
        Row(("ALiBi",), (Cell("23.00", best=True), Cell("–"))),
    )
    assert "Bold: lowest value, and values that are printed the same." in table.notes


def test_modes_of_one_method_are_rows():
    """The best value is that of all modes."""
    records = [
        record("alibi", 512, value, mode=mode) for mode, value in (("window@9", 5.2), ("full", 7.0))
    ]
    records += [record("alibi", 512, 5.2001, mode="sinks@1+8")]
    table = only(perplexity_tables(records), "perplexity")
    assert table.label_columns == ("Mode",)
    assert table.lines == (
        Section("GitHub, ALiBi"),
        Row(("full",), (Cell("7.000"),)),
        Row(("sinks@1+8",), (Cell("5.200", best=True),)),
        Row(("window@9",), (Cell("5.200", best=True),)),
    )
    table = only(perplexity_tables(records[:1]), "perplexity")
    assert not any("Bold" in note for note in table.notes)


def test_dape_s_layout():
    keys = {"protocol": "last-k@256", "corpus": "arxiv"}
    records = [record("dape_kerple", length, 4.0 - length / 1e4, **keys) for length in (512, 8192)]
    records += [record("alibi", length, 4.6, **keys) for length in (512, 8192)]
    table = only(perplexity_tables(records), "dape")
    assert table.columns == ("512", "8,192")
    assert labels(table) == ["ALiBi", "ALiBi, paper", "DAPE-Kerple", "DAPE-Kerple, paper"]
    assert [cell.text for cell in table.rows[3].cells] == ["4.51", "3.86"]
    assert [[cell.best for cell in row.cells] for row in table.rows if not row.published] == [
        [False] * 2,
        [True] * 2,
    ]


def test_lex_s_layouts():
    model = {"path": None, "iteration": 1, "fingerprint": "f", "layers": 24, "hidden_size": 1024}
    keys = {"corpus": "arxiv", "train_length": 1024, "checkpoint": model}
    records = [
        record("xpos", 2048, 16.0, **keys),
        record("xpos", 2048, 15.5, mode="blockwise", **keys),
    ]
    records += [record("alibi", 2048, 15.4, **keys)]
    tables = perplexity_tables(records)
    lex = only(tables, "lex-24x1024-1024")
    assert labels(lex) == ["ALiBi", "ALiBi, paper", "xPos", "LEX", "LEX, paper"]
    assert any("protocol of this table is unknown" in note for note in lex.notes)
    assert labels(only(tables, "lex-modes")) == ["xPos", "xPos + BCA"]
    resolutions = [
        {**losses, "kind": "resolution", "protocol": "first@8", "resolution": value}
        for losses, value in zip(records, (0.5, 1.1, 0.8), strict=True)
    ]
    (table,) = resolution_tables(resolutions)
    assert [row.labels for row in table.rows if any(cell.best for cell in row.cells)] == [
        ("LEX",)
    ], "the highest"
    (ours,) = resolution_tables({**values, "train_length": 128} for values in resolutions)
    assert labels(ours) == ["ALiBi", "xPos", "xPos, blockwise"], (
        "the paper's names only next to its values"
    )
    assert next(row for row in table.rows if row.labels == ("LEX, paper",)).cells[0].text == "1.08"
    assert "Bold: highest value, and values that are printed the same." in table.notes


def test_negative_resolutions_have_no_meaning():
    values = {"kind": "resolution", "train_length": 128}
    records = [
        {**record("sinusoidal", 128, 3.0, seed), **values, "resolution": r}
        for seed, r in enumerate((0.5, -9))
    ]
    (table,) = resolution_tables(records)
    assert [cell.text for cell in table.rows[0].cells] == ["n/a"], "not the mean of the other seeds"
    assert any(
        note.startswith("n/a: Sinusoidal at 128: the attention resolution of a seed")
        for note in table.notes
    )


def test_different_options_and_model_sizes_are_not_averaged():
    keys = {"protocol": "last-k@256", "corpus": "arxiv"}
    records = [
        record(name, 512, 4.0, **keys) for name in ("dape_kerple", "dape_kerple (variant Concat)")
    ]
    table = only(perplexity_tables(records), "dape")
    assert labels(table) == ["DAPE-Kerple", "DAPE-Kerple, paper", "DAPE-Kerple (variant Concat)"]
    large = {"path": "b", "iteration": 1, "fingerprint": "l", "layers": 24, "hidden_size": 1024}
    tables = perplexity_tables(
        [*records, record("dape_kerple", 512, 3.0, checkpoint=large, **keys)]
    )
    tables = [table for table in tables if table.name.startswith("dape")]
    assert [table.name for table in tables] == [
        "dape-12x768-512-last-k-256",
        "dape-24x1024-512-last-k-256",
    ]
    assert labels(tables[1]) == ["DAPE-Kerple"]


def test_different_texts_are_noted():
    records = [*seeds("kerple_log", 512, LOG), record("rpe", 512, 3.0, tokens=500)]
    notes = only(perplexity_tables(records), "kerple-3").notes
    assert "Scored tokens: 500 to 1,000." in notes
    assert (
        "GitHub at 512: the values are not comparable, because they were measured on different "
        "texts (500 or 1,000 "
        "tokens)." in notes
    )
    records = [
        record(name, 512, 3.0, targets=name) for name in ("kerple_log", "rpe")
    ]  # as many, but other tokens
    notes = only(perplexity_tables(records), "kerple-3").notes
    assert any(note.startswith("GitHub at 512: the values are not comparable") for note in notes)
    same = [{**entry, "targets": "ab"} for entry in records]
    assert not any(
        "not comparable" in note for note in only(perplexity_tables(same), "kerple-3").notes
    )


def test_lengths_of_different_texts_are_noted():
    """A method that was evaluated again with other lengths."""
    first = [record("alibi", length, 3.0, targets="a") for length in (512, 1024)]
    for keys in ({"targets": "b"}, {"targets": "a", "tokens": 896}):
        records = [*first, record("alibi", 2048, 3.0, **keys)]
        notes = only(perplexity_tables(records), "kerple-3").notes
        assert [note.split(":")[0] for note in notes if "different lengths" in note] == ["GitHub"]
        notes = only(perplexity_tables(first), "kerple-3").notes
        assert not any("not comparable" in note for note in notes)

        # Each length scores other texts.
        planned = [{**entry, "protocol": "kerple@8"} for entry in records]
        notes = only(perplexity_tables(planned), "kerple-3").notes
        assert not any("different lengths" in note for note in notes)


@pytest.mark.parametrize("tables", [perplexity_tables, passkey_tables])
def test_other_first_tokens_and_precisions_are_noted(tables):
    make = record
    if tables is passkey_tables:

        def make(*arguments, **keys):
            return passkey_record(*arguments[:2], 0.5, 1.0, **keys)

    def notes(*keys):
        records = [make(name, 512, 3.0, **each) for name, each in zip("ab", keys, strict=True)]
        table = tables(records)[0]
        return [note for note in table.notes if "--bos" in note or "precision" in note]

    assert notes({"bos": 7}, {"bos": 7, "precision": "fp32"}) == []  # older records
    assert notes({"bos": None}, {}) == []
    (note,) = notes({"bos": None}, {"bos": 50_256})
    assert "50256 and none" in note
    (note,) = notes({"precision": "fp32"}, {"precision": "bf16"})
    assert "bf16 and fp32" in note


def test_different_numbers_of_prompts_are_noted():
    def notes(*trials):
        records = []
        for name, number in zip("ab", trials, strict=True):
            records.append(passkey_record(name, 512, 0.5, 1.0, trials=number))
        return [note for note in passkey_tables(records)[0].notes if "numbers of prompts" in note]

    assert notes(8, 8) == []
    (note,) = notes(6, 20)
    assert "6 and 20" in note


def test_different_numbers_of_steps_are_noted():
    def notes(*steps):
        records = []
        for seed, iteration in enumerate(steps):
            entry = record("alibi", 512, 3.0, seed=seed)
            entry["checkpoint"] = {**(entry["checkpoint"] or {}), "iteration": iteration}
            records.append(entry)
        return [note for note in perplexity_tables(records)[0].notes if "steps" in note]

    assert notes(300, 300, 0) == []
    (note,) = notes(300, 1200)
    assert "300, 1,200" in note


def test_methods_with_fewer_seeds_are_not_bold():
    table = only(
        perplexity_tables([*seeds("kerple_log", 512, LOG), record("rpe", 512, 1.0)]), "kerple-3"
    )
    bold = [
        cell.best
        for line in table.lines
        if isinstance(line, Row) and not line.published
        for cell in line.cells
    ]
    assert not any(bold)
    records = [
        record(name, 512, 3.0, seed)
        for name, seed in (("alibi", 1), ("alibi", 2), ("rpe", 3), ("rpe", 4))
    ]
    assert (
        "Mean ± standard deviation over 2 seeds."
        in only(perplexity_tables(records), "kerple-3").notes
    )
    note = (
        "Mean ± standard deviation over up to 5 seeds; methods with fewer than others are not bold."
    )
    assert note in table.notes


def test_passkeys_that_some_seeds_lack():
    """Seed 2 has no result at depth 0.5."""
    records = [passkey_record("alibi", 512, depth, 0.5, seed=1) for depth in (0, 0.5)]
    records += [passkey_record("alibi", 512, 0, 0.6, seed=seed) for seed in (2, 3)]
    records += [passkey_record("alibi", 512, 0.5, 0.6, seed=3)]
    (table,) = passkey_tables(records)
    assert "Mean ± standard deviation over up to 3 seeds." in table.notes[1]


def test_passkey_accuracies():
    records = [
        passkey_record("alibi", length, depth, 0.2 + depth + seed / 10, seed=seed)
        for length in (512, 1024)
        for depth in (0, 0.5)
        for seed in (1, 2)
    ]
    records += [passkey_record("kerple_log", 512, depth, None) for depth in (0, 0.5)]
    (table,) = passkey_tables(records)
    assert (table.name, table.columns) == ("passkey-github-12x768-512", ("512", "1,024"))
    assert table.title == "Passkey retrieval, GitHub, 12 layers of 768, trained at length 512"
    assert [line.title for line in table.lines if isinstance(line, Section)] == [
        "Mean over depths",
        "Depth 0",
        "Depth 0.5",
    ]
    assert [(row.labels[0], *(cell.text for cell in row.cells)) for row in table.rows] == [
        ("KERPLE (log)", "n/a", "–"),
        ("ALiBi", "60% ± 7%", "60% ± 7%"),
        ("KERPLE (log)", "n/a", "–"),
        ("ALiBi", "35% ± 7%", "35% ± 7%"),
        ("KERPLE (log)", "n/a", "–"),
        ("ALiBi", "85% ± 7%", "85% ± 7%"),
    ]
    assert table.notes[1:] == (
        "Mean ± standard deviation over 2 seeds.",
        "n/a: KERPLE (log) at 512: no such position.",
    )
