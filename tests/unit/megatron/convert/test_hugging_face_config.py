"""config.json and our configuration keys, in both directions; errors name unsupported settings."""

import pytest

from megatron.checkpoint.storage import CheckpointError
from megatron.convert.hugging_face_config import (
    config_from,
    self_contained_config,
    stock_config,
    stock_type,
)
from tests.support.conversion import make_model

NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 32,
}
LLAMA = {**NEOX, "model_type": "llama", "intermediate_size": 44}


@pytest.mark.parametrize(
    ("pos_emb", "keys", "stock"),
    [
        ("rotary", {}, "gpt_neox"),
        ("rotary", {"rotary_pct": 0.5, "rotary_emb_base": 300, "gpt_j_residual": True}, "gpt_neox"),
        ("rotary", {"use_bias_in_attn_linear": False, "intermediate_size": 96}, "gpt_neox"),
        (
            "rotary",
            {"pos_emb_options": {"scaling": "yarn", "factor": 4.0, "beta_fast": 16}},
            "gpt_neox",
        ),
        ("rotary", {"pos_emb_options": {"scaling": "dynamic", "factor": 4.0}}, "gpt_neox"),
        (
            "rotary",
            {
                "norm": "rmsnorm",
                "activation": "swiglu",
                "pos_emb_options": {"scaling": "llama3", "factor": 8.0},
            },
            "llama",
        ),
        ("rotary", {"pos_emb_options": {"scaling": "ntk", "factor": 4.0}}, None),
        ("rotary", {"norm": "rmsnorm", "activation": "silu"}, None),
        ("rotary", {"activation": "swiglu"}, None),
        ("rotary", {"norm": "rmsnorm", "activation": "swiglu", "rotary_pct": 0.5}, None),
        (
            "kerple_log",
            {"bias_gelu_fusion": True, "layernorm_epsilon": 1e-3, "no_weight_tying": False},
            None,
        ),
        ("kerple_log", {"max_position_embeddings": 64}, None),
    ],
)
def test_configurations_survive_a_round_trip(pos_emb, keys, stock):
    model, config = make_model(pos_emb, **keys)
    assert stock_type(config) == stock
    if stock is None:
        written = self_contained_config(config.model, model.settings.padded_vocab_size)
    else:
        written = stock_config(config.model, model.settings.padded_vocab_size, stock)
        scaling = written["rope_scaling"] or {"rope_type": "default"}  # transformers 4 reads it
        assert scaling.items() <= written["rope_parameters"].items()
    values = config_from(written, "config.json")
    returned = type(config).from_flat(values)
    for name in (
        *(
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "gpt_j_residual",
            "norm_epsilon",
            "activation",
        ),
        *(
            "seq_length",
            "max_position_embeddings",
            "mlp_features",
            "use_bias_in_attn_linear",
            "use_bias_in_mlp",
        ),
    ):
        assert getattr(returned.model, name) == getattr(config.model, name), name
    ours, theirs = returned.model.positional_options, config.model.positional_options
    assert {
        name: value for name, value in ours.items() if name in theirs and name != "trained_length"
    } == {name: value for name, value in theirs.items() if name != "trained_length"}


@pytest.mark.parametrize(("first", "width"), [(0, 8), (2, None), (3, None)])
def test_layers_before_the_first_window(first, width):
    """Only a window in all layers or in none is supported."""
    keys = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": first}
    values = config_from({**LLAMA, "model_type": "qwen2", **keys}, "config.json")
    assert values["sliding_window_width"] == width


def test_defaults_of_gpt_neox():
    values = config_from(NEOX, "config.json")
    assert (values["gpt_j_residual"], values["rotary_pct"], values["rotary_emb_base"]) == (
        True,
        0.25,
        10_000,
    )
    assert values["no_weight_tying"] is True
    # Keys of GPT-NeoX-20B that transformers does not read.
    others = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "torch_dtype": "float16"}
    assert config_from({**NEOX, **others}, "config.json") == values


@pytest.mark.parametrize(
    ("base", "keys", "message"),
    [
        (NEOX, {"model_type": "bert"}, "model_type 'bert'"),
        (NEOX, {"hidden_act": "mish"}, "hidden_act 'mish'"),
        (
            NEOX,
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            "rope_type 'longrope'",
        ),
        (
            NEOX,
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
            "truncate False.*rope_type",
        ),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act 'relu'"),
        (LLAMA, {"num_local_experts": 8}, "num_local_experts"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        (LLAMA, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        (
            LLAMA,
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                    "full_attention": {
                        "rope_type": "linear",
                        "rope_theta": 1_000_000.0,
                        "factor": 8.0,
                    },
                }
            },
            "rope_parameters.*sliding_attention.*type",
        ),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
            r"mscale 1\.0.*rope_type 'yarn'",
        ),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (
            LLAMA,
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types.*linear_attention",
        ),
        (
            LLAMA,
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 1,
            },
            "max_window_layers 1.*layers",
        ),
        (
            LLAMA,
            {
                "model_type": "qwen3",
                "layer_types": ["sliding_attention", "sliding_attention"],
                "sliding_window": 5,
                "use_sliding_window": False,
            },
            "layer_types.*use_sliding_window",
        ),
        (NEOX, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA, {"kerple_positional": {"method": "alibi"}}, ".*--positional"),
        (NEOX, {"orig_max_position_embeddings": 8}, "orig_max_position_embeddings.*nearest"),
        (LLAMA, {"model_type": "mistral", "sliding_window": 1}, "sliding_window 1"),
        (LLAMA, {"num_key_value_heads": "four"}, "num_key_value_heads"),
        # Misspelled keys, whose defaults would make another model.
        (NEOX, {"rotary_pctt": 0.5}, "rotary_pctt.*nearest: rotary_pct;"),
        (NEOX, {"use_parallel_residuals": False}, "use_parallel_residuals.*use_parallel_residual;"),
        (LLAMA, {"rope_tetha": 5e5}, "rope_tetha.*rope_theta"),
        (
            NEOX,
            {"rope_parameters": {"rope_type": "default", "rope_thet": 500}},
            "rope_thet 500",
        ),
        (LLAMA, {"model_type": "mixtral"}, "model_type 'mixtral'.*gpt_neox"),
        (
            {"model_type": "gpt_neox", "hidden_size": 32, "num_attention_heads": 4},
            {},
            ".*num_hidden_layers",
        ),
    ],
)
def test_unsupported_settings_are_named(base, keys, message):
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        config_from({**base, **keys}, "config.json")
