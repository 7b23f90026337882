"""The figures of experiments: what is drawn."""

import itertools

from pandas import DataFrame

from experiments.figures import cost_plot, long_context_plot, recall_plot


def curves(axes):
    return [
        line.get_xydata().tolist()
        for line in axes.lines
        if len(line.get_xdata()) == 2 and line.get_marker() != "None"
    ]


def test_a_line_per_run_from_zero_at_the_training_length():
    places = [("debian_c", 512), ("debian_prose", 128), ("debian_c", 128)]
    rows = []
    for (corpus, train_length), pos_emb, seed in itertools.product(
        places, ("alibi", "rpe", "fire"), (1, 2)
    ):
        rows.append((corpus, train_length, pos_emb, seed, 8 * train_length, 0.1 * seed))
    columns = ["corpus", "train_length", "pos_emb", "seed", "length", "cost"]
    figure = cost_plot(DataFrame(rows, columns=columns))
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["C, 128", "Prose, 128", "C, 512"]
    for axes in figure.axes:  # FIRE is not drawn
        assert curves(axes) == [[[1, 0], [8, 0.1]], [[1, 0], [8, 0.2]]] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ALiBi", "T5"]


def test_recall_is_the_mean_of_the_seeds_in_the_band_of_their_range():
    runs = [("alibi", 1, 2, 1.0), ("alibi", 2, 2, 0.5), ("none", 1, 2, 0.2)]
    alibi, none, *_ = recall_plot(
        DataFrame(runs, columns=["pos_emb", "seed", "distance", "recall"]), 64
    ).axes
    assert (alibi.get_title("left"), none.get_title("left")) == ("ALiBi", "none")
    assert alibi.lines[0].get_xydata().tolist() == [[2, 75]]
    (band,) = alibi.collections[0].get_paths()
    assert {*band.vertices[:, 1]} == {50, 100}


def test_position_and_score_of_each_run():
    keys = DataFrame({"corpus": "debian_c", "pos_emb": ["alibi", "rpe"], "seed": 1})
    differences = keys[1:].assign(position=2048, difference=0.2)
    figure = long_context_plot(differences, keys.assign(step=500, score=-0.4), 512)
    points = []
    for axes in figure.axes:
        points.append(
            [line.get_xydata().tolist() for line in axes.lines if line.get_marker() != "None"]
        )
    assert points == [[[[4, 0.2]]], [[[500, -0.4]]] * 2]
