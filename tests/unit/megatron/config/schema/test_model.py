import pytest

from megatron.config import Config, UserError


def test_derived_sizes(flat):
    config = Config.from_flat(flat)
    assert config.model.head_size == 8
    assert config.model.max_position_embeddings == 16
    assert Config.from_flat({**flat, "max-position-embeddings": 64}).model.max_position_embeddings == 64
    assert config.model.norm_epsilon == 1e-5
    assert config.updated(norm="rmsnorm").model.norm_epsilon == 1e-8


def test_positional_options(flat):
    rotary = Config.from_flat({**flat, "pos-emb": "rotary", "rotary-pct": 0.5, "pos-emb-options": {"base": 500}}).model
    assert rotary.positional_options == {"fraction": 0.5, "base": 500}
    assert Config.from_flat({**flat, "rotary-pct": 0.5}).model.positional_options == {}


def test_release_rounding_is_only_for_methods_of_the_release(flat):
    assert Config.from_flat({**flat, "release_bf16_distances": True}).model.release_bf16_distances
    with pytest.raises(UserError, match=r"release_bf16_distances.*not for pos_emb rotary"):
        Config.from_flat({**flat, "pos-emb": "rotary", "release_bf16_distances": True})
