"""The figures of experiments: what is drawn."""

import pytest
from pandas import DataFrame

from experiments.figures import (
    cost_plot,
    effective_length_plot,
    long_context_plot,
    position_plot,
    recall_plot,
    score_plot,
)
from tests.support.records import record

CORPORA = ("debian_c", "debian_prose")


def runs(**columns):
    keys = [
        (corpus, pos_emb, seed)
        for corpus in CORPORA
        for pos_emb in ("alibi", "rpe", "fire")
        for seed in (1, 2)
    ]
    return DataFrame(keys, columns=["corpus", "pos_emb", "seed"]).assign(**columns)


def curves(axes):
    return [
        line.get_xydata().tolist()
        for line in axes.lines
        if len(line.get_xdata()) == 2 and line.get_marker() != "None"
    ]


def test_a_line_per_run_from_zero_at_the_training_length():
    figure = cost_plot(runs(length=1024, cost=0.5), 128)
    c, prose = figure.axes
    assert (
        curves(c) == curves(prose) == [[[1, 0], [8, 0.5]]] * 4
    )  # two methods, two seeds; FIRE is not drawn
    assert (c.get_title("left"), prose.get_title("left")) == ("C", "Prose")
    assert c.get_ylim() == prose.get_ylim()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ALiBi", "T5"]


def test_positions_are_multiples_of_the_training_length():
    frame = runs(position=256, difference=0.1)
    axes = position_plot(frame, 128).axes[0]
    points = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() != "None"]
    assert points == [[[2, 0.1]]] * 4


def test_a_point_per_run():
    figure = score_plot(runs(score=-0.3, loss=2.5))
    drawn = sum(len(line.get_xdata()) for axes in figure.axes for line in axes.lines)
    assert drawn == 12
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ALiBi", "T5", "others"]


def test_effective_lengths_are_multiples_of_the_training_length():
    keys = {
        "kind": "effective_length",
        "train_length": 128,
        "effective_lengths": [[64, 256]],
        "corpus": "debian_c",
    }
    (axes,) = effective_length_plot(
        [record("alibi", 20480, 1.0, **keys), record("rotary", 20480, 1.0, **keys)]
    ).axes
    alibi, _, paper, _ = axes.lines
    assert alibi.get_xdata().tolist() == [0.5, 2.0]
    assert max(paper.get_xdata()) == pytest.approx(513 / 512)


def test_recall_is_the_mean_of_the_seeds_in_the_band_of_their_range():
    runs = [("alibi", 1, 2, 1.0), ("alibi", 2, 2, 0.5), ("none", 1, 2, 0.2)]
    alibi, none, *_ = recall_plot(
        DataFrame(runs, columns=["pos_emb", "seed", "distance", "recall"]), 64
    ).axes
    assert (alibi.get_title("left"), none.get_title("left")) == ("ALiBi", "none")
    assert alibi.lines[0].get_xydata().tolist() == [[2, 75]]
    (band,) = alibi.collections[0].get_paths()
    assert {*band.vertices[:, 1]} == {50, 100}


def test_cost_position_and_score_of_each_run():
    keys = DataFrame({"corpus": "debian_c", "pos_emb": ["alibi", "rpe"], "seed": 1})
    costs, differences = (
        keys.assign(length=1024, cost=-0.1),
        keys[1:].assign(position=2048, difference=0.2),
    )
    figure = long_context_plot(costs, differences, keys.assign(step=500, score=-0.4), 512)
    points = []
    for axes in figure.axes:
        points.append(
            [line.get_xydata().tolist() for line in axes.lines if line.get_marker() != "None"]
        )
    assert points == [[[[1, 0], [2, -0.1]]] * 2, [[[4, 0.2]]], [[[500, -0.4]]] * 2]
