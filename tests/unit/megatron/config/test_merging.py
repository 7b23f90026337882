"""Merging files and overrides: mappings key by key, aliases, parameters of another type, and what
is told about it.
"""

import json

import pytest

from megatron.config import load_config
from megatron.config.schema import FIELDS, SECTIONS
from megatron.config.schema.base import WILDCARD
from tests.support.configs import MINIMAL
from tests.support.errors import assert_rejected

MODEL = json.dumps(MINIMAL)


def load(write, *texts, overrides=(), strict=False):
    paths = [write(f"{index}.yml", text) for index, text in enumerate(texts)]
    return load_config(paths, overrides=overrides, strict=strict)


@pytest.mark.parametrize(
    ("first", "second", "name", "value", "texts"),
    [
        ('{"seed": 1}', '{"seed": 2}', "seed", 2, '"seed" 1 2'),
        (
            '{"weight-decay": 0}',
            '{"weight_decay": 0.2}',
            "weight_decay",
            0.2,
            '"weight_decay" 0 0.2',
        ),
        (
            '{"save-interval": 5}',
            '{"checkpoint-factor": 6}',
            "save_interval",
            6,
            '"checkpoint-factor" 5 6',
        ),
        (
            '{"weight-decay": 0.3}',
            '{"optimizer": {"params": {"weight_decay": 0.7}}}',
            "weight_decay",
            0.7,
            '"optimizer.params.weight_decay" 0.3 0.7',
        ),
        (
            '{"optimizer": {"type": "Lion", "params": {"betas": [0.9, 0.95], "lr": 3}}}',
            '{"optimizer": {"type": "lion", "params": {"lr": 1}}}',
            "optimizer",
            {"type": "lion", "params": {"betas": [0.9, 0.95], "lr": 1}},
            '"optimizer.params.lr" 3 1 optimizer.type Lion lion',
        ),
        (
            '{"fp16": {"enabled": true, "loss_scale_window": 500}}',
            '{"fp16": {"hysteresis": 3, "loss_scale_window": 50}}',
            "fp16",
            {"enabled": True, "loss_scale_window": 50, "hysteresis": 3},
            '"fp16.loss_scale_window" 500 50',
        ),
        ('{"fp16": {"enabled": true}}', '{"fp16": null}', "fp16", None, '"fp16" True None'),
    ],
)
def test_a_later_file_overrides_an_earlier_one(write, tmp_path, first, second, name, value, texts):
    config = load(write, MODEL, first, second)
    assert config.to_flat()[name] == value
    (notice,) = config.notices
    for text in (str(tmp_path / "2.yml"), f"{tmp_path / '1.yml'}:1", *texts.split()):
        assert text in notice
    key = texts.split()[0]
    problem = rf"{tmp_path}/2\.yml:1: {key} is.*{tmp_path}/1\.yml:1"
    assert_rejected(problem, load, write, MODEL, first, second, strict=True)


@pytest.mark.parametrize(
    ("overrides", "value", "texts"),
    [
        (["train_iters=7", "train-iters=8"], 8, ['"train-iters"', "7", "8", "--set"]),
        (["train_iters=7", "train-iters=7"], 7, None),
    ],
)
def test_an_override_that_is_given_twice(write, overrides, value, texts):
    config = load(write, MODEL, overrides=overrides)
    assert config.schedule.train_iters == value
    if texts is None:
        assert config.notices == ()
    else:
        (notice,) = config.notices
        assert all(text in notice for text in texts)


def test_files_that_set_parts_of_a_mapping(write):
    """Also three files, nested mappings, --set and `updated`; no value is replaced, so there is
    nothing to notice.
    """
    texts = (
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
        '{"zero_optimization": {"offload_param": {"pin_memory": true}}, "bf16": {"enabled": true}}',
        '{"zero_optimization": {"overlap_comm": false}}',
    )
    config = load(
        write,
        MODEL,
        *texts,
        strict=True,
        overrides=["zero_optimization={round_robin_gradients: true}"],
    )
    expected = {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": False,
        "round_robin_gradients": True,
    }
    assert config.to_flat()["zero_optimization"] == expected
    assert (config.precision.dtype, config.notices) == ("bf16", ())
    changed = config.updated(
        zero_optimization={"stage": 2, "offload_param": None}, fp16={"hysteresis": 1}
    )
    assert changed.to_flat()["zero_optimization"] == {**expected, "stage": 2, "offload_param": None}
    assert changed.precision.bf16_enabled
    assert config.to_flat()["zero_optimization"] == expected


