"""Llama, Mistral, Qwen2 and Qwen3: imported and exported models have the logits of transformers'
own.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron.checkpoint.storage import CheckpointError
from megatron.convert import from_hugging_face, to_hugging_face
from megatron.inference import load_model
from tests.support.checkpoints import TRAIN_LENGTH
from tests.support.conversion import LONG, make_model, quiet, random_tokens
from tests.support.families import FAMILIES, family_model


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
@pytest.mark.quick(6)
def test_import_and_export(name, tmp_path):
    theirs = family_model(tmp_path / "hf", name)
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    ours, config = load_model(tmp_path / "ours")
    for length in (TRAIN_LENGTH, LONG):
        tokens = random_tokens(2, length)
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4

    to_hugging_face(ours, config, tmp_path / "back", report=quiet)
    first, second = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[tensor], second[tensor]) for tensor in first)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    # Without a window, Mistral's structure is Llama's.
    family = "Llama" if name == "mistral without window" else FAMILIES[name][0]
    assert type(back).__name__ == f"{family}ForCausalLM"
    assert torch.equal(back(tokens).logits, theirs(tokens).logits)
    assert back.config.rope_parameters == theirs.config.rope_parameters


@torch.no_grad()
def test_files_of_transformers_4(tmp_path):
    """rope_theta and rope_scaling at the top level, defaults left out, and keys without effect."""
    theirs = family_model(tmp_path / "hf", "llama 3.1")
    path = tmp_path / "hf" / "config.json"
    keys = json.loads(path.read_text())
    scaling = keys.pop("rope_parameters")
    keys["rope_theta"] = scaling.pop("rope_theta")
    for name in ("head_dim", "attention_bias", "mlp_bias", "layer_types"):
        keys.pop(name, None)
    # Llama ignores the last two.
    other = {"rope_scaling": scaling, "some_metadata": [1], "sliding_window": 5}
    path.write_text(json.dumps({**keys, **other}))
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    tokens = random_tokens(1, LONG)
    assert (load_model(tmp_path / "ours")[0](tokens) - theirs(tokens).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama 3.1", {"original_max_position_embeddings": TRAIN_LENGTH // 4}),
        ("qwen2 with yarn", {"original_max_position_embeddings": TRAIN_LENGTH * 10}),
        ("mistral", {"layer_types": ["full_attention"] * 2}),
        ("mistral", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ],
)
@torch.no_grad()
def test_keys_that_transformers_prefers(family, keys, tmp_path):
    """To those in rope_parameters, or to the model_type."""
    without = family_model(tmp_path / "hf", family)
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = random_tokens(1, LONG)
    assert (without(tokens).logits - theirs(tokens).logits).abs().max() > 0.01
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    assert (load_model(tmp_path / "ours")[0](tokens) - theirs(tokens).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {
            "num_kv_heads": 2,
            "head_size": 12,
            "use_bias_in_attn_linear": False,
            "sliding_window_width": 5,
        },
        {"use_bias_in_attn_output": False, "no_weight_tying": False},
        {"use_qk_layernorm": True, "use_bias_in_mlp": False, "num_kv_heads": 1},
        {
            "pos_emb_options": {"scaling": "llama3", "factor": 8.0, "trained_length": 16},
            "rotary_emb_base": 300,
        },
    ],
    ids=["llama", "mistral", "qwen2", "qwen3", "scaled"],
)
@torch.no_grad()
@pytest.mark.quick(2)
def test_models_trained_here_are_exported(keys, tmp_path):
    biases = (
        {} if set(keys) <= {"pos_emb_options", "rotary_emb_base"} else {"use_bias_in_mlp": False}
    )
    model, config = make_model("rotary", norm="rmsnorm", activation="swiglu", **{**biases, **keys})
    to_hugging_face(model, config, tmp_path / "hf", report=quiet)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert (
        f"This is a {type(theirs).__name__} of transformers"
        in (tmp_path / "hf/README.md").read_text()
    )
    tokens = random_tokens(1, LONG)
    assert (theirs(tokens).logits - model(tokens)).abs().max() < 1e-4
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    assert torch.equal(load_model(tmp_path / "ours")[0](tokens), model(tokens))


def test_tensors_that_do_not_fit_are_named(tmp_path):
    family_model(tmp_path / "hf", "llama")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    for changed, message in (
        (
            {**tensors, "model.layers.0.mlp.experts.0.w1.weight": torch.ones(1)},
            r"contains model.layers.0.mlp.experts",
        ),
        (
            {**tensors, name: torch.ones(3, 32)},
            r"k_proj.weight has shape \(3, 32\).*config.json.* \(32, 32\)",
        ),
        ({other: tensor for other, tensor in tensors.items() if other != name}, rf"lacks {name}$"),
        (
            {**tensors, name: tensors[name] / 0},
            r"k_proj.weight contains values that are not finite",
        ),
    ):
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            from_hugging_face(
                tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet
            )
