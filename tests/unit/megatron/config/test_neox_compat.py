"""Every key of GPT-NeoX is supported, ignored or unsupported."""

from pathlib import Path

import pytest

from megatron.config import Config, UserError
from megatron.config.loader import ALIASES, FIELDS, MAPPINGS
from megatron.config.neox_compat import (
    ATTENTION_CONFIG,
    IGNORED,
    UNSUPPORTED,
    is_known,
    known_keys,
    unsupported_reason,
)

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}

KEYS = [
    key
    for line in (Path(__file__).parents[3] / "data" / "neox_keys.txt").read_text().splitlines()
    if not line.startswith("#")
    for key in line.split()
]


def test_every_key_is_in_exactly_one_table():
    supported = {path[0] for path in (*FIELDS, *MAPPINGS, *ALIASES)}
    for key in KEYS:
        tables = [key in supported, key in UNSUPPORTED or key == ATTENTION_CONFIG, key in IGNORED]
        assert sum(tables) == 1, key


def test_every_key_of_the_tables_is_of_gpt_neox():
    assert {key for key in known_keys() if "." not in key} <= set(KEYS)
    assert all(map(is_known, known_keys()))


def test_unsupported_keys():
    for key, entry in UNSUPPORTED.items():
        assert unsupported_reason(key, "not the default", SIZES) == entry.reason, key
        for value in (None, *entry.off):
            assert unsupported_reason(key, value, SIZES) is None, (key, value)
    for key in IGNORED:
        assert unsupported_reason(key, "anything", SIZES) is None


def test_values_that_mean_off_are_compared_by_type():
    assert unsupported_reason("opt_pos_emb_offset", 0, SIZES) is None
    assert unsupported_reason("opt_pos_emb_offset", False, SIZES) is not None


def test_disabled_mappings_are_accepted():
    assert unsupported_reason("flops_profiler", {"enabled": False, "profile_step": 1}, SIZES) is None
    assert unsupported_reason("flops_profiler", {}, SIZES) is None
    assert unsupported_reason("flops_profiler", {"enabled": True}, SIZES) is not None


@pytest.mark.parametrize(
    "value",
    [
        None,
        [[["global"], 2]],
        [[["flash"], 2]],
        [[["global", "flash"], 1]],
        [[["global"], 1], [["flash"], 1]],
        [[["global"], "all"]],
        [[["global", "flash"], "all"]],
        ["global", "flash"],
    ],
)
def test_dense_attention_is_accepted(value):
    assert unsupported_reason(ATTENTION_CONFIG, value, SIZES) is None


LOCAL = (
    "only dense attention (global, flash) is supported, not local; for a sliding window in these layers, set "
    "sliding_window_width to a list"
)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([[["local"], 2]], LOCAL),
        (
            [[["global", "sparse_fixed", "amlp"], 1]],
            "only dense attention (global, flash) is supported, not amlp, sparse_fixed",
        ),
        ([[["local", "global"], "all"]], LOCAL),
        ("global", "only dense attention (global, flash) is supported, not a, b, g, l, o"),
        (2, 'expected [[["global"], 2]]'),
        ([[["global"]]], 'expected [[["global"], 2]]'),
        ([[["global"], 3]], 'it describes 3 layers, but num_layers is 2; expected [[["global"], 2]]'),
        (
            [[["global"], 2_000_000_000]],
            'it describes 2000000000 layers, but num_layers is 2; expected [[["global"], 2]]',
        ),
        ([[["global"], 2.0]], 'expected [[["global"], 2]]'),
        (["flash"], 'it describes 1 layers, but num_layers is 2; expected [[["global"], 2]]'),
    ],
)
def test_other_attention_is_unsupported(value, reason):
    assert unsupported_reason(ATTENTION_CONFIG, value, SIZES) == reason


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("expansion_factor", (4, 4.0), (2,)),
    ],
)
def test_sizes_of_the_default_block_are_accepted(key, neutral, other):
    for value in neutral:
        assert unsupported_reason(key, value, SIZES) is None
    for value in other:
        assert unsupported_reason(key, value, SIZES) == UNSUPPORTED[key].reason
    fp32 = {"grad_accum_dtype": "fp32"}
    for stage, precision, accepted in ((1, "bfloat16", True), (2, "bfloat16", False), (1, "fp16", False)):
        keys = {"precision": precision, "zero_optimization": {"stage": stage}}
        assert (unsupported_reason("data_types", fp32, keys) is None) == accepted
    bfloat16 = {"enabled": True, "type": "bfloat16"}
    assert unsupported_reason("data_types", fp32, {"precision": "bfloat16"}) is None
    assert unsupported_reason("data_types", fp32, {"fp16": bfloat16, "zero_optimization": {"stage": 1}}) is None
    assert unsupported_reason("data_types", fp32, {"fp16": {"enabled": True}}) is not None
    assert unsupported_reason("data_types", fp32, {"precision": "bfloat16", "zero_optimization": 3}) is not None


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"mlp-type": "llama"}, "mlp-type"),
        ({"attention-config": [[["local"], 2]]}, "attention-config"),
        ({"optimizer": {"params": {"freeze_step": 9}}}, "optimizer.params.freeze_step"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler"),
    ],
)
def test_a_configuration_with_an_unsupported_key_is_rejected(flat, keys, key):
    with pytest.raises(UserError, match=f'a.yml: "{key}" is a GPT-NeoX key that is not supported: '):
        Config.from_flat({**flat, **keys}, source="a.yml")


def test_a_configuration_has_a_notice_for_each_ignored_key(flat):
    keys = {"rope-fusion": True, "optimizer": {"params": {"max_grad_norm": 1.0}}, "layernorm-fusion": False}
    assert Config.from_flat({**flat, **keys}, source="a.yml").notices == (
        f'a.yml: "rope-fusion" is ignored: {IGNORED["rope_fusion"]}',
        f'a.yml: "optimizer.params.max_grad_norm" is ignored: {IGNORED["optimizer.params.max_grad_norm"]}',
    )


def test_null_means_the_default(flat):
    """Both are null in GPT-NeoX."""
    config = Config.from_flat({**flat, "extra_save_iters": None, "deepspeed_extra_args": None})
    assert (config.checkpoint.extra_save_iters, config.training.deepspeed_extra_args) == ((), {})
