"""The groups: defaults, types, precision, batch sizes, and the way there and back."""

import json

import pytest
from pydantic import ValidationError

from megatron.config import Config, UserError, check_vocabulary
from megatron.config.schema import GROUPS


def test_groups_of_the_configuration_are_the_declared_ones():
    assert {name: field.annotation for name, field in Config.model_fields.items()} == GROUPS


def test_defaults_are_gpt_neox_s(flat):
    config = Config.from_flat(flat)
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.eps) == (1e-3, (0.9, 0.999), 1e-8)
    assert (config.optimizer.weight_decay, config.optimizer.gradient_clipping) == (0.1, 1.0)
    assert (config.schedule.lr_decay_style, config.schedule.warmup) == ("linear", 0.01)
    assert (config.training.eval_interval, config.training.eval_iters, config.training.log_interval) == (1000, 100, 100)
    assert (config.training.seed, config.data.split, config.data.num_workers) == (1234, "969, 30, 1", 2)
    assert config.model.output_layer_init_method == "scaled_normal"
    assert not config.model.no_weight_tying
    assert config.precision.dtype == "fp32"


def test_derived_sizes(flat):
    config = Config.from_flat(flat)
    assert config.model.head_size == 8
    assert config.model.max_position_embeddings == 16
    assert Config.from_flat({**flat, "max-position-embeddings": 64}).model.max_position_embeddings == 64
    assert config.model.norm_epsilon == 1e-5
    assert config.updated(norm="rmsnorm").model.norm_epsilon == 1e-8


def test_flat_form_comes_back(flat):
    given = {
        **flat,
        "optimizer": {"type": "Adam", "params": {"lr": 6e-4, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "fp16": {"enabled": True, "type": "bfloat16"},
    }
    config = Config.from_flat(given)
    flat_form = config.to_flat()
    assert flat_form == {key.replace("-", "_"): value for key, value in given.items()}
    assert Config.from_flat(json.loads(json.dumps(flat_form))) == config
    flat_form["optimizer"]["params"]["lr"] = 7
    assert config.to_flat()["optimizer"]["params"]["lr"] == 6e-4


def test_the_given_mapping_is_left_alone(flat):
    given = {**flat, "optimizer": {"params": {"weight_decay": 0.0}}}
    Config.from_flat(given)
    assert given["optimizer"] == {"params": {"weight_decay": 0.0}}


def test_updated(flat):
    config = Config.from_flat({**flat, "optimizer": {"params": {"lr": 0.1, "eps": 1e-6}}})
    changed = config.updated(seed=5, **{"optimizer.params.lr": 0.2, "pos-emb": "alibi"})
    assert (changed.training.seed, changed.optimizer.lr, changed.optimizer.eps) == (5, 0.2, 1e-6)
    assert (config.optimizer.lr, config.model.pos_emb, changed.model.pos_emb) == (0.1, "kerple_log", "alibi")
    with pytest.raises(UserError, match="hidden_size 33"):
        config.updated(hidden_size=33)


def test_frozen(flat):
    config = Config.from_flat(flat)
    with pytest.raises(ValidationError, match="frozen"):
        config.model.num_layers = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.model = None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num-layers": "2"}, "\"num-layers\": must be a valid integer, not '2'"),
        ({"num-layers": 2.5}, '"num-layers": must be a valid integer'),
        ({"num-layers": True}, '"num-layers": must be a valid integer, not True'),
        ({"num-layers": 0}, '"num-layers": must be greater than or equal to 1, not 0'),
        ({"no-weight-tying": "true"}, "\"no-weight-tying\": must be a valid boolean, not 'true'"),
        ({"no-weight-tying": 1}, '"no-weight-tying": must be a valid boolean'),
        ({"save": 3}, '"save": must be a valid string, not 3'),
        ({"norm": "scalenorm"}, "\"norm\": must be 'layernorm' or 'rmsnorm', not 'scalenorm'"),
        ({"optimizer": {"type": "SM3"}}, "\"optimizer.type\": must be 'adam' or 'adamw'"),
        ({"optimizer": {"params": {"lr": "high"}}}, '"optimizer.params.lr": must be a valid number'),
        ({"optimizer": {"params": {"lr": float("nan")}}}, '"optimizer.params.lr": must be a finite number'),
        ({"optimizer": {"params": {"betas": [0.9]}}}, '"optimizer.params.betas.1": Field required, not'),
        ({"optimizer": {"params": {"betas": [0.9, 1.0]}}}, '"optimizer.params.betas.1": must be less than 1'),
        ({"optimizer": {"params": {"apex": "yes"}}}, '"optimizer.params.apex": must be a valid boolean'),
        ({"optimizer": "Adam"}, "\"optimizer\" must be a mapping of params, type, not 'Adam'"),
        ({"optimizer": {"params": 3}}, '"optimizer.params" must be a mapping of .*lr'),
        ({"fp16": True}, '"fp16" must be a mapping'),
        ({"train-data-paths": [1]}, '"train-data-paths.0": must be a valid string'),
        ({"evaluation-lengths": [0]}, '"evaluation-lengths.0": must be greater than or equal to 1'),
        ({"hidden-dropout": 1}, '"hidden-dropout": must be less than 1'),
    ],
)
def test_wrong_types(flat, keys, message):
    with pytest.raises(UserError, match=f"^here: {message}"):
        Config.from_flat({**flat, **keys}, source="here")


