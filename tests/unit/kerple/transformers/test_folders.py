"""Damaged, edited and ambiguous folders of methods."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from kerple.transformers import load_positional, save_positional, use_positional
from tests.support.model_families import family_inputs, family_model, method_of, outputs


def test_an_edited_description(tmp_path):
    model = family_model("llama")
    use_positional(model, "rpe", num_buckets=8)
    save_positional(model, tmp_path)
    description = json.loads((tmp_path / "positional.json").read_text())
    for changed in (
        {**description, "layer": [0]},
        {**description, "options": {"num_bucket": 8}},
        {**description, "method": "kerple_log", "options": {}},
        {**description, "own_positions": "remove"},
    ):
        (tmp_path / "positional.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"layer|damaged"):
            load_positional(model, tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"method": "kerple_log"}'])
def test_a_damaged_description(content, tmp_path):
    model = family_model("llama")
    use_positional(model, "kerple_log")
    save_positional(model, tmp_path)
    (tmp_path / "positional.json").write_text(content)
    with pytest.raises(ValueError, match=r"positional\.json"):
        load_positional(model, tmp_path)


@pytest.mark.parametrize("cut", [0, 40, -5])
def test_damaged_weights(cut, tmp_path):
    model = family_model("llama")
    use_positional(model, "kerple_log")
    save_positional(model, tmp_path)
    file = tmp_path / "positional.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"positional\.safetensors"):
        load_positional(model, tmp_path)


def test_two_methods_in_a_folder(tmp_path):
    model = family_model("llama")
    use_positional(model, "kerple_log")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    use_positional(loaded, None)
    assert not hasattr(loaded.config, "kerple_positional")
    save_positional(model, tmp_path)
    with pytest.raises(ValueError, match=r"positional\.json"):
        load_positional(loaded, tmp_path)


def test_a_model_that_was_saved_twice(tmp_path):
    """First in shards, and then in one file, and the reverse."""
    model = family_model("llama")
    use_positional(model, "kerple_log")
    inputs = family_inputs(model)
    for size in ("20KB", "5GB", "20KB"):
        with torch.no_grad():
            method_of(model).bias_p.mul_(1.5)
        model.save_pretrained(tmp_path, max_shard_size=size)
        loaded = load_positional(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path)
        if not (tmp_path / "model.safetensors").exists() or size == "5GB":
            assert torch.equal(outputs(loaded, inputs), outputs(model, inputs))
