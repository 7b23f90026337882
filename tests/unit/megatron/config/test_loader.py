"""Configurations from mappings and files: merging, overrides, aliases, placeholders, unknown keys,
and back.
"""

import json
import re
from functools import partial

import pytest

from megatron.config import Config, UserError, check_vocabulary, load_config
from tests.support.configs import MINIMAL
from tests.support.errors import assert_rejected

MODEL = json.dumps(MINIMAL)


def load(write, *texts, overrides=(), strict=False):
    paths = [write(f"{index}.yml", text) for index, text in enumerate(texts)]
    return load_config(paths, overrides=overrides, strict=strict)


def test_defaults_of_gpt_neox(flat):
    config = Config.from_flat(flat)
    adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "adam_w_mode": True, "apex": False}
    assert config.optimizer.all_params == adam
    assert (config.optimizer.weight_decay, config.optimizer.gradient_clipping) == (0.1, 1.0)
    assert (config.schedule.lr_decay_style, config.schedule.warmup) == ("linear", 0.01)
    assert (
        config.training.eval_interval,
        config.training.eval_iters,
        config.training.log_interval,
    ) == (1000, 100, 100)
    assert (config.training.seed, config.data.split, config.data.num_workers) == (
        1234,
        "969, 30, 1",
        2,
    )
    assert config.model.output_layer_init_method == "scaled_normal"
    assert not config.model.no_weight_tying
    assert config.precision.dtype == "fp32"


