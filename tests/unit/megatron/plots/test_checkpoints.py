"""Plots of checkpoints, read back from the axes: biases and weights of released checkpoints and
effective lengths equal the formulas in float64; A, B and f(A, B) of a query equal DAPE's formulas
computed from the weights.
"""

import hashlib
import math
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch

from kerple.positional import load_plugin, registry
from megatron.checkpoint.manifest import weights_fingerprint, write_manifest_of_folder
from megatron.evaluation.metrics.effective_length import LIMIT
from megatron.plots.checkpoints import (
    adaptive_figure,
    add_weight_figures,
    distance_figures,
    distance_plot,
    distance_tables,
    effective_length_figure,
    query_scores,
)
from megatron.reporting.report import Sources
from megatron.reporting.style import SCREEN
from tests.support.checkpoints import write_checkpoint
from tests.support.errors import assert_rejected
from tests.support.exported import export
from tests.support.language_models import VOCABULARY, small_gpt, with_repeated_heads
from tests.support.records import record
from tests.support.release import RELEASE

NUM_DISTANCES = 2000


def saved(method: str) -> dict[str, np.ndarray]:
    """The positional parameters in the release's files, float64."""
    path = (
        RELEASE / f"{method}_checkpoints" / "global_step300" / "layer_02-model_00-model_states.pt"
    )
    state = torch.load(path, weights_only=True)
    prefix = "attention.rpe."
    return {
        name.removeprefix(prefix): value.double().numpy().reshape(-1, 1)
        for name, value in state.items()
        if name.startswith(prefix)
    }


def log_bias(distance):
    parameters = saved("kerple_log")
    return -np.maximum(parameters["bias_p"], 0.01) * np.log(
        1 + np.maximum(parameters["bias_a"], 0.01) * distance
    )


def power_bias(distance):
    parameters = saved("kerple_power_ap_")
    return -np.maximum(parameters["bias_a"], 0.01) * distance ** np.clip(
        parameters["bias_p"], 0.01, 2
    )


def alibi_bias(distance):
    return -(2.0 ** (-8 * np.arange(1, 5) / 4)).reshape(-1, 1) * distance


def wht(distance):
    parameters = saved("kerple_power__ap")
    return np.exp(
        -np.maximum(parameters["wei_a"], 0.01) * distance ** np.clip(parameters["wei_p"], 0.01, 2)
    )


FORMULAS = {
    "kerple_log": ("bias", log_bias),
    "kerple_power_ap_": ("bias", power_bias),
    "alibi": ("bias", alibi_bias),
    "kerple_power__ap": ("weight", wht),
}


@pytest.mark.parametrize("method", FORMULAS)
def test_released_checkpoints(method):
    quantity, formula = FORMULAS[method]
    tables = distance_tables(RELEASE / f"{method}_checkpoints", num_distances=NUM_DISTANCES)
    (figure,) = distance_figures(tables, model="a model", name="x")
    assert figure.name == f"kernels-x-{quantity}"
    panels = figure.draw(SCREEN).axes
    assert len(panels) == 2
    distances = np.arange(NUM_DISTANCES, dtype=np.float64)
    expected = formula(distances)
    for axes in panels:
        lines = {line.get_label(): line for line in axes.lines}
        assert sorted(lines) == [f"head {number}" for number in (1, 2, 3, 4)]
        for head in range(4):
            x, y = lines[f"head {head + 1}"].get_data()
            np.testing.assert_array_equal(x, distances)
            np.testing.assert_allclose(y, expected[head], rtol=2e-5, atol=1e-6)
    legend = [text.get_text() for text in panels[0].figure.legends[0].get_texts()]
    assert legend == ["head 1", "head 2", "head 3", "head 4"]
    labels = [line.get_label() for line in panels[0].lines]
    assert labels == [
        f"head {head + 1}" for head in expected.mean(axis=1).argsort(kind="stable")
    ], "steepest first"
    assert len({line.get_color() for line in panels[0].lines}) == 4


