"""Every key of GPT-NeoX is supported, accepted without effect or refused; everything else is unknown."""

from pathlib import Path

import pytest

from megatron.config import Config, UserError
from megatron.config import neox_compat as neox_keys
from megatron.config.declared import ALIASES, FIELDS, MAPPINGS

KEYS = [
    key
    for line in (Path(__file__).parents[3] / "data" / "neox_keys.txt").read_text().splitlines()
    if not line.startswith("#")
    for key in line.split()
]
SUPPORTED = {path[0] for path in (*FIELDS, *MAPPINGS, *ALIASES)}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_exactly_one_fate(key):
    fates = [
        key in SUPPORTED,
        key in neox_keys.REFUSED or key == neox_keys.ATTENTION_CONFIG,
        key in neox_keys.WITHOUT_EFFECT,
    ]
    assert sum(fates) == 1


def test_the_tables_hold_nothing_else():
    of_tables = {key for key in neox_keys.known() if "." not in key}
    assert of_tables <= set(KEYS)


@pytest.mark.parametrize("key", sorted(neox_keys.REFUSED))
def test_refused_keys_are_refused_with_their_reason(flat, key):
    with pytest.raises(UserError) as caught:
        Config.from_flat(nested(flat, key, "something that it is not by default"))
    assert f'"{key}" is known to GPT-NeoX but not supported here: {neox_keys.REFUSED[key].reason}' in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, refused in neox_keys.REFUSED.items() for value in (None, *refused.neutral)],
)
def test_refused_keys_that_ask_for_nothing_are_let_through(flat, key, value):
    assert Config.from_flat(nested(flat, key, value)).notices == ()


def test_disabled_mappings_are_let_through(flat):
    assert Config.from_flat({**flat, "flops_profiler": {"enabled": False, "profile_step": 1}}).notices == ()
    with pytest.raises(UserError, match="flops_profiler"):
        Config.from_flat({**flat, "flops_profiler": {"enabled": True}})


def test_neutral_values_are_compared_by_type(flat):
    with pytest.raises(UserError, match="opt_pos_emb_offset"):
        Config.from_flat({**flat, "opt_pos_emb_offset": False})


@pytest.mark.parametrize("key", sorted(neox_keys.WITHOUT_EFFECT))
def test_keys_without_effect_are_accepted_and_said(flat, key):
    (notice,) = Config.from_flat(nested(flat, key, True), source="a.yml").notices
    assert notice == f'a.yml: "{key}" has no effect here: {neox_keys.WITHOUT_EFFECT[key]}'
    assert Config.from_flat(nested(flat, key, False)).notices == ()


def nested(flat: dict, key: str, value: object) -> dict:
    *outer, last = key.split(".")
    for name in reversed([*outer, last]):
        value = {name: value}
    return {**flat, **value}


@pytest.mark.parametrize(
    "value",
    [None, [[["global"], 2]], [[["flash"], 2]], [[["global", "flash"], 1]], [[["global"], 1], [["flash"], "all"]]],
)
def test_dense_attention_is_what_there_is(flat, value):
    assert Config.from_flat({**flat, "attention-config": value}).notices == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[["local"], 2]], "only dense attention .* is supported, not local"),
        ([[["global", "sparse_fixed", "amlp"], 1]], ".*not amlp, sparse_fixed"),
        ("global", "it has the form"),
        ([["global"]], "it has the form|only dense"),
    ],
)
def test_other_attention_is_refused(flat, value, message):
    with pytest.raises(UserError, match=f'"attention-config" is known to GPT-NeoX but not supported here: {message}'):
        Config.from_flat({**flat, "attention-config": value})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("num-layer", "num_layers"),
        ("hiden_size", "hidden_size"),
        ("betas", "optimizer.params.betas"),
        ("use_mupp", "use_mup"),
        ("checkpoint_facto", "checkpoint_factor"),
        ("optimizer.params.lrr", "optimizer.params.lr"),
        ("optimizer.kind", "optimizer."),
        ("fp16.enable", "fp16.enabled"),
        ("zero_optimization.overlap_com", "zero_optimization.overlap_comm"),
        ("qqqqqqqq", ""),
    ],
)
def test_unknown_keys_come_with_the_nearest(flat, key, nearest):
    with pytest.raises(UserError) as caught:
        Config.from_flat(nested(flat, key, 1), source="a.yml")
    message = str(caught.value)
    assert message.startswith(f'a.yml: "{key}" is not a known key; nearest known: ')
    assert nearest in message.split("nearest known: ")[1]


@pytest.mark.parametrize("key", ["wandb_api_key", "wandb-api-key", "api_key", "hf_token", "comet_api_key", "password"])
def test_secrets_do_not_belong_into_a_configuration(flat, key):
    with pytest.raises(UserError, match=f'"{key}" looks like a secret.*WANDB_API_KEY') as caught:
        Config.from_flat({**flat, key: "0123456789abcdef"})
    assert "0123456789abcdef" not in str(caught.value)
