"""Adding a method to a model of transformers, saving and loading it."""

import copy
import gc
import pickle
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from kerple.positional import KerpleLog, load_plugin, registry
from kerple.transformers import load_positional, save_positional, use_positional
from kerple.transformers.mask import CALLS
from tests.support.model_families import (
    FAMILIES,
    each_of,
    family_inputs,
    family_model,
    method_of,
    outputs,
)


@each_of(FAMILIES)
@torch.no_grad()
def test_without_a_method_the_model_is_unchanged(name):
    model = family_model(name)
    inputs = [family_inputs(model, padding) for padding in ("none", "left", "right", "inner")]
    expected = [outputs(model, each) for each in inputs]
    names = [key for key, _ in model.named_parameters()]
    use_positional(model, "none")
    for each, value in zip(inputs, expected, strict=True):
        difference = (outputs(model, each) - value).abs().max() / value.std()
        assert difference < 1e-5
    use_positional(model, "kerple_log")
    assert (outputs(model, inputs[0]) - expected[0]).abs().max() / expected[0].std() > 0.05
    use_positional(model, None)
    assert [key for key, _ in model.named_parameters()] == names
    assert torch.equal(outputs(model, inputs[0]), expected[0])


def test_saved_methods_are_loaded(tmp_path):
    model = family_model("llama")
    plain = copy.deepcopy(model)
    use_positional(model, "kerple_log", layers=[1], own_positions="remove")
    with torch.no_grad():
        method_of(model).bias_p.mul_(3)
    save_positional(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "positional.json",
        "positional.safetensors",
    ]
    assert load_positional(plain, tmp_path) is plain
    inputs = family_inputs(model)
    assert torch.equal(outputs(plain, inputs), outputs(model, inputs))
    with pytest.raises(ValueError, match="num_heads"):
        load_positional(family_model("llama", num_attention_heads=2), tmp_path)


def test_a_saved_model_is_loaded_with_its_method(tmp_path):
    model = family_model("llama")
    use_positional(model, "kerple_log", own_positions="remove")
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    # What transformers prints.
    assert "kerple_positional.load_positional" in info["unexpected_keys"]
    assert "load_positional" in loaded.config.kerple_positional["load"]
    load_positional(loaded, tmp_path)
    inputs = family_inputs(model)
    assert torch.equal(outputs(loaded, inputs), outputs(model, inputs))
    family_model("llama").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="without a method"):
        load_positional(loaded, tmp_path / "other")
    model.save_pretrained(tmp_path / "variant", variant="fp32")
    with pytest.raises(ValueError, match="variant"):
        load_positional(loaded, tmp_path / "variant")


def test_a_method_without_parameters_is_never_lost_silently(tmp_path):
    model = family_model("llama")
    use_positional(model, "alibi", own_positions="remove")
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == {"kerple_positional.load_positional"}
    inputs = family_inputs(model)
    load_positional(loaded.eval(), tmp_path)
    assert torch.equal(outputs(loaded, inputs), outputs(model, inputs))


def test_parts_of_a_saved_model_get_their_methods(tmp_path):
    """An encoder and a decoder with their own, and the body of a language model."""
    model, body = family_model("t5"), family_model("llama")
    use_positional(model.get_encoder(), "kerple_log")
    use_positional(model.get_decoder(), "alibi", layers=[1])
    use_positional(body.model, "kerple_power")
    with torch.no_grad():
        model.encoder.kerple_positional.methods[0].positional.bias_p.mul_(3)
    for name, each in (("t5", model), ("llama", body)):
        each.save_pretrained(tmp_path / name)
        loaded = type(each).from_pretrained(tmp_path / name).eval()
        load_positional(loaded, tmp_path / name)
        inputs = family_inputs(each)
        assert torch.equal(outputs(loaded, inputs), outputs(each, inputs))

    # The body alone, and a model without the part.
    alone = AutoModel.from_pretrained(tmp_path / "llama").eval()
    load_positional(alone, tmp_path / "llama")
    tokens = family_inputs(body)["input_ids"]
    assert torch.equal(alone(tokens)[0], body.model(tokens)[0])
    with pytest.raises(ValueError, match=r"'(de|en)coder'"):
        load_positional(family_model("t5").get_encoder(), tmp_path / "t5")


def test_the_length_of_training_is_that_of_the_model():
    model = family_model("llama")
    use_positional(model, "rotary", own_positions="remove", scaling="dynamic", factor=2.0)
    assert method_of(model).dynamic == (2.0, model.config.max_position_embeddings)


def test_a_part_of_a_part_gets_its_method(tmp_path):
    model = family_model("bart")
    use_positional(model.model.encoder, "alibi")
    model.save_pretrained(tmp_path)
    loaded = load_positional(type(model).from_pretrained(tmp_path), tmp_path)
    assert hasattr(loaded.model.encoder, "kerple_positional")
    assert not hasattr(loaded.model, "kerple_positional")