@pytest.mark.parametrize("method", ["kerple_log", "kerple_power_ap_", "alibi"])
def test_effective_lengths(method):
    formula = FORMULAS[method][1]
    (table,) = distance_tables(RELEASE / f"{method}_checkpoints", num_distances=10)
    below = formula(np.arange(LIMIT, dtype=np.float64)) < -2
    expected = [int(row.argmax()) if row.any() else LIMIT for row in below]
    assert table.effective_lengths.tolist() == expected
    lengths = {"A": expected, "B": [5, LIMIT, LIMIT, 5]}
    figure = effective_length_figure(lengths, {"A": 0, "B": 1}, model="x", name="x")
    (axes,) = figure.draw(SCREEN).axes
    for label, head_lengths in lengths.items():
        (line,) = (line for line in axes.lines if line.get_label() == label)
        assert line.get_drawstyle() == "steps-post"
        x, y = line.get_data()
        for distance in (0, 4, 5, 6, 60, 300, LIMIT):
            count = sum(length <= distance and length < LIMIT for length in head_lengths)
            assert y[np.searchsorted(x, distance, side="right") - 1] == count / 4, (label, distance)


def test_layers_with_their_own_parameters_have_their_own_panels():
    (table,) = distance_tables(RELEASE / "kerple_log_checkpoints", num_distances=50)
    (figure,) = distance_figures([table] * 3, model="x", name='"x" > y')
    assert figure.name == "kernels-x-y-bias"
    panels = [axes for axes in figure.draw(SCREEN).axes if axes.get_visible()]
    assert [len(axes.lines) for axes in panels] == [4, 4, 4]


LENGTH, HEADS, SIZE = 40, 4, 8


def test_scores_of_grouped_heads_in_a_window():
    model = small_gpt("dape_kerple", num_kv_heads=2, use_qk_layernorm=True, sliding_window_width=4)
    tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(5))
    grouped, repeated = (
        query_scores(variant, tokens) for variant in (model, with_repeated_heads(model))
    )
    assert grouped.scores.shape == (HEADS, 5)
    for field in ("scores", "static", "adapted"):
        torch.testing.assert_close(getattr(grouped, field), getattr(repeated, field))
    figure = adaptive_figure(grouped, model="x", name="x")
    assert "position 39" in figure.caption
    assert list(figure.draw(SCREEN).axes[0].lines[0].get_xdata()) == [35, 36, 37, 38, 39]
    # Without a window, the last 5 of all keys have the same scores.
    attention = model.blocks[0].attention
    attention.window = None
    torch.testing.assert_close(query_scores(model, tokens).scores[:, -5:], grouped.scores)


