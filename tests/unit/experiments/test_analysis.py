"""Comparisons, costs of extrapolation and in-context scores, from small records."""

import json
import math

import pytest
from scipy.stats import t

from experiments.analysis import (
    BEYOND,
    Comparison,
    compare,
    comparison_table,
    costs,
    differences_by_length,
    in_context_scores,
    paper_difference,
    position_differences,
    recall_by_distance,
    training_progress,
)
from tests.support.errors import assert_rejected
from tests.support.records import record


def loss_record(
    pos_emb, seed, loss, multiple=1, *, documents=(0.0, 0.0), corpus="debian_c", **keys
):
    """Two documents of 500 tokens each; `documents`: by how much their losses differ
    from `loss`.
    """
    groups = {"tokens": [500, 500], "losses": [loss + difference for difference in documents]}
    keys = {
        "loss": loss,
        "corpus": corpus,
        "groups": groups,
        "targets": "ab",
        "measurement": "cd",
    } | keys
    return record(pos_emb, 512 * multiple, math.exp(loss), seed, **keys)


def position_record(pos_emb, losses, length=128, seed=1):
    keys = {
        "kind": "positions",
        "edges": list(range(0, length + 1, 2)),
        "losses": losses,
        "targets": "ab",
    }
    return record(pos_emb, length, 8.0, seed, train_length=128, counts=[9] * len(losses), **keys)


@pytest.mark.parametrize(
    ("paper", "low", "high", "word"),
    [
        (-0.1, -0.09, -0.03, "agrees"),
        (-0.1, -0.025, -0.005, "too imprecise"),  # the estimate is below the margin
        (-0.1, -0.09, 0.01, "too imprecise"),
        (-0.1, 0.001, 0.09, "disagrees"),
        (-0.1, -0.01, 0.015, "disagrees"),  # no difference, although the paper has one
        (+0.1, 0.03, 0.09, "agrees"),
        (+0.1, -0.09, -0.001, "disagrees"),
        (-0.01, -0.019, 0.01, "agrees"),
        (-0.01, -0.021, 0.01, "too imprecise"),
        (0.0, 0.021, 0.09, "disagrees"),
        (0.0, -0.09, -0.021, "disagrees"),
        (0.0, 0.01, 0.09, "too imprecise"),
    ],
)
def test_words(paper, low, high, word):
    """As experiments/long_context/README.md defines them."""
    half = (high - low) / 2 / t.ppf(0.975, 1)
    middle = (low + high) / 2
    comparison = Comparison((middle - half, middle + half), 0.0, paper)
    assert comparison.interval == pytest.approx((low, high))
    assert comparison.word == word


def test_the_interval_has_the_variation_of_seeds_and_documents():
    documents = (
        (0.05, -0.05),
        (-0.05, 0.05),
    )  # of log and of ALiBi: the difference varies by 0.1 around its mean
    records = []
    for seed, difference in ((1, -0.1), (2, -0.2), (3, -0.3)):
        records += [loss_record("kerple_log", seed, 2.0 + difference, documents=documents[0])]
        records += [loss_record("alibi", seed, 2.0, documents=documents[1])]
    found = compare(records, "debian_c", "alibi", (1,))
    assert found.mean == pytest.approx(-0.2)
    assert found.documents == pytest.approx(0.1**2)  # 0.1 * sqrt(2) / sqrt(2 documents)
    width = t.ppf(0.975, 2) * math.sqrt(0.1**2 / 3 + 0.1**2)
    assert found.interval == pytest.approx((-0.2 - width, -0.2 + width))


def test_lengths_beyond_the_training_length_are_averaged():
    records = [
        loss_record(
            pos_emb,
            seed,
            2.0 + 0.01 * seed - (0.1 * multiple if pos_emb == "kerple_log" else 0.0),
            multiple,
        )
        for pos_emb in ("kerple_log", "alibi")
        for seed in (1, 2)
        for multiple in (1, *BEYOND)
    ]
    assert compare(records, "debian_c", "alibi", BEYOND).by_seed == pytest.approx((-1.5, -1.5))
    (one,) = compare(
        records[:-1], "debian_c", "alibi", BEYOND
    ).by_seed  # seed 2 of ALiBi lacks a length
    assert one == pytest.approx(-1.5)
    assert compare(records, "debian_c", "rpe", (1,)) is None
    windows = [loss_record("kerple_log", 1, 9.0, mode="window@512")]
    assert compare(records + windows, "debian_c", "alibi", (1,)).by_seed == pytest.approx(
        (-0.1, -0.1)
    )


def test_the_difference_of_the_paper():
    assert paper_difference("debian_c", "alibi", (1,)) == pytest.approx(math.log(3.40 / 3.42))
    beyond = (
        math.log(log / alibi)
        for log, alibi in ((2.86, 3.13), (2.74, 3.04), (2.71, 3.04), (2.75, 3.02))
    )
    assert paper_difference("debian_c", "alibi", BEYOND) == pytest.approx(sum(beyond) / 4)