def test_a_part_that_is_saved_alone(tmp_path):
    model = family_model("llama")
    use_positional(model, "alibi", own_positions="remove")
    model.model.save_pretrained(tmp_path)
    body, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == {"kerple_positional.load_positional"}
    load_positional(body.eval(), tmp_path)
    tokens = family_inputs(model)["input_ids"]
    assert torch.equal(body(tokens)[0], model.model(tokens)[0])
    assert not [name for name in model.state_dict() if "model.kerple_positional" in name]
    use_positional(model, None)
    assert not [name for name in model.model.state_dict() if "kerple_positional" in name]


def test_weights_of_another_method(tmp_path):
    """Of the same shape: as a Trainer that continues loads them."""
    model = family_model("llama")
    use_positional(model, "kerple_log")
    state = model.state_dict()
    use_positional(model, "kerple_log", own_positions="remove")
    with pytest.raises(ValueError, match="own_positions"):
        model.load_state_dict(state, strict=False)


def test_layers_of_peft_in_a_method(tmp_path):
    model = family_model("llama")
    use_positional(model, "transformer_xl")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(ValueError, match="merge_and_unload"):
        save_positional(adapted, tmp_path)
    save_positional(adapted.merge_and_unload(), tmp_path)
    load_positional(family_model("llama"), tmp_path)


def test_a_part_that_is_saved_after_peft_has_trained_a_copy(tmp_path):
    model = family_model("llama")
    use_positional(model, "kerple_log")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["kerple_positional"])
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in model.kerple_positional.itself.parameters():
            parameter.mul_(3)
    for each in (model, adapted.merge_and_unload()):
        expected = list(each.kerple_positional.itself.parameters())
        state = each.model.state_dict()
        found = [state[name] for name in sorted(state) if "kerple_positional.methods" in name]
        assert len(found) == len(expected) == 2
        assert all(any(torch.equal(one, other) for other in expected) for one in found)


def test_layers_that_are_copied_after_the_method_was_added():
    """Their method would be that of a copy of the model."""
    config = peft.LoraConfig(target_modules=["q_proj"], layer_replication=[[0, 2], [1, 2]])
    replicated, extended = family_model("llama"), family_model("llama")
    for each in (replicated, extended):
        use_positional(each, "kerple_log")
    replicated = peft.get_peft_model(replicated, config)
    extended.model.layers.append(copy.deepcopy(extended.model.layers[1]))
    extended.config.num_hidden_layers = 3
    for each in (replicated, extended):
        with pytest.raises(ValueError, match="copied"):
            each(**family_inputs(each))
        # The failed call is over.
        assert CALLS.last.owner is None


def test_what_was_there_before_comes_back():
    """The implementations of the parts, but not a description of a method that is not loaded."""
    model = family_model("t5")
    model.encoder.set_attn_implementation("eager")
    model.config.kerple_positional = {"method": "alibi"}
    before = [part.config._attn_implementation for part in (model.encoder, model.decoder)]
    assert len(set(before)) == 2
    for method in ("alibi", None):
        use_positional(model, method)
    parts = (model.encoder, model.decoder)
    assert [part.config._attn_implementation for part in parts] == before
    model.config.kerple_positional = {"method": "alibi"}
    use_positional(model, None)
    assert not hasattr(model.config, "kerple_positional")


def test_layers_that_are_named_twice():
    model = family_model("llama")
    use_positional(model, "alibi", layers=[1, 0, 1])
    assert model.config.kerple_positional["layers"] == [0, 1]


def test_an_alias_of_a_method():
    model = family_model("llama")
    use_positional(model, "dape_alibi")
    state = model.state_dict()
    use_positional(model, "alibi_c")
    model.load_state_dict(state)


def test_code_of_a_method_that_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    file = tmp_path / "own.py"
    code = Path("experiments/bytes/steep.py").read_text()
    file.write_text(code)
    load_plugin(str(file))
    model = family_model("llama")
    use_positional(model, "kerple_log_steep")
    save_positional(model, tmp_path / "adapter")
    load_positional(family_model("llama"), tmp_path / "adapter")
    file.write_text(code + "# changed\n")
    with pytest.warns(UserWarning, match="KerpleLogSteep"):
        load_positional(family_model("llama"), tmp_path / "adapter")
    state = model.state_dict()
    use_positional(model, "kerple_log_steep")
    with pytest.warns(UserWarning, match="KerpleLogSteep"):
        model.load_state_dict(state)


def test_a_configuration_of_a_model_with_a_method(tmp_path):
    """It names an implementation that has no method."""
    model = family_model("llama")
    use_positional(model, "alibi")
    other = type(model)(copy.deepcopy(model.config)).eval()
    with pytest.raises(ValueError, match="has no method"):
        other(torch.randint(3, 99, (1, 5)))


