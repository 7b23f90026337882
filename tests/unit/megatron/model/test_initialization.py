"""Initial weights: GPT-NeoX's distributions, and independence of the parallel layout."""

import pytest
import torch

from megatron.model.gpt import GPT, layer_factories
from megatron.model.initialization import initialize, initializer
from tests.support.language_models import model_settings

SIZES = {"max_positions": 64, "pos_emb": "kerple_log"}
INIT = {"init_method": "normal", "output_init_method": "scaled_normal", "std": 0.02}


def initialized(seed: int, hidden_size: int = 32, vocabulary: int = 128) -> GPT:
    settings = model_settings(**SIZES, hidden_size=hidden_size, padded_vocab_size=vocabulary)
    model = GPT(settings)
    initialize(model.layers(), settings, seed=seed, **INIT)
    return model


def test_the_layers_of_a_pipeline_stage_start_as_in_the_full_model():
    model = initialized(seed=9)
    factories = layer_factories(model.settings)
    stage = {index: factories[index]() for index in (3, 5, 6)}
    initialize(stage, model.settings, seed=9, **INIT)
    for index, layer in stage.items():
        for (name, actual), (_, expected) in zip(
            layer.named_parameters(), model.layers()[index].named_parameters(), strict=True
        ):
            assert torch.equal(actual, expected), f"layer {index} {name}"


def test_initial_weights_are_those_of_gpt_neox():
    model = initialized(5, 256, 512)
    block = model.blocks[0]
    assert block.attention.query_key_value.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.attention.dense.weight.std().item() == pytest.approx(
        0.02 / (2 * 2) ** 0.5, rel=0.02
    )
    assert block.mlp.dense_4h_to_h.weight.std().item() == pytest.approx(
        0.02 / (2 * 2) ** 0.5, rel=0.02
    )
    assert block.mlp.dense_h_to_4h.bias.abs().max() == 0
    assert torch.equal(block.input_layernorm.weight, torch.ones(256))
    other_seed = initialized(6, 256, 512)
    assert not torch.equal(
        other_seed.blocks[0].mlp.dense_h_to_4h.weight, block.mlp.dense_h_to_4h.weight
    )
    assert not torch.equal(
        model.blocks[0].mlp.dense_h_to_4h.weight, model.blocks[1].mlp.dense_h_to_4h.weight
    )


def test_initial_weights_of_a_gated_mlp():
    settings = model_settings(
        **SIZES, hidden_size=256, padded_vocab_size=128, activation="swiglu", use_qk_layernorm=True
    )
    model = GPT(settings)
    initialize(model.layers(), settings, seed=5, **INIT)
    block = model.blocks[0]
    for name, std in (("w1", 0.02), ("w3", 0.02), ("w2", 0.02 / (2 * 2) ** 0.5)):
        assert getattr(block.mlp, name).weight.std().item() == pytest.approx(std, rel=0.02)
    assert not torch.equal(block.mlp.w1.weight, block.mlp.w3.weight)
    assert torch.equal(block.attention.query_norm.weight, torch.ones(64))


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("normal", 0.02),
        ("scaled_normal", 0.02 / 24**0.5),
        ("small_init", (2 / (5 * 768)) ** 0.5),
        ("wang_init", 2 / (12 * 768**0.5)),
        ("xavier_normal", (2 / (768 + 512)) ** 0.5),
    ],
)
def test_initializers(name, std):
    weight = torch.empty(512, 768)
    initializer(name, std=0.02, num_layers=12, hidden_size=768)(
        weight, torch.Generator().manual_seed(0)
    )
    assert weight.std().item() == pytest.approx(std, rel=0.01)


@pytest.mark.parametrize(
    ("name", "gain"), [("orthogonal", 2**0.5), ("scaled_orthogonal", (2 / 12) ** 0.5)]
)
@pytest.mark.parametrize("shape", [(32, 48), (48, 32)])
def test_orthogonal_initializers(name, gain, shape):
    weight = torch.empty(shape)
    initializer(name, std=0.02, num_layers=12, hidden_size=48)(
        weight, torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(torch.linalg.svdvals(weight), torch.full((32,), gain))


def test_an_unknown_initializer_is_rejected():
    with pytest.raises(ValueError, match="small_init"):
        initializer("kaiming", std=0.02, num_layers=12, hidden_size=768)
