"""Registered names and their methods' hooks, and plugins."""

import pytest
import torch

from kerple import positional
from kerple.positional import ModelShape, PositionalMethod, build, load_plugin, register, registered_names
from kerple.positional import registry as registry_module

SHAPE = ModelShape(num_heads=4, head_size=8, hidden_size=32, num_layers=2, max_positions=16)

METHODS = {
    # pos-emb: class, hooks
    "none": ("NoPositions", set()),
    "learned": ("Learned", {"embed"}),
    "sinusoidal": ("Sinusoidal", {"embed"}),
    "rotary": ("Rotary", {"rotate"}),
    "p_rope": ("PRope", {"rotate"}),
    "forgetting": ("Forgetting", {"decay"}),
    "fox": ("Forgetting", {"decay"}),
    "cable": ("Cable", {"decay"}),
    "rpe": ("T5", {"bias"}),
    "alibi": ("Alibi", {"bias"}),
    "kerple_log": ("KerpleLog", {"bias"}),
    "kerple_log_rotary": ("KerpleLogRotary", {"rotate", "bias"}),
    "kerple_power_ap_": ("KerplePower", {"bias"}),
    "kerple_power": ("KerplePower", {"bias"}),
    "kerple_power__ap": ("KerpleWeight", {"weight"}),
    "kerple_power_ap_ap": ("KerpleBiasWeight", {"bias", "weight"}),
    "kerple_bias_wht": ("KerpleBiasWeight", {"bias", "weight"}),
    "kerple_power_original": ("KerplePowerOriginal", {"bias"}),
    "kerple": ("KerpleSum", {"bias"}),
    "kerple_log3": ("KerpleLog3", {"bias"}),
    "kerple_3_para_log": ("KerpleLog3", {"bias"}),
    "kerple_gaussian": ("KerpleGaussian", {"bias"}),
    "kerple_2_para_bias": ("KerpleGaussian", {"bias"}),
    "kerple_gaussian3": ("KerpleGaussian3", {"bias"}),
    "kerple_3_para_bias": ("KerpleGaussian3", {"bias"}),
    "kerple_square__a": ("KerpleSquareWeight", {"weight"}),
    "kerple_1_para_wht": ("KerpleSquareWeight", {"weight"}),
    "kerple_2_para_wht": ("KerpleWeight", {"weight"}),
    "sandwich": ("Sandwich", {"bias"}),
    "xpos": ("XPos", {"rotate", "scale_qk"}),
    "fire": ("Fire", {"modify_scores"}),
    "cope": ("Cope", {"modify_scores"}),
    "transformer_xl": ("TransformerXL", {"rotate", "modify_scores"}),
    "dape": ("Dape", {"modify_scores"}),
    "dape_kerple": ("DapeKerple", {"modify_scores"}),
    "kerple_c": ("DapeKerple", {"modify_scores"}),
    "dape_alibi": ("DapeAlibi", {"modify_scores"}),
    "alibi_c": ("DapeAlibi", {"modify_scores"}),
    "dape_fire": ("DapeFire", {"modify_scores"}),
    "fire_c": ("DapeFire", {"modify_scores"}),
    "dape_v2": ("DapeV2", {"modify_scores"}),
    "dape_v2_kerple": ("DapeV2Kerple", {"modify_scores"}),
    "dape_v2_alibi": ("DapeV2Alibi", {"modify_scores"}),
    "dape_v2_fire": ("DapeV2Fire", {"modify_scores"}),
    "nope_c": ("Dape", {"modify_scores"}),
    "dape_rotary": ("DapeRotary", {"rotate", "modify_scores"}),
    "rope_dapev1": ("DapeRotary", {"rotate", "modify_scores"}),
    "dape_v2_rotary": ("DapeV2Rotary", {"rotate", "modify_scores"}),
    "rope_dapev2": ("DapeV2Rotary", {"rotate", "modify_scores"}),
    "kerple_dapev2": ("DapeV2Kerple", {"modify_scores"}),
    "alibi_dapev2": ("DapeV2Alibi", {"modify_scores"}),
    "fire_dapev2": ("DapeV2Fire", {"modify_scores"}),
}


@pytest.fixture
def restored_registry(monkeypatch):
    monkeypatch.setattr(registry_module, "_METHODS", dict(registry_module._METHODS))


@pytest.mark.parametrize("name", METHODS)
def test_every_name_builds_its_method_with_its_hooks(name):
    cls, hooks = METHODS[name]
    method = build(name, SHAPE)
    assert type(method) is getattr(positional, cls)
    assert method.hooks == hooks
    assert method.shared == (not hooks & {"modify_scores", "decay"})
    assert all(value.shape == (4,) and not value.requires_grad for value in method.statistics().values())


def test_registered_names():
    assert set(METHODS) <= set(registered_names())


def test_an_unknown_name_is_rejected_with_similar_ones():
    with pytest.raises(ValueError, match=r"pos-emb 'kerple_lgo'.*kerple_log"):
        build("kerple_lgo", SHAPE)


@pytest.mark.usefixtures("restored_registry")
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
    path.write_text(PLUGIN.replace("toy_step", "toy_broken") + "\nraise RuntimeError('half way')\n")
    with pytest.raises(RuntimeError, match="half way"):
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
    ],
)
def test_invalid_plugins_are_rejected(tmp_path, monkeypatch, name, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        load_plugin(name)
