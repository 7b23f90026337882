"""Paired differences of losses, against the definition."""

import math
import statistics

import pytest

from megatron.reporting.aggregate import method_of, setting_of
from megatron.reporting.differences import PairedLosses
from megatron.reporting.paper_tables import difference_tables
from tests.support.records import record


def measured(pos_emb, losses, tokens=(100, 100, 100), seed=1, targets="a", length=512, **keys):
    mean = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
    groups = {"tokens": list(tokens), "losses": list(losses)}
    return record(
        pos_emb, length, math.exp(mean), seed, loss=mean, targets=targets, groups=groups, **keys
    )


def key(record):
    return setting_of(record), method_of(record), record["length"]


LOG, ALIBI = measured("kerple_log", (3.0, 2.0, 1.0)), measured("alibi", (3.1, 2.3, 1.05))


def test_documents_count_by_their_tokens():
    """The ratio estimate: sqrt(D / (D - 1) * sum_d n_d^2 (difference_d - mean)^2) / N."""
    tokens = (10, 200, 90)
    pair = (
        measured("alibi", (3.1, 2.3, 1.05), tokens),
        measured("kerple_log", (3.0, 2.0, 1.0), tokens),
    )
    difference = PairedLosses(pair).difference(*map(key, pair))
    mean = (10 * 0.1 + 200 * 0.3 + 90 * 0.05) / 300
    squares = [(n * (d - mean)) ** 2 for n, d in zip(tokens, (0.1, 0.3, 0.05), strict=True)]
    assert difference.mean == pytest.approx(mean)
    assert difference.stderr == pytest.approx(math.sqrt(1.5 * sum(squares)) / 300)
    assert (difference.seeds, difference.significant) == (
        1,
        difference.mean > 2 * difference.stderr,
    )
    assert not PairedLosses([LOG, ALIBI]).difference(key(ALIBI), key(LOG)).significant


def test_seeds_are_averaged_first():
    records = [
        LOG,
        ALIBI,
        measured("kerple_log", (3.2, 2.0, 1.0), seed=2),
        measured("alibi", (3.1, 2.3, 1.05), seed=2),
    ]
    records.append(measured("alibi", (9.0, 9.0, 9.0), seed=3))  # kerple_log does not have this seed
    difference = PairedLosses(records).difference(key(ALIBI), key(LOG))
    assert difference.seeds == 2
    assert difference.mean == pytest.approx((0.15 + 0.25 / 3) / 2)
    assert difference.stderr == pytest.approx(statistics.stdev((0.0, 0.3, 0.05)) / math.sqrt(3))
    # Of one text only, even if each seed was measured on its own.
    others = []
    for each in records:
        others.append({**each, "targets": f"text of seed {each['seed']}"})
    assert PairedLosses(others).difference(key(ALIBI), key(LOG)) is None


@pytest.mark.parametrize(
    "other",
    [
        measured("alibi", (3.1, 2.3, 1.05), targets="b"),
        measured("alibi", (3.1, 2.3, 1.05), tokens=(90, 110, 100)),
        measured("alibi", (3.1, 2.3, 1.05), seed=2),
        record("alibi", 512, 3.0),
    ],
)
def test_other_tokens_or_seeds_have_no_difference(other):
    losses = PairedLosses([LOG, other])
    assert losses.difference(key(other), key(LOG)) is None
    assert losses.text(key(other), key(LOG)) == "–"


def test_seeds_with_other_tokens_have_no_difference():
    second = [
        measured(name, (3.0, 2.0, 1.0), tokens=(90, 110, 100), seed=2)
        for name in ("kerple_log", "alibi")
    ]
    losses = PairedLosses([LOG, ALIBI, *second])
    assert losses.difference(key(ALIBI), key(LOG)) is None


def test_one_document_has_no_standard_error():
    pair = measured("alibi", (3.5,), (10,)), measured("kerple_log", (3.0,), (10,))
    difference = PairedLosses(pair).difference(*map(key, pair))
    assert (difference.stderr, difference.significant, str(difference)) == (None, False, "+0.5000")


def test_rows_with_fewer_seeds_are_labeled():
    second = [
        measured(entry["pos_emb"], entry["groups"]["losses"], seed=2) for entry in (LOG, ALIBI)
    ]
    (table,) = difference_tables([LOG, ALIBI, *second, measured("fire", (3.3, 2.0, 1.0))])
    assert [row.labels[0] for row in table.rows] == ["ALiBi", "FIRE (1 seed)"]


def test_the_tables_show_differences():
    (table,) = difference_tables([{**record, "documents": 3} for record in (LOG, ALIBI)])
    assert table.title.startswith("Loss minus that of KERPLE (log), ")
    assert [[*row.labels, *(cell.text for cell in row.cells)] for row in table.rows] == [
        ["ALiBi", "+0.1500 ± 0.0764"]
    ]
    assert "standard error over documents" in table.notes[0]
    assert difference_tables([record("kerple_log", 512, 3.0), record("alibi", 512, 3.1)]) == []


@pytest.mark.parametrize(
    ("documents", "losses", "text", "said", "unsaid"),
    [
        (
            1,
            (3.1, 2.3, 1.05),
            "+0.1500 ± 0.0764",
            "over segments, because the text is one document",
            "Several seeds",
        ),
        (None, (3.1, 2.3, 1.05), "+0.1500 ± 0.0764", "over segments", "one document"),
        (1, (3.25,), "+0.2500", "nats", "±"),
        (1, (3.000000004,), "0.0000", "nats", "±"),
    ],
)
def test_notes_say_what_the_error_is(documents, losses, text, said, unsaid):
    tokens = (100,) * len(losses)
    pair = (
        measured("kerple_log", (3.0, 2.0, 1.0)[: len(losses)], tokens),
        measured("alibi", losses, tokens),
    )
    (table,) = difference_tables([{**record, "documents": documents} for record in pair])
    assert table.rows[0].cells[0].text == text
    assert said in table.notes[0]
    assert unsaid not in table.notes[0]
