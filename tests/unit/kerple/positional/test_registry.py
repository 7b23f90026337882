"""Registered names and their methods' hooks, and plugins."""

import pytest
import torch

from kerple.positional import (
    ModelShape,
    PluginError,
    PositionalMethod,
    build,
    load_plugin,
    primary_names,
    register,
    registered_names,
)
from kerple.positional import registry as registry_module
from kerple.positional.registry import source_digests

SHAPE = ModelShape(num_heads=4, head_size=8, hidden_size=32, num_layers=2, max_positions=16)

# The names in the authors' configurations -> ours.
ALIASES = {
    "kerple_power": "kerple_power_ap_",
    "kerple_bias_wht": "kerple_power_ap_ap",
    "kerple_3_para_log": "kerple_log3",
    "kerple_2_para_bias": "kerple_gaussian",
    "kerple_3_para_bias": "kerple_gaussian3",
    "kerple_1_para_wht": "kerple_square__a",
    "kerple_2_para_wht": "kerple_power__ap",
    "fox": "forgetting",
    "xl_bias": "transformer_xl",
    **{"nope_c": "dape", "kerple_c": "dape_kerple", "alibi_c": "dape_alibi", "fire_c": "dape_fire"},
    **{
        "kerple_dapev2": "dape_v2_kerple",
        "alibi_dapev2": "dape_v2_alibi",
        "fire_dapev2": "dape_v2_fire",
    },
    **{"rope_dapev1": "dape_rotary", "rope_dapev2": "dape_v2_rotary"},
}


@pytest.fixture
def restored_registry(monkeypatch):
    monkeypatch.setattr(registry_module, "_METHODS", dict(registry_module._METHODS))


def test_names():
    assert set(ALIASES) == set(registered_names()) - set(primary_names())
    for alias, name in ALIASES.items():
        assert type(build(alias, SHAPE)) is type(build(name, SHAPE))


@pytest.mark.parametrize("name", primary_names())
def test_every_method_has_statistics_per_head(name):
    method = build(name, SHAPE)
    assert all(
        value.shape == (4,) and not value.requires_grad for value in method.statistics().values()
    )


@pytest.mark.usefixtures("restored_registry")
@pytest.mark.parametrize("name", primary_names())
def test_the_generator_determines_all_parameters_in_any_dtype(name):
    exact, rounded = build(name, SHAPE), build(name, SHAPE).bfloat16()
    for method in (exact, rounded):
        method.reset_parameters(torch.Generator().manual_seed(3))
    for parameter, other in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(parameter.bfloat16(), other)


@pytest.mark.parametrize("name", primary_names())
def test_options_of_evaluation_are_options_of_the_method(name):
    method = registry_module.method_class(name)
    assert set(method.evaluation_options) <= set(method.default_options())


def test_a_name_cannot_be_registered_twice():
    with pytest.raises(ValueError, match=r"pos-emb 'alibi'.*kerple\.positional\.alibi\.Alibi"):

        @register("duplicate", "alibi")
        class Duplicate(PositionalMethod):
            pass

    assert "duplicate" not in registered_names()


PLUGIN = """
import torch
from kerple.positional import PositionalMethod, register

@register("toy_step")
class ToyStep(PositionalMethod):
    def __init__(self, num_heads: int, step: float = 1.0):
        super().__init__()
        self.num_heads, self.step = num_heads, step

    def bias(self, distance):
        return -self.step * (distance > 8).float().expand(self.num_heads, *distance.shape)
"""


@pytest.mark.usefixtures("restored_registry")
def test_digests_of_code(tmp_path):
    path = tmp_path / "toy_digest.py"
    path.write_text(PLUGIN)
    load_plugin(path)
    method = build("toy_step", SHAPE, step=3.0)
    before = source_digests([method])
    assert len(before) == 1
    path.write_text(f"{PLUGIN}# changed\n")
    assert source_digests([method]) != before
    assert source_digests([build("alibi", SHAPE)]) == []


@pytest.mark.usefixtures("restored_registry")
def test_a_plugin_file_adds_a_method(tmp_path):
    path = tmp_path / "toy.py"
    path.write_text(PLUGIN)
    load_plugin(path)
    load_plugin(str(path))
    method = build("toy_step", SHAPE, step=3.0)
    assert method.hooks == {"bias"}
    assert method.bias(torch.tensor([8.0, 9.0])).tolist() == [[0.0, -3.0]] * 4


@pytest.mark.usefixtures("restored_registry")
def test_a_plugin_module_adds_a_method(tmp_path, monkeypatch):
    (tmp_path / "toy_methods.py").write_text(PLUGIN.replace("toy_step", "toy_module"))
    monkeypatch.syspath_prepend(tmp_path)
    load_plugin("toy_methods")
    assert build("toy_module", SHAPE).step == 1.0


@pytest.mark.usefixtures("restored_registry")
def test_a_plugin_that_raises_registers_nothing(tmp_path):
    path = tmp_path / "broken.py"
    text = PLUGIN.replace("toy_step", "toy_broken")
    path.write_text(text + "\nraise RuntimeError('half way')\n")
    with pytest.raises(
        PluginError, match=rf"broken\.py, line {len(text.splitlines()) + 2}: RuntimeError: half way"
    ):
        load_plugin(path)
    assert "toy_broken" not in registered_names()
    path.write_text(PLUGIN.replace("toy_step", "toy_broken"))
    load_plugin(path)
    assert "toy_broken" in registered_names()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.py", None, "no such file"),
        ("empty.py", "x = 1\n", "registers no new method"),
        ("no.such.module", None, "cannot be imported"),
        ("./mine", None, "cannot be imported"),
    ],
)
def test_invalid_plugins_are_rejected(tmp_path, monkeypatch, name, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{name}: {message}"):
            load_plugin(name)