def test_a_part_of_a_model(tmp_path):
    model = family_model("llama")
    expected = outputs(model, family_inputs(model))
    use_positional(model.model, "kerple_log")
    assert not torch.equal(outputs(model, family_inputs(model)), expected)
    use_positional(model, None)
    assert torch.equal(outputs(model, family_inputs(model)), expected)
    assert not hasattr(model.model, "kerple_positional")


def test_models_that_share_a_configuration():
    """One after the other, but not at the same time."""
    model = family_model("llama")
    other, third = type(model)(model.config), type(model)(model.config)
    use_positional(model, "kerple_log")
    with pytest.raises(ValueError, match="configuration"):
        use_positional(other, "kerple_log")
    use_positional(model, None)
    use_positional(other, "kerple_log")
    del other
    gc.collect()
    use_positional(third, "kerple_log")


def test_a_model_that_peft_has_wrapped():
    model = peft.get_peft_model(family_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match="modules_to_save"):
        use_positional(model, "alibi")


def test_parts_with_methods_of_their_own(tmp_path):
    model = family_model("t5")
    use_positional(model.get_encoder(), "kerple_log")
    use_positional(model.get_decoder(), "alibi")
    with pytest.raises(ValueError, match="several parts"):
        save_positional(model, tmp_path)
    save_positional(model.get_decoder(), tmp_path)
    with pytest.raises(ValueError, match="num_layers"):
        load_positional(family_model("t5"), tmp_path)
    decoder = family_model("t5").get_decoder()
    assert load_positional(decoder, tmp_path) is decoder


def test_a_part_that_does_not_fit(tmp_path):
    """The parts before it have no method either."""
    model = family_model("t5")
    for part in (model.get_encoder(), model.get_decoder()):
        use_positional(part, "alibi")
    model.save_pretrained(tmp_path)
    other = family_model("t5", num_hidden_layers=1, num_decoder_layers=2)
    with pytest.warns(match="weights"), pytest.raises(ValueError, match="num_layers"):
        load_positional(other, tmp_path)
    assert not [name for name, _ in other.named_modules() if "kerple_positional" in name]


def test_weights_that_do_not_fit(tmp_path):
    model = family_model("llama")
    use_positional(model, "kerple_log")
    save_positional(model, tmp_path)
    deeper = family_model("llama", num_hidden_layers=3)
    with pytest.raises(ValueError, match="num_layers"):
        load_positional(deeper, tmp_path)
    # The method of another model, whose description was not written.
    description = (tmp_path / "positional.json").read_bytes()
    use_positional(model, "alibi")
    save_positional(model, tmp_path)
    (tmp_path / "positional.json").write_bytes(description)
    with pytest.raises(ValueError, match=r"positional\.safetensors"):
        load_positional(model, tmp_path)


def test_copies_and_pickles():
    model = family_model("llama")
    use_positional(model, "kerple_log", own_positions="remove")
    inputs = family_inputs(model)
    expected = outputs(model, inputs)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs(same, inputs), expected)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_autocast(name):
    model = family_model(name)
    use_positional(model, "kerple_log")
    inputs = family_inputs(model)
    expected = outputs(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = outputs(model, inputs)
    assert (found - expected).abs().max() / expected.std() < 0.1


def test_a_method_given_as_an_object(tmp_path):
    model = family_model("llama")
    use_positional(model, KerpleLog(num_heads=4))
    with pytest.raises(ValueError, match="object"):
        save_positional(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"whole.*KerpleLog.*object"):
        load_positional(
            AutoModelForCausalLM.from_pretrained(tmp_path / "whole"), tmp_path / "whole"
        )


@pytest.mark.parametrize("training", [True, False])
def test_the_method_trains_as_the_model_does(training):
    model = family_model("llama").train(training)
    use_positional(model, "kerple_log")
    assert {module.training for module in model.kerple_positional.modules()} == {training}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("kerple_lgo",), {}, "kerple_lgo"),
        (("kerple_log",), {"own_positions": "drop"}, "own_positions"),
        (("kerple_log",), {"layers": [2]}, r"layers \[2\]"),
        (("kerple_log",), {"layers": "0"}, "layers must be"),
        ((KerpleLog,), {}, "method must be"),
        ((KerpleLog(num_heads=8),), {}, "has 8 heads.* 4"),
        (("forgetting",), {}, "hidden states"),
        (("learned",), {}, "embed"),
        (("kerple_log",), {"random_range": 300}, "random_range"),
        (("per_layer",), {"methods": ["none", {"rotary": {"random_range": 300}}]}, "random_range"),
    ],
)
def test_what_cannot_be_used(arguments, options, message):
    model = family_model("llama")
    expected = outputs(model, family_inputs(model))
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        use_positional(model, *arguments, **options)
    assert torch.equal(outputs(model, family_inputs(model)), expected)
    assert not hasattr(model, "kerple_positional")
