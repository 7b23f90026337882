"""What is drawn, taken back from the axes, equals the formulas in float64."""

import math

import numpy as np
import pytest
import torch

from megatron.config import UserError
from megatron.reporting import drawing, figures
from megatron.reporting.kernels import kernels_of
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.records import record
from tests.support.release import RELEASE

LONGEST = 2000


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
    found = saved("kerple_log")
    return -np.maximum(found["bias_p"], 0.01) * np.log(1 + np.maximum(found["bias_a"], 0.01) * distance)


def power_bias(distance):
    found = saved("kerple_power_ap_")
    return -np.maximum(found["bias_a"], 0.01) * distance ** np.clip(found["bias_p"], 0.01, 2)


def alibi_bias(distance):
    return -(2.0 ** (-8 * np.arange(1, 5) / 4)).reshape(-1, 1) * distance


def wht(distance):
    found = saved("kerple_power__ap")
    return np.exp(-np.maximum(found["wei_a"], 0.01) * distance ** np.clip(found["wei_p"], 0.01, 2))


FORMULAS = {
    "kerple_log": ("bias", log_bias),
    "kerple_power_ap_": ("bias", power_bias),
    "alibi": ("bias", alibi_bias),
    "kerple_power__ap": ("weight", wht),
}


@pytest.mark.parametrize("method", FORMULAS)
def test_kernels_of_released_checkpoints(method):
    hook, formula = FORMULAS[method]
    kernels = kernels_of(RELEASE / f"{method}_checkpoints", longest=LONGEST)
    (figure,) = figures.kernel_figures(kernels, of="a model", name="x")
    assert figure.name == f"kernels-x-{hook}"
    panels = figure.figure.axes
    assert len(panels) == 2
    distances = np.arange(LONGEST, dtype=np.float64)
    expected = formula(distances)
    for axes in panels:
        drawn = {line.get_label(): line for line in axes.lines}
        assert sorted(drawn) == [f"head {head}" for head in range(4)]
        for head in range(4):
            x, y = drawn[f"head {head}"].get_data()
            np.testing.assert_array_equal(x, distances)
            np.testing.assert_allclose(y, expected[head], rtol=2e-5, atol=1e-6)
    labels = [line.get_label() for line in panels[0].lines]
    assert labels == [f"head {head}" for head in expected.mean(axis=1).argsort(kind="stable")], "fastest first"
    assert len({line.get_color() for line in panels[0].lines}) == 4
    assert figure.png()[:4] == b"\x89PNG"
    assert figure.pdf()[:5] == b"%PDF-"


@pytest.mark.parametrize("method", ["kerple_log", "kerple_power_ap_", "alibi"])
def test_effective_lengths(method):
    limit = 300
    formula = FORMULAS[method][1]
    (kernel,) = kernels_of(RELEASE / f"{method}_checkpoints", longest=10, limit=limit)
    below = formula(np.arange(limit, dtype=np.float64)) < -2
    expected = [int(row.argmax()) if row.any() else limit for row in below]
    assert kernel.effective_lengths.tolist() == expected
    figure = figures.effective_length_figure({"A": expected, "B": [5, limit, limit, 5]}, of="x", name="x", limit=limit)
    (axes,) = figure.figure.axes
    for label, found in (("A", expected), ("B", [5, limit, limit, 5])):
        (line,) = (one for one in axes.lines if one.get_label() == label)
        assert line.get_drawstyle() == "steps-post"
        x, y = line.get_data()
        for distance in (0, 4, 5, 6, 60, limit):
            counted = sum(one <= distance and one < limit for one in found)
            assert y[np.searchsorted(x, distance, side="right") - 1] == counted, (label, distance)


def test_methods_without_a_kernel_have_none():
    assert kernels_of(RELEASE / "rotary_checkpoints") == []
    assert kernels_of(RELEASE / "sinusoidal_checkpoints") == []


def test_kernels_per_layer_have_a_panel_each(tmp_path):
    write_checkpoint(tmp_path, "kerple_log", write_corpus(tmp_path))
    (kernel,) = kernels_of(tmp_path, longest=50)
    (figure,) = figures.kernel_figures([kernel] * 3, of="x", name="x")
    shown = [axes for axes in figure.figure.axes if axes.get_visible()]
    assert len(shown) == 3
    assert all(len(axes.lines) == 4 for axes in shown)


def positions(mode: str, seed: int, losses: list[float], **keys: object) -> dict:
    fields = {"kind": "positions", "edges": [0, 10, 20, 40], "losses": losses, "mode": mode}
    return {**record("kerple_log", 40, None, seed), **fields, **keys}


def test_perplexity_by_position():
    records = [positions("full", 1, [3.0, 2.0, 1.0]), positions("full", 2, [3.2, 2.2, 1.2])]
    records += [positions("window@10", 1, [3.0, 2.1, None]), positions("blockwise", 1, [3.0, 2.2, 1.5])]
    (figure,) = figures.position_figures(records)
    (axes,) = figure.figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    x, y = lines["KERPLE (log)"].get_data()
    assert list(x) == [5.0, 15.0, 30.0]
    np.testing.assert_allclose(y, [(math.exp(a) + math.exp(a + 0.2)) / 2 for a in (3.0, 2.0, 1.0)])
    x, y = lines["KERPLE (log), window@10"].get_data()
    np.testing.assert_allclose(y, [math.exp(3.0), math.exp(2.1), math.nan])
    assert lines["KERPLE (log)"].get_color() == lines["KERPLE (log), window@10"].get_color()
    assert lines["KERPLE (log)"].get_linestyle() != lines["KERPLE (log), window@10"].get_linestyle()
    assert len({str(drawing.mode_style(mode)) for mode in range(3)}) == 3


def test_each_protocol_has_a_figure_of_its_own():
    records = [positions("full", 1, [3.0, 2.0, 1.0], protocol=name) for name in ("non-overlapping", "last-k@16")]
    assert [figure.name for figure in figures.position_figures(records)] == [
        "positions-github-12x768-512-non-overlapping-40",
        "positions-github-12x768-512-last-k-16-40",
    ]


def test_seeds_counted_in_different_bins_are_refused():
    with pytest.raises(UserError, match="different bins"):
        figures.position_figures(
            [positions("full", 1, [3.0, 2.0, 1.0]), positions("full", 2, [3.0, 2.0], edges=[0, 20, 40])]
        )
