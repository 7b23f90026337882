"""Model settings from the configuration, and a tensor-parallel rank's heads."""

import pytest

from megatron.config import Config
from megatron.model.settings import ModelSettings, TensorParallel

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64}


def settings(**keys: object) -> ModelSettings:
    return ModelSettings.from_config(Config.from_flat({**SIZES, **keys}), padded_vocab_size=128)


def test_sizes():
    shape = settings(pos_emb="kerple", pos_emb_options={"bias": "log"}).shape()
    assert (shape.num_heads, shape.head_size, shape.hidden_size, shape.num_layers, shape.max_positions) == (
        *(4, 8, 32, 2),
        64,
    )


@pytest.mark.parametrize(
    ("keys", "activation"),
    [
        ({}, "gelu"),
        ({"bias_gelu_fusion": True}, "gelu_tanh"),
        ({"activation": "silu", "bias_gelu_fusion": True}, "silu"),
    ],
)
def test_fused_gelu_is_the_tanh_approximation(keys, activation):
    assert settings(**keys).activation == activation


def test_tied_embeddings():
    assert settings(no_weight_tying=False).tied_embeddings
    assert not settings(no_weight_tying=True).tied_embeddings


def test_each_tensor_parallel_rank_has_its_own_heads():
    assert [TensorParallel(size=3, rank=rank).heads(12) for rank in range(3)] == [
        slice(0, 4),
        slice(4, 8),
        slice(8, 12),
    ]