def test_missing_keys_are_named(flat):
    del flat["hidden-size"]
    with pytest.raises(UserError, match=r'^here: key "hidden_size" is missing: Width of the residual stream'):
        Config.from_flat(flat, source="here")


def test_whole_floats_and_single_paths_are_taken(flat):
    config = Config.from_flat({**flat, "train-iters": 1e5, "train-data-paths": "one", "weight-decay": 1})
    assert config.schedule.train_iters == 100_000
    assert isinstance(config.schedule.train_iters, int)
    assert config.data.train_data_paths == ("one",)
    assert config.optimizer.weight_decay == 1.0


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "fp32"),
        ({"precision": "fp32"}, "fp32"),
        ({"precision": "fp16"}, "fp16"),
        ({"precision": "bfloat16"}, "bf16"),
        ({"fp16": {"enabled": False, "type": "bfloat16"}}, "fp32"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"fp16": {"enabled": True, "type": "bfloat16"}}, "bf16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True, "type": "bf16"}, "precision": "bfloat16"}, "bf16"),
        ({"fp16": None}, "fp32"),
    ],
)
def test_precision(flat, keys, dtype):
    assert Config.from_flat({**flat, **keys}).precision.dtype == dtype


@pytest.mark.parametrize(
    "keys",
    [
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"precision": "fp32", "bf16": {"enabled": True}},
        {"precision": "fp16", "fp16": {"enabled": True, "type": "bfloat16"}},
    ],
)
def test_contradictory_precision(flat, keys):
    with pytest.raises(UserError, match=r"contradictory precision: \w+ asks for \w+ but \w+ asks for \w+"):
        Config.from_flat({**flat, **keys})


@pytest.mark.parametrize(
    ("total", "micro", "steps", "copies", "expected"),
    [
        (None, 4, None, 2, (4, 1, 8)),
        (None, 4, 3, 2, (4, 3, 24)),
        (24, 4, None, 2, (4, 3, 24)),
        (24, None, 3, 2, (4, 3, 24)),
        (24, None, None, 2, (12, 1, 24)),
        (24, 4, 3, 2, (4, 3, 24)),
    ],
)
def test_batch_sizes(flat, total, micro, steps, copies, expected):
    config = Config.from_flat(batch_keys(flat, total, micro, steps))
    assert config.batch.resolve(copies) == expected


@pytest.mark.parametrize(
    ("total", "micro", "steps", "message"),
    [
        (None, None, 2, "no batch size: give train_micro_batch_size_per_gpu or train_batch_size"),
        (10, 4, None, r"train_batch_size 10 is not a multiple of .* 4 \* 2 data-parallel process\(es\) = 8"),
        (4, 4, None, r"4 is not a multiple of .* = 8"),
        (9, None, 3, r"9 is not a multiple of gradient_accumulation_steps 3 \* 2"),
        (24, 4, 2, r"train_batch_size is 24, but .* 4 \* .* 2 \* 2 data-parallel process\(es\) = 16"),
    ],
)
def test_batch_arithmetic_that_does_not_fit(flat, total, micro, steps, message):
    config = Config.from_flat(batch_keys(flat, total, micro, steps))
    with pytest.raises(UserError, match=message):
        config.batch.resolve(2)


def batch_keys(flat, total, micro, steps):
    given = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    rest = {key: value for key, value in flat.items() if key not in given}
    return {**rest, **{key: value for key, value in given.items() if value is not None}}


def test_data_parallel_size(flat):
    parallel = Config.from_flat({**flat, "pipe-parallel-size": 2, "model-parallel-size": 2}).parallel
    assert parallel.data_parallel_size(8) == 2
    with pytest.raises(UserError, match=r"6 process\(es\) cannot hold whole copies of a model that takes 4"):
        parallel.data_parallel_size(6)
    with pytest.raises(UserError, match="use a multiple of 4"):
        parallel.data_parallel_size(2)


def test_vocabulary_smaller_than_the_tokenizer_s(flat):
    config = Config.from_flat({**flat, "padded_vocab_size": 128})
    check_vocabulary(config, 128)
    with pytest.raises(UserError, match="padded_vocab_size is 128, but the tokenizer has 129 tokens"):
        check_vocabulary(config, 129)
    check_vocabulary(Config.from_flat(flat), 10**6)