def test_parameters_of_another_type_are_dropped(write):
    """Adam and AdamW are the same type. `weight_decay` belongs to the parameters of the optimizer,
    wherever it is.
    """
    adam = (
        '{"optimizer": {"type": "AdamW", "params": {"lr": 0.02, "eps": 0.125, "weight_decay": '
        "0.5}}}"
    )
    lion = '{"optimizer": {"type": "Lion", "params": {"lr": 0.004}}}'
    config = load(write, MODEL, adam, lion)
    assert config.optimizer.all_params == {"lr": 0.004, "betas": (0.9, 0.99)}
    assert config.optimizer.weight_decay == 0.1
    (notice,) = config.notices
    assert all(
        text in notice
        for text in ("optimizer.type", "AdamW", "Lion", "0.02", "0.125", "optimizer.params")
    )

    for override in ("optimizer.type=SGD", "optimizer={type: SGD}"):
        config = load(write, MODEL, adam, overrides=["optimizer.params.momentum=0.5", override])
        assert config.to_flat()["optimizer"] == {"type": "SGD", "params": {"momentum": 0.5}}
        assert "0.125" in config.notices[0]
    same = load(write, MODEL, adam, '{"optimizer": {"type": "adam", "params": {"lr": 0.25}}}')
    assert (same.optimizer.lr, same.optimizer.eps, same.optimizer.weight_decay) == (
        0.25,
        0.125,
        0.5,
    )
    default = load(
        write, MODEL, '{"optimizer": {"params": {"eps": 0.5}}}', '{"optimizer": {"type": "muon"}}'
    )
    assert default.optimizer.eps is None

    rotary = '{"pos-emb": "rotary", "pos-emb-options": {"fraction": 0.5}}'
    options = load(
        write, MODEL, rotary, '{"pos-emb-options": {"random_range": 64}}'
    ).model.pos_emb_options
    assert options == {"fraction": 0.5, "random_range": 64}
    assert load(write, MODEL, rotary, '{"pos-emb": "alibi"}').model.positional_options == {}


def test_the_notice_names_every_dropped_parameter(write):
    """Also parameters that have another name, and those after a long one."""
    decay = '{"optimizer": {"type": "Lion", "params": {"weight_decay": 0.375}}}'
    dropped = '"optimizer.params.weight_decay"'
    for second, overrides in (
        ('{"optimizer": {"type": "Adam"}}', []),
        ("{}", ["optimizer.type=Adam"]),
    ):
        config = load(write, MODEL, decay, second, overrides=overrides)
        (notice,) = config.notices
        assert dropped in notice
        assert "0.375" in notice
        assert config.optimizer.weight_decay == 0.1
    for reset in ('{"optimizer": null}', '{"optimizer": {"params": null}}'):
        (notice,) = load(write, MODEL, decay, reset).notices
        assert dropped in notice
        assert "0.375" in notice

    options = '{"pos-emb": "rotary", "pos-emb-options": {"scaling": "%s", "fraction": 0.625}}' % (
        "x" * 300
    )
    notice = load(write, MODEL, options, '{"pos-emb": "alibi"}').notices[-1]
    assert '"pos-emb-options.fraction"' in notice
    assert "0.625" in notice


def test_null_resets_a_mapping(write):
    """In a later file and in --set, also if parts of it are set again."""
    options = '{"pos-emb": "rotary", "pos-emb-options": {"fraction": 0.75, "random_range": 48}}'
    reset, half = '{"pos-emb-options": null}', '{"pos-emb-options": {"fraction": 0.5}}'
    for texts, overrides, expected in (
        ([reset], [], {}),
        ([], ["pos-emb-options=null"], {}),
        ([reset, half], [], {"fraction": 0.5}),
        ([reset], ["pos_emb_options.fraction=0.5"], {"fraction": 0.5}),
        ([], ["pos-emb-options=null", "pos-emb-options.fraction=0.5"], {"fraction": 0.5}),
        ([], ["pos-emb-options.fraction=0.5", "pos-emb-options=null"], {}),
    ):
        config = load(write, MODEL, options, *texts, overrides=overrides)
        assert config.model.pos_emb_options == expected
        assert type(config).from_flat(config.to_flat()).model == config.model

    # Nested mappings, and those of the keys of other fields.
    adam = (
        '{"optimizer": {"type": "AdamW", "params": {"lr": 0.02, "eps": 0.125, "weight_decay": '
        "0.5}}}"
    )
    params = load(
        write, MODEL, adam, overrides=["optimizer.params=null", "optimizer.params.lr=0.25"]
    ).optimizer
    assert (params.type, params.lr, params.eps, params.weight_decay) == ("adamw", 0.25, None, 0.1)
    zero = '{"zero_optimization": {"stage": 2, "overlap_comm": true}}'
    kept = load(
        write, MODEL, zero, '{"zero_optimization": null}', '{"zero_optimization": {"stage": 1}}'
    )
    assert (kept.optimizer.zero_stage, kept.optimizer.zero) == (1, {})
    for key in (
        "optimizer",
        "zero_optimization",
        "fp16",
        "curriculum_learning",
        "deepspeed_extra_args",
    ):
        assert load(write, MODEL, overrides=[f"{key}=null"]).to_flat()[key] is None


