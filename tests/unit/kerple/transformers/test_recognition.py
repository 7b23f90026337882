"""Warnings of methods that were trained with other weights."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from kerple.transformers import load_positional, save_positional, use_positional
from kerple.transformers.mask import MODULE
from kerple.transformers.recognition import differ, recognized
from tests.support.model_families import family_model


def test_another_base_model(tmp_path, recwarn):
    """Of the same shape, and with the same first tokens, which may be padding: one warning, which
    names the folder and the model that was saved.
    """
    model, other = family_model("llama"), family_model("llama")
    with torch.no_grad():
        other.model.embed_tokens.weight[2:] = torch.randn(97, 32) / 5
    model.save_pretrained(tmp_path / "base")
    adapted = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    use_positional(adapted, "kerple_power")
    save_positional(adapted, tmp_path / "adapter")
    adapted.save_pretrained(tmp_path / "whole")
    assert not recwarn.list
    with pytest.warns(UserWarning, match="adapter: .*base"):
        load_positional(other, tmp_path / "adapter")
    with pytest.warns(UserWarning, match="whole: "):
        load_positional(other, tmp_path / "whole")


def test_the_base_model_in_another_form(tmp_path, recwarn):
    """In bfloat16, with more tokens, as a part, with another head, or trained and saved too."""
    model = family_model("llama")
    use_positional(model, "alibi")
    save_positional(model, tmp_path / "adapter")
    plain = family_model("llama")
    plain.save_pretrained(tmp_path / "base")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    longer = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    longer.resize_token_embeddings(200)
    recwarn.clear()
    for each in (plain.bfloat16(), family_model("llama").model, classifier, longer):
        load_positional(each, tmp_path / "adapter")

    # All weights were trained, and the model was saved before or after the method.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    save_positional(model, tmp_path / "trained")
    model.save_pretrained(tmp_path / "model")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    load_positional(trained, tmp_path / "trained")
    load_positional(trained, tmp_path / "model")
    assert not [each for each in recwarn if str(tmp_path) in str(each.message)]


@pytest.mark.parametrize("part", ["mlp", "v_proj", "norm"])
def test_a_base_model_of_which_a_part_was_trained(tmp_path, part):
    model = family_model("llama")
    use_positional(model, "kerple_log")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.mul_(1.1)
    save_positional(model, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "whole")
    for folder in ("adapter", "whole"):
        with pytest.warns(UserWarning, match=f"{folder}: "):
            load_positional(family_model("llama"), tmp_path / folder)


def test_a_base_model_of_another_class(tmp_path, recwarn):
    """The body of a saved language model, and a language model with a saved body."""
    model = family_model("llama")
    use_positional(model, "kerple_log")
    other = family_model("llama")
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(2)
    model.save_pretrained(tmp_path / "whole")
    with pytest.warns(UserWarning, match="whole: "):
        load_positional(other.model, tmp_path / "whole")
    body = family_model("llama").model
    use_positional(body, "kerple_log")
    body.save_pretrained(tmp_path / "body")
    with pytest.warns(UserWarning, match="body: "):
        load_positional(other, tmp_path / "body")
    # The same weights in the other form.
    recwarn.clear()
    load_positional(family_model("llama"), tmp_path / "body")
    load_positional(family_model("llama").model, tmp_path / "whole")
    assert not [each for each in recwarn if str(tmp_path) in str(each.message)]


def test_weights_of_layers_that_peft_has_wrapped():
    model = family_model("llama")
    expected = set(recognized(model, MODULE))
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert expected <= set(recognized(model, MODULE))


def test_values_that_differ():
    """In either direction, by a part of the largest value, whose sign does not matter."""
    pairs = [([1.0, -2.0], [1.0, -1.5], True), ([-2.0, 0.01], [-2.0, 0.02], False)]
    for first, second, expected in pairs:
        assert differ({"a": first}, {"a": second}) == expected
        assert differ({"a": second}, {"a": first}) == expected
    assert not differ({"a": [1.0]}, {"b": [2.0]})


def test_a_base_model_without_matrices(tmp_path, recwarn):
    """As quantized ones, whose layers have other parameters."""
    model, other = family_model("llama"), family_model("llama")
    use_positional(model, "kerple_log")
    save_positional(model, tmp_path)
    torch.ao.quantization.quantize_dynamic(other, {torch.nn.Linear}, inplace=True)
    recwarn.clear()
    load_positional(other, tmp_path)
    assert not [each for each in recwarn if str(tmp_path) in str(each.message)]
