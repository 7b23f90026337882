"""config.json and our configuration keys, in both directions; errors name unsupported settings."""

import pytest

from megatron.checkpoint.convert.hugging_face_config import (
    config_from,
    is_stock,
    self_contained_config,
    stock_config,
)
from megatron.checkpoint.storage import CheckpointError
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


@pytest.mark.parametrize(
    ("pos_emb", "keys", "stock"),
    [
        ("rotary", {}, True),
        ("rotary", {"rotary_pct": 0.5, "rotary_emb_base": 300, "gpt_j_residual": True}, True),
        ("rotary", {"pos_emb_options": {"scaling": "yarn", "factor": 4.0, "beta_fast": 16}}, True),
        ("rotary", {"pos_emb_options": {"scaling": "ntk", "factor": 4.0}}, False),
        ("rotary", {"norm": "rmsnorm", "activation": "silu"}, False),
        ("kerple_log", {"bias_gelu_fusion": True, "layernorm_epsilon": 1e-3, "no_weight_tying": False}, False),
    ],
)
def test_configurations_survive_a_round_trip(pos_emb, keys, stock):
    model, config = make_model(pos_emb, **keys)
    assert is_stock(config) == stock
    written = (stock_config if stock else self_contained_config)(config, model.settings)
    values = config_from(written, "config.json")
    returned = type(config).from_flat(values)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "gpt_j_residual", "norm_epsilon", "activation"):
        assert getattr(returned.model, name) == getattr(config.model, name), name
    ours, theirs = returned.model.positional_options, config.model.positional_options
    assert {name: value for name, value in ours.items() if name in theirs and name != "trained_length"} == {
        name: value for name, value in theirs.items() if name != "trained_length"
    }


def test_defaults_of_gpt_neox():
    values = config_from(NEOX, "config.json")
    assert (values["gpt_j_residual"], values["rotary_pct"], values["rotary_emb_base"]) == (True, 0.25, 10_000)
    assert values["no_weight_tying"] is True


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"hidden_act": "mish"}, "hidden_act 'mish'"),
        ({"intermediate_size": 100}, "intermediate_size 100 is not supported; only 128"),
        ({"attention_bias": False}, "attention_bias False is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate False of rope_type"),
    ],
)
def test_unsupported_settings_are_named(keys, message):
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        config_from({**NEOX, **keys}, "config.json")


def test_an_incomplete_file():
    with pytest.raises(CheckpointError, match="lacks num_hidden_layers, vocab_size"):
        config_from({"model_type": "gpt_neox", "hidden_size": 32, "num_attention_heads": 4}, "config.json")
