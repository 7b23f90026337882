import pytest
import torch

from kerple.positional import Bias, build, register, registry
from megatron.config import Config
from megatron.model.attention import SelfAttention
from megatron.model.settings import ModelSettings
from tests.support.errors import assert_rejected


def test_derived_sizes(flat):
    config = Config.from_flat(flat)
    assert config.model.head_size == 8
    assert config.model.max_position_embeddings == 16
    shape = config.updated(max_position_embeddings=64).model.shape
    assert (shape.num_heads, shape.head_size, shape.num_layers, shape.max_positions) == (
        4,
        8,
        2,
        64,
    )
    assert config.model.norm_epsilon == 1e-5
    assert config.updated(norm="rmsnorm").model.norm_epsilon == 1e-8


def test_only_the_wrong_size_is_reported_not_those_derived_from_it(flat):
    for key, value, derived in (
        ("hidden-size", 10**12, "head_size"),
        ("num-attention-heads", "four", "num_kv_heads"),
    ):
        assert_rejected(rf'(?s)^(?!.*{derived}).*"{key}"', Config.from_flat, {**flat, key: value})


def test_sizes_of_attention(flat):
    model = Config.from_flat(flat).model
    assert (model.num_kv_heads, model.head_size, model.window) == (4, 8, None)
    model = Config.from_flat(
        {**flat, "num-kv-heads": 2, "head-size": 16, "sliding-window-width": 7}
    ).model
    assert (model.num_kv_heads, model.head_size, model.window) == (2, 16, 8)
    # The residual stream needs no multiple of the heads.
    assert Config.from_flat({**flat, "hidden-size": 33, "head-size": 8}).model.head_size == 8


def test_windows_per_layer(flat):
    """A list repeats. A list of equal widths is a number."""
    config = Config.from_flat({**flat, "num-layers": 5, "sliding-window-width": [7, 7.0, None]})
    assert config.model.window == (8, 8, None)
    assert config.model.windows == (8, 8, None, 8, 8)
    assert Config.from_flat({**flat, "sliding-window-width": [7, 7]}).model.window == 8
    for value, message in (
        ([], r"must have at least 1 item\(s\)"),
        ([7, 0], "sliding-window-width.1.: must be greater than or equal to 1"),
        (0, "must be greater than or equal to 1"),
        (True, "must be an integer"),
        ([7, None, 7], "sliding_window_width has 3 entries, but num_layers is 2"),
    ):
        assert_rejected(message, Config.from_flat, {**flat, "sliding-window-width": value})


def test_the_bias_of_the_output_projection_follows_that_of_the_others(flat):
    keys = {"use-bias-in-attn-linear": False}
    for changes, biases in (
        ({}, (True, True)),
        (keys, (False, False)),
        ({"use-bias-in-attn-output": False}, (True, False)),
        ({**keys, "use-bias-in-attn-output": True}, (False, True)),
    ):
        model = Config.from_flat({**flat, **changes}).model
        assert (model.use_bias_in_attn_linear, model.use_bias_in_attn_output) == biases
        attention = SelfAttention(ModelSettings(model, 128), build("none", model.shape))
        assert (
            attention.query_key_value.bias is not None,
            attention.dense.bias is not None,
        ) == biases


@pytest.mark.parametrize(
    ("keys", "features"),
    [
        ({}, 128),
        ({"intermediate-size": 100}, 100),
        ({"intermediate-size": 100, "mlp-multiple-of": 64}, 128),
        ({"activation": "swiglu"}, 43),  # 2/3 * 128 = 85 in two halves
        ({"activation": "geglu", "intermediate-size": 3 * 48}, 48),
        ({"activation": "swiglu", "intermediate-size": 32768, "mlp-multiple-of": 256}, 11008),
    ],
)
def test_features_of_the_mlp(flat, keys, features):
    assert Config.from_flat({**flat, **keys}).model.mlp_features == features


def test_notices_of_keys_that_are_easily_mistaken(flat):
    """The hidden size is 32; a gated MLP with 64 features is as wide as usual."""
    keys = {"activation": "swiglu", "intermediate-size": 96, "use-qk-layernorm": True}
    mlp, norm = Config.from_flat({**flat, **keys}).notices
    assert mlp.startswith("intermediate_size 96: the gated MLP has 32 features")
    assert mlp.endswith("for 96 features, set 288")
    assert norm.startswith("use_qk_layernorm: each head is normalized")
    assert Config.from_flat({**flat, "intermediate-size": 96}).notices == ()
    (default,) = Config.from_flat({**flat, "activation": "swiglu"}).notices
    assert default.startswith("activation swiglu: the gated MLP has 43 features")
    assert (
        Config.from_flat({**flat, "activation": "swiglu", "intermediate-size": 3 * 64}).notices
        == ()
    )
    assert (
        len(Config.from_flat({**flat, "activation": "swiglu", "intermediate-size": 3 * 63}).notices)
        == 1
    )


def test_positional_options(flat):
    rotary = Config.from_flat(
        {**flat, "pos-emb": "rotary", "rotary-pct": 0.5, "pos-emb-options": {"base": 500}}
    ).model
    assert rotary.positional_options == {"fraction": 0.5, "base": 500}
    assert Config.from_flat({**flat, "rotary-pct": 0.5}).model.positional_options == {}


def test_release_rounding_is_only_for_methods_of_the_release(flat):
    assert Config.from_flat({**flat, "release_bf16_distances": True}).model.release_bf16_distances
    keys = {**flat, "release_bf16_distances": True}
    for method in ("rotary", "kerple_c"):
        assert_rejected(
            "release_bf16_distances.*pos_emb", Config.from_flat, {**keys, "pos-emb": method}
        )
    assert_rejected(
        "random_range", Config.from_flat, {**keys, "pos_emb_options": {"random_range": 64}}
    )


@pytest.mark.parametrize(
    ("keys", "activation"),
    [
        ({}, "gelu"),
        ({"bias-gelu-fusion": True}, "gelu_tanh"),
        ({"activation": "swish", "bias-gelu-fusion": True}, "silu"),
    ],
)
def test_fused_gelu_is_the_tanh_approximation(flat, keys, activation):
    assert Config.from_flat({**flat, **keys}).model.activation_function == activation


def test_methods_with_a_buffer_are_rejected(flat, monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))

    @register("buffered")
    class Buffered(Bias):
        def __init__(self):
            super().__init__()
            self.register_buffer("slopes", torch.ones(4))

    assert_rejected(
        "pos_emb buffered: .*buffer slopes.*Python numbers",
        Config.from_flat,
        {**flat, "pos-emb": "buffered"},
    )
