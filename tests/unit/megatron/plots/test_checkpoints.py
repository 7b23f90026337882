"""Plots of checkpoints, read back from the axes: biases and weights of released checkpoints and effective lengths equal
the formulas in float64.
"""

import numpy as np
import pytest
import torch

from megatron.checkpoint.directory import weights_fingerprint
from megatron.plots.checkpoints import (
    add_weight_figures,
    distance_figures,
    distance_tables,
    effective_length_figure,
)
from megatron.reporting.report import Sources
from megatron.reporting.style import SCREEN
from megatron.utils.errors import UserError
from tests.support.checkpoints import write_checkpoint
from tests.support.records import record
from tests.support.release import RELEASE

NUM_DISTANCES = 2000


def saved(method: str) -> dict[str, np.ndarray]:
    """The positional parameters in the release's files, float64."""
    path = RELEASE / f"{method}_checkpoints" / "global_step300" / "layer_02-model_00-model_states.pt"
    state = torch.load(path, weights_only=True)
    prefix = "attention.rpe."
    return {
        name.removeprefix(prefix): value.double().numpy().reshape(-1, 1)
        for name, value in state.items()
        if name.startswith(prefix)
    }


def log_bias(distance):
    parameters = saved("kerple_log")
    return -np.maximum(parameters["bias_p"], 0.01) * np.log(1 + np.maximum(parameters["bias_a"], 0.01) * distance)


def power_bias(distance):
    parameters = saved("kerple_power_ap_")
    return -np.maximum(parameters["bias_a"], 0.01) * distance ** np.clip(parameters["bias_p"], 0.01, 2)


def alibi_bias(distance):
    return -(2.0 ** (-8 * np.arange(1, 5) / 4)).reshape(-1, 1) * distance


def wht(distance):
    parameters = saved("kerple_power__ap")
    return np.exp(-np.maximum(parameters["wei_a"], 0.01) * distance ** np.clip(parameters["wei_p"], 0.01, 2))


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
    assert labels == [f"head {head + 1}" for head in expected.mean(axis=1).argsort(kind="stable")], "steepest first"
    assert len({line.get_color() for line in panels[0].lines}) == 4


@pytest.mark.parametrize("method", ["kerple_log", "kerple_power_ap_", "alibi"])
def test_effective_lengths(method):
    limit = 300
    formula = FORMULAS[method][1]
    (table,) = distance_tables(RELEASE / f"{method}_checkpoints", num_distances=10, limit=limit)
    below = formula(np.arange(limit, dtype=np.float64)) < -2
    expected = [int(row.argmax()) if row.any() else limit for row in below]
    assert table.effective_lengths.tolist() == expected
    lengths = {"A": expected, "B": [5, limit, limit, 5]}
    figure = effective_length_figure(lengths, model="x", name="x", limit=limit)
    (axes,) = figure.draw(SCREEN).axes
    for label, head_lengths in lengths.items():
        (line,) = (line for line in axes.lines if line.get_label() == label)
        assert line.get_drawstyle() == "steps-post"
        x, y = line.get_data()
        for distance in (0, 4, 5, 6, 60, limit):
            count = sum(length <= distance and length < limit for length in head_lengths)
            assert y[np.searchsorted(x, distance, side="right") - 1] == count / 4, (label, distance)
    assert "B: 2 of 4 heads below 300" in figure.description


def test_methods_without_bias_and_weight_have_no_tables():
    assert distance_tables(RELEASE / "rotary_checkpoints") == []
    assert distance_tables(RELEASE / "sinusoidal_checkpoints") == []


def test_layers_with_their_own_parameters_have_their_own_panels():
    (table,) = distance_tables(RELEASE / "kerple_log_checkpoints", num_distances=50)
    (figure,) = distance_figures([table] * 3, model="x", name='"x" > y')
    assert figure.name == "kernels-x-y-bias"
    panels = [axes for axes in figure.draw(SCREEN).axes if axes.get_visible()]
    assert [len(axes.lines) for axes in panels] == [4, 4, 4]


def written_checkpoint(folder, iteration):
    """Write a small checkpoint, whose weights depend on the iteration; returns its description in records."""
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
    layer = next((tmp_path / "run" / "global_step3").glob("layer_03*"))  # trained again in the same folder
    torch.save({name: 2 * value for name, value in torch.load(layer, weights_only=True).items()}, layer)
    figures, (note,) = kernels()
    assert figures == []
    assert note == (
        f"No kernels are plotted for KERPLE (log), GitHub, seed 1: {tmp_path / 'run'}: iteration 3 has "
        f"other weights than those that were evaluated (fingerprint {checkpoint['fingerprint']}); evaluate it again."
    )
    checkpoint["fingerprint"] = None  # not known
    assert len(kernels()[0]) == 2


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


def test_a_named_checkpoint_without_a_kernel_is_rejected():
    with pytest.raises(UserError, match="rotary_checkpoints"):
        add_weight_figures(Sources([], [RELEASE / "rotary_checkpoints"]))