def test_null_resets_every_key_to_its_default(write):
    plain = load(write, MODEL)
    required = []
    for path, (section, name) in FIELDS.items():
        key = ".".join(path)
        if SECTIONS[section].model_fields[name].is_required():
            required.append(key)
        elif path[-1] != WILDCARD and key.replace("_", "-") not in MINIMAL:
            reset = load(write, MODEL, overrides=[f"{key}=null"])
            assert reset.model_dump() == plain.model_dump(), key
    for key in required:
        assert_rejected(f'"{key}" is missing', load, write, MODEL, overrides=[f"{key}=null"])

    # Values of files, with checks that depend on whether a key is set.
    keys = '{"split": "8,1,1", "lr-decay-style": "cosine", "rotary-pct": 0.5, "pos-emb": "rotary"}'
    overrides = ["split=null", "lr-decay-style=null", "rotary-pct=null"]
    config = load(write, MODEL, keys, overrides=[*overrides, "pos-emb-options.fraction=0.25"])
    defaults = plain.data.split, plain.schedule.lr_decay_style
    assert (config.data.split, config.schedule.lr_decay_style) == defaults
    assert config.model.positional_options["fraction"] == 0.25


def test_overrides(write):
    config = load(
        write,
        MODEL,
        '{"seed": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "eps": 1e-6}}, '
        '"checkpoint-factor": 4}',
        overrides=[
            "seed=2",
            "optimizer.params.lr=1e-3",
            "zero_optimization.stage=1",
            "save-interval=9",
            "train-data-paths=[a, b]",
            "split=9,1",
            "save=a=b",
            "load=",
        ],
    )
    assert config.training.seed == 2
    assert (config.optimizer.lr, config.optimizer.eps, config.optimizer.zero_stage) == (
        1e-3,
        1e-6,
        1,
    )
    assert config.checkpoint.save_interval == 9
    assert config.data.train_data_paths == ("a", "b")
    assert config.data.split == "9,1"
    assert config.checkpoint.save == "a=b"
    assert config.checkpoint.load is None


PARAMETERS = '{"optimizer": {"params": {"eps": "abc", "lr": 1}}}'


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ('{"seed": 1}', ["sed=3"], '--set: "sed"'),
        ('{"seed": 1}', ["seed.deeper=3"], r'"seed\.deeper".*seed.*1'),
        ('{"seed": 1}', ["seed=x"], "--set: \"seed\".*'x'"),
        (
            '{"weight-decay": 0, "optimizer": {"params": {"weight_decay": 0}}}',
            [],
            r'"optimizer\.params\.weight_decay".*"weight-decay"',
        ),
        (PARAMETERS, ["optimizer.params.lr=0.1"], r'/1\.yml:1: "optimizer\.params\.eps": '),
        (PARAMETERS, ["optimizer.params.eps=b"], r'--set: "optimizer\.params\.eps": '),
    ],
)
def test_errors_name_the_place(write, text, overrides, message):
    assert_rejected(message, load, write, MODEL, text, overrides=overrides)


def test_places_of_dropped_parameters_are_forgotten(write):
    first = '{"optimizer": {"type": "Adam", "params": {"eps": 1e-8}}}'
    second = '{"optimizer": {"params": {"lr": 0.1}}}'
    override = 'optimizer={"type": "Lion", "params": {"lr": "x"}}'
    message = r'^--set: "optimizer\.params\.lr": '
    assert_rejected(message, load, write, MODEL, first, second, overrides=[override])


def test_parameters_that_a_later_override_drops_are_reported(write):
    adam = '{"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}'
    overrides = ["optimizer.type=SGD", "optimizer.params.lr=0.5", "optimizer.type=Adam"]
    config = load(write, MODEL, adam, overrides=overrides)
    assert config.optimizer.lr == 0.1
    assert any("optimizer.params.lr" in notice and "0.5" in notice for notice in config.notices)


@pytest.mark.parametrize(
    ("overrides", "weight_decay"),
    [
        (["optimizer.params={lr: 1e-3, weight_decay: 0.2}", "weight_decay=0.5"], 0.5),
        (["weight_decay=0.5", "optimizer.params={lr: 1e-3, weight_decay: 0.2}"], 0.2),
        (["optimizer.params.lr=5e-3"], 0.3),
        (["optimizer.params={lr: 5e-3}"], 0.3),
        (["optimizer={type: adam, params: {lr: 5e-3}}"], 0.3),
        (["optimizer={type: lion, params: {lr: 5e-3}}"], 0.1),  # the default: 0.3 was for Adam
        (["optimizer=null"], 0.1),
        (["weight_decay=0.5", "optimizer.params={lr: 5e-3}"], 0.5),
    ],
)
def test_order_of_overrides_and_aliases(write, overrides, weight_decay):
    config = load(
        write, MODEL, '{"optimizer": {"params": {"weight_decay": 0.3}}}', overrides=overrides
    )
    assert (
        config.optimizer.weight_decay == config.to_flat().get("weight_decay", 0.1) == weight_decay
    )