def test_a_method_that_the_paper_does_not_have():
    assert math.isnan(paper_difference("debian_c", "kerple_log_steep", (1,)))


@pytest.mark.parametrize("keys", [{"targets": "other"}, {"train_length": 256, "length": 256}])
def test_runs_that_are_not_comparable_are_named(keys):
    records = [
        loss_record(pos_emb, seed, 2.0) for pos_emb in ("kerple_log", "alibi") for seed in (1, 2)
    ]
    records[-1] |= keys
    assert_rejected("debian_c.*2", compare, records, "debian_c", "alibi", (1,))
    assert_rejected(
        "debian_c.*1.*512",
        compare,
        [*records, loss_record("alibi", 1, 2.1)],
        "debian_c",
        "alibi",
        (1,),
    )
    records[-1] = {**loss_record("alibi", 2, 2.0), "loss": None}
    assert_rejected("debian_c.*2.*512", compare, records, "debian_c", "alibi", (1,))


def test_the_table_has_a_word_an_estimate_and_the_paper_s_value():
    records = [loss_record("kerple_log", seed, 1.9999 - 0.001 * seed) for seed in (1, 2)]
    records += [loss_record("alibi", seed, 2.0) for seed in (1, 2)]
    table = comparison_table(records, ("alibi",))
    assert table.columns == ("C", "paper, GitHub")
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["agrees<br>-0.002 [-0.008, +0.005]", "-0.006"],
        ["–", "–"],
    ]


def test_costs():
    records = [loss_record("alibi", seed, 2.0 + seed, 8) for seed in (1, 2)]
    records += [
        loss_record("alibi", 1, 2.5, 8, mode="window@512"),
        loss_record("alibi", 1, 2.0, 8, mode="blockwise"),
    ]
    found = costs(records)
    assert found.to_numpy().tolist() == [["debian_c", 512, "alibi", 1, 4096, 0.5]]


def test_in_context_scores():
    losses = [5.0] * 4 + [3.0] * 12 + [9.0] * 32 + [1.0] * 16  # positions 8 to 31: 3; from 96 on: 1
    (row,) = in_context_scores([position_record("alibi", losses)]).itertuples()
    assert (row.corpus, row.pos_emb, row.seed, row.score) == ("github", "alibi", 1, -2.0)
    assert row.loss == pytest.approx(sum(losses) / 64)
    longer = position_record("alibi", losses * 2, 256)
    wide = {**position_record("alibi", [1.0] * 4), "edges": [0, 32, 64, 96, 128]}
    assert in_context_scores([longer, wide]).empty


def test_differences_by_position():
    log, alibi = [2.0] * 32 + [3.0] * 32, [1.0] * 64
    found = position_differences(
        [position_record("kerple_log", log), position_record("alibi", alibi)], 128
    )
    assert found["pos_emb"].unique() == ["kerple_log"]
    assert found["difference"].tolist() == [1.0] * 6 + [
        2.0
    ]  # positions 1 to 2, 2 to 4, ..., 64 to 128
    assert found["position"].tolist()[-1] == pytest.approx(64 * math.sqrt(2))
    assert position_differences(
        [position_record("kerple_log", log), position_record("alibi", alibi, seed=2)], 128
    ).empty


def test_recall_is_relative_to_the_accuracy_at_the_training_length():
    distances = {"64": {"2": [3, 4]}, "1024": {"2": [2, 4], "512": [1, 8]}}
    result = {
        "pos_emb": "alibi",
        "seed": 3,
        "accuracies": {"64": 0.5, "1024": 0.2},
        "distances": distances,
    }
    frame = recall_by_distance(
        {"settings": {"train_longest": 64, "test_longest": 1024}, "results": [result]}
    )
    assert frame.to_numpy().tolist() == [["alibi", 3, 0.5, 2, 1.0], ["alibi", 3, 0.5, 512, 0.25]]


def test_differences_by_length_count_their_seeds():
    """One seed has the error over documents."""
    records = [
        loss_record("kerple_log", 1, 2.0, documents=(0.05, -0.05)),
        loss_record("alibi", 1, 2.1),
    ]
    records += [loss_record("kerple_log", 2, 2.1), loss_record("alibi", 1, 2.0, multiple=2)]
    table = differences_by_length(records, ("alibi", "rpe"))
    assert table.columns == ("512", "1,024")
    alibi, t5 = table.lines
    assert ([cell.text for cell in alibi.cells], alibi.labels[1]) == (["-0.100 ± 0.050", "–"], "1")
    assert ([cell.text for cell in t5.cells], t5.labels[1]) == (["–", "–"], "0")


def test_training_progress_has_the_logged_scores(tmp_path):
    lines = [{"iteration": 1, "train/loss": 3.0}]
    lines += [
        {"iteration": step, "extrapolation/in_context_score/512": -0.1 * step} for step in (1, 2)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    frame = training_progress({("alibi", 7): path}, 512)
    assert frame.to_dict("split")["data"] == [["alibi", 7, 1, -0.1], ["alibi", 7, 2, -0.2]]
    assert training_progress({("alibi", 7): path}, 2048).empty