@pytest.mark.parametrize(
    ("pos_emb", "options"),
    [
        ("dape_kerple", {}),
        ("dape_kerple", {"variant": "Concat"}),
        ("dape_alibi", {"variant": "Add_Residual"}),
        ("dape_fire", {}),
        ("dape", {}),
        ("dape_rotary", {}),
    ],
)
def test_scores_of_the_first_layer(pos_emb, options):
    model = small_gpt(pos_emb, seed=3, max_positions=16, pos_emb_options=options)
    tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(5))
    parts = query_scores(model, tokens)

    block = model.blocks[0]
    state = {name: value.double().numpy() for name, value in block.state_dict().items()}
    hidden = model.embedding.word_embeddings.weight.detach().double().numpy()[tokens.numpy()]
    mean, variance = hidden.mean(1, keepdims=True), hidden.var(1, keepdims=True)
    normed = (hidden - mean) / np.sqrt(variance + 1e-5)
    normed = normed * state["input_layernorm.weight"] + state["input_layernorm.bias"]
    mixed = normed @ state["attention.query_key_value.weight"].T
    mixed = (mixed + state["attention.query_key_value.bias"]).reshape(LENGTH, HEADS, 3, SIZE)
    angles = np.multiply.outer(np.arange(LENGTH), 10_000 ** (-np.arange(0, SIZE, 2) / SIZE)) * (
        pos_emb == "dape_rotary"
    )
    turned = (mixed[..., : SIZE // 2] + 1j * mixed[..., SIZE // 2 :]) * np.exp(1j * angles)[
        :, None, None
    ]
    scores = np.einsum("hd,lhd->hl", turned[-1, :, 0], turned[:, :, 1].conj()).real / math.sqrt(
        SIZE
    )
    np.testing.assert_allclose(parts.scores.numpy(), scores, rtol=1e-4, atol=1e-4)

    rpe = {name.removeprefix("attention.rpe."): value for name, value in state.items()}
    distance = LENGTH - 1 - np.arange(LENGTH, dtype=np.float64)
    static = None
    if pos_emb in ("dape_kerple", "dape_alibi"):
        static = block.attention.rpe.static.bias(torch.from_numpy(distance)).detach().numpy()
    elif pos_emb == "dape_fire":
        c, longest = abs(rpe["static.c"]), max(LENGTH - 1, abs(rpe["static.m"].item()) * 512)
        hidden = rpe["static.first.weight"] * np.log1p(c * distance) / np.log1p(c * longest)
        hidden = hidden + rpe["static.first.bias"][:, None]
        hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
        static = rpe["static.second.weight"] @ hidden + rpe["static.second.bias"][:, None]
        assert np.ptp(static) > 0
    if static is None:
        assert parts.static is None
        inputs = scores
    else:
        np.testing.assert_allclose(parts.static.numpy(), static, rtol=1e-4, atol=1e-4)
        inputs = (
            scores + static
            if options.get("variant") == "Add_Residual"
            else np.concatenate([scores, static])
        )
    hidden = rpe["first.weight"] @ inputs + rpe["first.bias"][:, None]
    hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
    expected = rpe["second.weight"] @ hidden + rpe["second.bias"][:, None]
    np.testing.assert_allclose(parts.adapted.numpy(), expected, rtol=2e-4, atol=2e-4)

    figure = adaptive_figure(parts, model="x", name="x")
    axes = figure.draw(SCREEN).axes
    assert len(axes) == (9 if static is not None else 6)
    assert [panel.get_title(loc="left") for panel in axes[:3]] == ["head 1", "head 2", "head 3"]
    for index, line in ((0, scores[0]), (1, scores[1]), (-2, expected[1]), (-1, expected[2])):
        np.testing.assert_allclose(axes[index].lines[0].get_ydata(), line, rtol=2e-4, atol=2e-4)


def written_checkpoint(folder, iteration):
    """Write a small checkpoint, whose weights depend on the iteration; returns its description in
    records.
    """
    write_checkpoint(folder, "kerple_log", "nowhere", iteration=iteration)
    fingerprint = weights_fingerprint(folder / f"global_step{iteration}")
    values = {"path": str(folder), "iteration": iteration, "fingerprint": fingerprint}
    return {**record("x", 1, 1.0)["checkpoint"], **values}


def test_kernels_are_those_of_the_evaluated_weights(tmp_path):
    checkpoint = written_checkpoint(tmp_path / "run", 3)
    records = [record("kerple_log", 512, 3.0, checkpoint=checkpoint)]

    def kernels():
        sources = Sources(records)
        add_weight_figures(sources)
        return sources.weight_figures + sources.length_figures, sources.notes

    figures, notes = kernels()
    assert (len(figures), notes) == (2, [])
    layer = next(
        (tmp_path / "run" / "global_step3").glob("layer_03*")
    )  # trained again in the same folder
    torch.save(
        {name: 2 * value for name, value in torch.load(layer, weights_only=True).items()}, layer
    )
    figures, (note,) = kernels()
    assert figures == []
    assert note == (
        f"No kernels are plotted for KERPLE (log), GitHub, seed 1: {tmp_path / 'run'}: iteration 3 "
        "has other weights than those that were evaluated (fingerprint "
        f"{checkpoint['fingerprint']}); evaluate it again."
    )


def test_changed_code_of_a_method_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    file = tmp_path / "own.py"
    code = Path("experiments/bytes/steep.py").read_text()
    file.write_text(code)
    load_plugin(str(file))
    folder = tmp_path / "run"
    write_checkpoint(folder, "kerple_log_steep", "nowhere", iteration=3)
    step = folder / "global_step3"
    state = {"iteration": 3, "training": {"code": [hashlib.sha256(code.encode()).hexdigest()]}}
    torch.save(state, step / "mp_rank_00_model_states.pt")
    write_manifest_of_folder(step, 3)
    checkpoint = {"path": str(folder), "iteration": 3, "fingerprint": weights_fingerprint(step)}
    checkpoint = {**record("x", 1, 1.0)["checkpoint"], **checkpoint}
    records = [record("kerple_log_steep", 512, 3.0, checkpoint=checkpoint)]
    for changed, expected in ((code, []), (code + "\n", [True])):
        file.write_text(changed)
        for sources in (Sources(records), Sources([], [folder])):
            add_weight_figures(sources)
            assert ["kerple_log_steep" in note for note in sources.notes] == expected


def test_weights_of_another_run_are_not_drawn(tmp_path):
    """The manifest has the checksums of the weights that were saved."""
    written_checkpoint(tmp_path / "run", 3)
    step = tmp_path / "run" / "global_step3"
    write_manifest_of_folder(step, 3)
    assert distance_tables(tmp_path / "run", num_distances=4)
    written_checkpoint(tmp_path / "other", 4)
    for path in (tmp_path / "other" / "global_step4").glob("layer_*"):
        shutil.copy(path, step)
    assert_rejected("checksum", distance_tables, tmp_path / "run", num_distances=4)


@pytest.mark.parametrize("highest", [0.0, 2.7])
def test_all_biases_near_zero_and_above_are_drawn(highest):
    """ALiBi's are at most 0, some of T5's are positive."""
    bias = torch.linspace(highest, -40.0, 200).expand(2, 200)
    _, near = distance_plot("bias", [("", bias)]).axes
    low, high = near.get_ylim()
    assert low == -10
    assert highest < high < highest + 1


def test_kernels_of_the_lowest_seed_and_recorded_effective_lengths(tmp_path):
    records = []
    for seed in (2, 1):
        checkpoint = written_checkpoint(tmp_path / str(seed), seed)
        records.append(record("kerple_log", 512, 3.0, seed, checkpoint=checkpoint))
        heads = {"effective_lengths": [[seed, 7], [8, 9]], "layers": ["layer 0", "layer 1"]}
        records.append({**records[-1], "kind": "effective_length", **heads})
    sources = Sources(records)
    add_weight_figures(sources)
    (figure,) = sources.weight_figures
    assert figure.name == "kernels-github-12x768-512-kerple_log-bias"
    assert figure.title == "Bias by distance: KERPLE (log), GitHub, seed 1"
    (figure,) = sources.length_figures
    assert list(figure.draw(SCREEN).axes[0].lines[0].get_xdata()) == [0, 1, 7, 8, 9, 20480]


def test_effective_lengths_of_equal_weights_and_other_code():
    """The code of an external method can change what the same weights compute."""
    records = []
    for code, lengths in (("a", [3, 7]), ("b", [50, 60])):
        checkpoint = {**record("x", 1, 1.0)["checkpoint"], "path": None, "model": code}
        records.append(record(f"own ({code})", 512, 3.0, checkpoint=checkpoint))
        measured = {"effective_lengths": [lengths], "layers": ["all layers"]}
        records.append({**records[-1], "kind": "effective_length", **measured})
    sources = Sources(records)
    add_weight_figures(sources)
    (figure,) = sources.length_figures
    lines = figure.draw(SCREEN).axes[0].lines
    ends = [list(line.get_xdata())[1:-1] for line in lines]
    assert ends == [[3, 7], [50, 60]]


@pytest.mark.parametrize("lengths", [(512,), (96, 1536)])
def test_kernels_are_drawn_to_the_longest_tested_length(lengths, tmp_path):
    checkpoint = written_checkpoint(tmp_path / "run", 3)
    sources = Sources(
        [record("kerple_log", length, 3.0, checkpoint=checkpoint) for length in lengths]
    )
    add_weight_figures(sources)
    (figure,) = sources.weight_figures
    assert max(figure.draw(SCREEN).axes[0].lines[0].get_xdata()) == max(lengths) - 1


def test_kernels_of_a_hugging_face_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    _, folder = export("kerple_log")
    sources = Sources([], [folder])
    add_weight_figures(sources)
    assert len(sources.weight_figures) == len(sources.length_figures) == 1


def test_named_checkpoints_of_equally_named_runs_have_own_figures(tmp_path):
    folders = [tmp_path / "a" / "log" / "checkpoints", tmp_path / "b" / "log" / "checkpoints"]
    for iteration, folder in enumerate(folders, start=1):
        written_checkpoint(folder, iteration)
    sources = Sources([], [*folders, folders[0]])
    add_weight_figures(sources)
    assert (
        len({figure.name for figure in sources.weight_figures}) == len(sources.weight_figures) == 2
    )
    (lengths,) = sources.length_figures
    assert len(lengths.draw(SCREEN).axes[0].lines) == 2


def test_a_named_checkpoint_without_a_kernel_is_rejected():
    assert_rejected(
        "rotary_checkpoints", add_weight_figures, Sources([], [RELEASE / "rotary_checkpoints"])
    )