def test_to_flat_and_back(flat):
    keys = {
        **flat,
        "optimizer": {"type": "Adam", "params": {"lr": 6e-4, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "fp16": {"enabled": True, "type": "bfloat16"},
    }
    config = Config.from_flat(keys)
    flat_form = config.to_flat()
    assert flat_form == {key.replace("-", "_"): value for key, value in keys.items()}
    assert Config.from_flat(json.loads(json.dumps(flat_form))) == config
    flat_form["optimizer"]["params"]["lr"] = 7
    assert config.to_flat()["optimizer"]["params"]["lr"] == 6e-4


def test_updated(flat):
    config = Config.from_flat({**flat, "optimizer": {"params": {"lr": 0.1, "eps": 1e-6}}})
    changed = config.updated(seed=5, **{"optimizer.params.lr": 0.2, "pos-emb": "alibi"})
    assert (changed.training.seed, changed.optimizer.lr, changed.optimizer.eps) == (5, 0.2, 1e-6)
    assert (config.optimizer.lr, config.model.pos_emb, changed.model.pos_emb) == (
        0.1,
        "kerple_log",
        "alibi",
    )
    assert_rejected("hidden_size.*33", config.updated, hidden_size=33)


def test_check_vocabulary(flat):
    config = Config.from_flat({**flat, "padded_vocab_size": 128})
    check_vocabulary(config, 128)
    assert_rejected("padded_vocab_size.*128.*129", check_vocabulary, config, 129)
    check_vocabulary(Config.from_flat(flat), 10**6)


def test_a_file_that_is_given_twice(write):
    path = write("a.yml", MODEL)
    assert_rejected(r"a\.yml", load_config, [path, path.with_suffix("")])


def test_all_problems_are_reported_together(write, tmp_path):
    text = """\
hidden-size: 32
num-attention-heads: 4
seq-length: 16
seed: a
seed_: 1
warmup: 2
attention-config: [[[local], 2]]
optimizer: Adam
"""
    with pytest.raises(UserError) as caught:
        load(write, text, "save: 'runs/{sed}'")
    lines = str(caught.value).replace(f"{tmp_path}/", "").splitlines()
    starts = [
        "7 problems in the configuration:",
        '  1.yml:1: "save": {sed} is not a key',
        '  0.yml:5: "seed_" is not a known key; nearest: seed',
        '  0.yml:7: "attention-config" is a GPT-NeoX key that is not supported',
        '  0.yml:8: "optimizer" must be a mapping of params, type',
        '  0.yml, 1.yml: key "num_layers" is missing',
        '  0.yml:6: "warmup": must be less than or equal to 1',
        '  0.yml:4: "seed": must be an integer',
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


def test_placeholders(flat):
    keys = {
        "save": "runs/{pos-emb}/{seed}/{train-iters}",
        "load": "runs/{pos_emb}/{warmup}",
        "train_iters": 1e5,
    }
    config = Config.from_flat({**flat, **keys, "warmup": 0.0})
    assert config.checkpoint.save == "runs/kerple_log/1234/100000"
    assert config.checkpoint.load == "runs/kerple_log/0.0"
    assert config.to_flat()["save"] == "runs/kerple_log/1234/100000"


def test_paths_are_expanded(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    keys = (
        '{"save": "~/{seed}/a", "log-dir": "{save}/logs", "train_data_paths": ["~/a", "/b"], '
        '"load": "~"}'
    )
    overrides = ["data_cache_path=$SCRATCH/${SCRATCH}x", "pos_emb_module=json", "vocab_file=a$b~"]
    monkeypatch.setenv("b", "c")
    config = load(write, MODEL, keys, overrides=overrides)
    assert config.checkpoint.save == "/home/me/1234/a"
    assert config.logging.log_dir == "/home/me/1234/a/logs"
    assert config.data.train_data_paths == ("/home/me/a", "/b")
    assert config.checkpoint.load == "/home/me"
    assert config.data.data_cache_path == "/scratch//scratchx"
    assert config.tokenizer.vocab_file == "ac~"
    monkeypatch.setenv("HOME", "/home/other")  # that of another host
    assert Config.from_flat(config.to_flat()).checkpoint.save == "/home/me/1234/a"


def test_paths_that_cannot_be_expanded(write, monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    cases = {"$NOWHERE/a": "NOWHERE", "~nobody-here/a": "user", "${WANDB_API_KEY}": "WANDB_API_KEY"}
    for path, name in cases.items():
        with pytest.raises(UserError, match=rf'"load".*{name}') as caught:
            load(write, MODEL, f'{{"save": "a",\n "load": "{path}"}}')
        assert re.search(r"\.yml:2: ", str(caught.value))
        assert "0123456789" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"save": "runs/{sed}"}, r'"save": \{sed\} is not a key'),
        ({"save": "runs/{optimizer}"}, r'"save": \{optimizer\} is not a key'),
        ({"save": "runs/{train-iters}"}, r'"save": \{train-iters\}.*set train-iters'),
        ({"save": "runs/{no-weight-tying}"}, '"save".*a string without braces'),
        ({"save": "runs/{save}"}, '"save".*a string without braces'),
        ({"pos-emb-options": {"a-b": 1}}, "'a-b'"),
        ({"optimizer": {"params": {"weight-decay": 0}}}, r'"optimizer\.params\.weight-decay"'),
        ({"pos_emb_options": float("inf")}, '"pos_emb_options" is inf'),
        ({"pos_emb_options": [float("nan")]}, r'"pos_emb_options\.0" is nan'),
        ({"pos_emb_options": {"a": 2**53 + 1}}, r'"pos_emb_options\.a".* 54 bits'),
        ({"comment": "\0"}, '"comment".*null byte'),
        ({"train_data_paths": ["a", "b\0"]}, r'"train_data_paths\.1".*null byte'),
    ],
)
def test_bad_values(flat, keys, message):
    assert_rejected(message, Config.from_flat, {**flat, **keys})


def test_a_prompt_may_end_with_a_null_byte(flat):
    assert Config.from_flat({**flat, "prompt_end": "\0"}).to_flat()["prompt_end"] == "\0"


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
        ("qqqqqqqq", ""),
    ],
)
def test_unknown_keys_are_rejected_with_suggestions(flat, key, nearest):
    with pytest.raises(UserError) as caught:
        Config.from_flat({**flat, **nested(key, 1)}, source="a.yml")
    message = str(caught.value)
    assert message.startswith(f'a.yml: "{key}" is not a known key; nearest: ')
    assert nearest in message.split("nearest: ")[1]


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("wandb_api_key", "abcdefg", "wandb_api_key"),
        ("hf_token", "abcdefg", "hf_token"),
        (
            "zero_optimization",
            {"wandb": {"enabled": True, "api_key": "abcdefg"}},
            "zero_optimization.wandb.api_key",
        ),
        ("wandb_host", "https://user:abcdefg@host", "wandb_host"),
        ("data-path", "https://user:abcdefg@host/data", "data-path"),
        ("eval_include_path", ["a", "https://user:abcdefg@host/b"], "eval_include_path.1"),
        ("comment", "--export WANDB_API_KEY=abcdefg", "comment"),
        ("wandb_group", "in the environment, abcdefg", "wandb_group"),
    ],
)
def test_secrets_are_rejected(flat, write, monkeypatch, key, value, name):
    monkeypatch.setenv("WANDB_API_KEY", "in the environment, abcdefg")
    calls = [partial(Config.from_flat, {**flat, key: value}, source="here")]
    calls.append(partial(load, write, MODEL, overrides=[f"{key}={json.dumps(value)}"]))
    for call, place in zip(calls, ("here", "--set"), strict=True):
        with pytest.raises(
            UserError, match=f'^{place}: "{name}" looks like a secret.*WANDB_API_KEY'
        ) as caught:
            call()
        assert "abcdefg" not in str(caught.value)


def test_a_secret_without_a_value_is_accepted(flat):
    Config.from_flat({**flat, "deepspeed_extra_args": {"aio": {"api_key": None}}})


def nested(key: str, value: object) -> dict:
    """nested("a.b", 1) == {"a": {"b": 1}}"""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value
