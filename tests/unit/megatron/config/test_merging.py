"""Several files, aliases and the command line: one value per key, or an error that names both places."""

import pytest

from megatron.config import Config, UserError, load_config

MODEL = '{"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 16, "pos-emb": "none"}'


def load(write, *texts, overrides=()):
    return load_config([write(f"{index}.yml", text) for index, text in enumerate(texts)], overrides=overrides)


def test_files_merge(write):
    config = load(write, MODEL, '{"train-iters": 5}', "seed: 9")
    assert (config.model.num_layers, config.schedule.train_iters, config.training.seed) == (2, 5, 9)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('{"seed": 1}', '{"seed": 1}'),
        ('{"weight-decay": 0}', '{"weight_decay": 0}'),
        ('{"save-interval": 5}', '{"checkpoint-factor": 5}'),
        ('{"optimizer": {"type": "Adam"}}', '{"optimizer": {"params": {"lr": 1}}}'),
        ('{"weight-decay": 0}', '{"optimizer": {"params": {"weight_decay": 0}}}'),
    ],
)
def test_the_same_key_in_two_files(write, tmp_path, first, second):
    with pytest.raises(UserError, match=r"was given before, as .*; keep one of them") as caught:
        load(write, MODEL, first, second)
    assert f"{tmp_path / '1.yml'}:1" in str(caught.value)
    assert f"{tmp_path / '2.yml'}:1" in str(caught.value)


def test_the_same_key_with_dash_and_underscore_in_one_file(write, tmp_path):
    with pytest.raises(UserError) as caught:
        load(write, MODEL, '{"weight-decay": 0,\n"weight_decay": 0}')
    path = tmp_path / "1.yml"
    assert (
        str(caught.value)
        == f'{path}:2: "weight_decay" was given before, as "weight-decay" at {path}:1; keep one of them'
    )


def test_only_top_level_keys_are_normalized(write):
    with pytest.raises(UserError, match=r"has no option 'a-b'"):
        load(write, MODEL, '{"pos-emb-options": {"a-b": 1}}')
    with pytest.raises(UserError, match=r'"optimizer.params.weight-decay" is not a known key'):
        load(write, MODEL, '{"optimizer": {"params": {"weight-decay": 0}}}')


def test_a_dot_in_a_file_is_part_of_the_name(write):
    with pytest.raises(UserError, match=r'"optimizer\.params\.lr" is not a known key'):
        load(write, MODEL, '{"optimizer.params.lr": 1}')


def test_aliases(write):
    config = load(write, MODEL, '{"checkpoint-factor": 7, "optimizer": {"params": {"weight_decay": 0.5}}}')
    assert config.checkpoint.save_interval == 7
    assert config.optimizer.weight_decay == 0.5
    assert config.to_flat()["save_interval"] == 7
    assert config.to_flat()["weight_decay"] == 0.5


def test_overrides(write):
    config = load(
        write,
        MODEL,
        '{"seed": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "eps": 1e-6}}, "checkpoint-factor": 4}',
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
    assert (config.optimizer.lr, config.optimizer.eps, config.optimizer.zero_stage) == (1e-3, 1e-6, 1)
    assert config.checkpoint.save_interval == 9
    assert config.data.train_data_paths == ("a", "b")
    assert config.data.split == "9,1"
    assert config.checkpoint.save == "a=b"
    assert config.checkpoint.load is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", r"--set seed: has the form key=value"),
        ("=3", r"--set =3: has the form key=value"),
        ("seed=[", r"--set seed=\[: the value is not YAML"),
        ("sed=3", r'--set: "sed" is not a known key; nearest known: .*seed'),
        ("seed.deeper=3", r'"seed.deeper" cannot be set: seed is 1, not a mapping'),
        ("seed=x", r"--set: \"seed\": must be a valid integer, not 'x'"),
    ],
)
def test_bad_overrides(write, override, message):
    with pytest.raises(UserError, match=message):
        load(write, MODEL, '{"seed": 1}', overrides=[override])


def test_placeholders(flat):
    config = Config.from_flat({**flat, "save": "runs/{pos-emb}/{seed}", "load": "runs/{pos_emb}/{seq-length}"})
    assert config.checkpoint.save == "runs/kerple_log/1234"
    assert config.checkpoint.load == "runs/kerple_log/16"
    assert config.to_flat()["save"] == "runs/kerple_log/1234"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("runs/{sed}", r"\{sed\} names no key"),
        ("runs/{optimizer}", r"\{optimizer\} names no key"),
        ("runs/{train-iters}", r"\{train-iters\} has no value; set train-iters"),
        ("runs/{no-weight-tying}", "only plain text and numbers"),
        ("runs/{save}", "only plain text and numbers"),
    ],
)
def test_bad_placeholders(flat, path, message):
    with pytest.raises(UserError, match=f'"save": .*{message}'):
        Config.from_flat({**flat, "save": path})


def test_an_override_may_hold_an_alias(write):
    config = load(
        write, MODEL, '{"weight-decay": 0.2}', overrides=["optimizer={type: Adam, params: {weight_decay: 0.3}}"]
    )
    assert config.optimizer.weight_decay == 0.3
