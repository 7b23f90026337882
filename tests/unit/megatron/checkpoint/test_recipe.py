"""How a checkpoint was trained, and what differs in a run that continues it."""

import shutil

import pytest
import torch

from megatron.checkpoint.directory import STATE_FILE
from megatron.checkpoint.recipe import training_notice, training_recipe
from megatron.config import Config
from megatron.config.schema import FIELDS
from megatron.config.schema.optimizer import PrecisionConfig
from megatron.config.schema.training import CurriculumConfig
from tests.support.checkpoints import settings_of, write_checkpoint


def test_the_recipe_of_a_training(tmp_path):
    """It does not depend on the seed, on places, and on how the work is distributed."""

    def recipe(state=None, **keys):
        saved = {"global_batch": 8, "precision": "fp32", "training": {"data": {"a": "1"}}}
        torch.save({**saved, **(state or {})}, tmp_path / STATE_FILE)
        config = Config.from_flat({**settings_of("rpe", "nowhere"), **keys})
        return training_recipe(tmp_path, config)

    first = recipe()
    same = (
        {"optimizer": {**ADAM, "type": "AdamW"}},
        {"seed": 5, "save": "elsewhere", "log_interval": 3, "attention_backend": "sdpa"},
        {"data_path": "here", "num_workers": 3, "zero_optimization": {"stage": 1}},
        {"train_micro_batch_size_per_gpu": 1, "state": {"training": {"data": {"b": "1"}}}},
    )
    for keys in same:
        assert recipe(**keys) == first, keys
    others = (
        {"optimizer": {"type": "Adam", "params": {"lr": 0.002}}},
        {"train_iters": 5},
        {"split": "3,1,0"},
        {"hidden_dropout": 0.2},
        {"load": "base", "finetune": True},
        {"state": {"global_batch": 16}},
        {"state": {"precision": "bf16"}},
        {"state": {"training": {"data": {"a": "2"}}}},
        {"state": {"training": {"data": {"a": "1"}, "code": ["5f"]}}},
    )
    recipes = {recipe(**keys) for keys in others}
    assert len(recipes | {first}) == len(others) + 1


@pytest.fixture
def notice_of(tmp_path):
    """A function: what `training_notice` says about a checkpoint's keys and those of a run."""

    def notice(before, after, state=None, is_own=True):
        write_checkpoint(tmp_path, "none", "nowhere", **before)
        step = tmp_path / "global_step4"
        training = {"training": {"lr_schedule": "neox"}, "precision": "fp32"} if is_own else {}
        torch.save({**training, **(state or {})}, step / STATE_FILE)
        line = training_notice(step, Config.from_flat(settings_of("none", "elsewhere", **after)))
        shutil.rmtree(step)
        return line and line.partition("configuration: ")[2]

    return notice


ADAM = {"type": "Adam", "params": {"lr": 0.001}}
CURRICULUM = {
    "enabled": True,
    "min_difficulty": 8,
    "max_difficulty": 32,
    "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 8},
}
# A value of every key that changes how the same model is trained, other than the one in
# `settings_of`, and what the notice says about it.
TRAINING_KEYS = {
    "hidden_dropout": (0.1, "0.1 here, 0.0 there"),
    "attention_dropout": (0.1, "0.1 here, 0.0 there"),
    "optimizer.type": ("SGD", "sgd here, adam there"),
    "use_bnb_optimizer": (True, "True here, False there"),
    "optimizer.params.lr": (0.5, "0.5 here, 0.001 there"),
    "optimizer.params.betas": ([0.8, 0.9], "[0.8, 0.9] here, [0.9, 0.999] there"),
    "optimizer.params.eps": (1e-6, "1e-06 here, 1e-08 there"),
    "optimizer.params.adam_w_mode": (False, "False here, True there"),
    "weight_decay": (0.2, "0.2 here, 0.1 there"),
    "positional_lr_factor": (2.0, "2.0 here, 1.0 there"),
    "gradient_clipping": (0.5, "0.5 here, 1.0 there"),
    "lr_decay_iters": (3, "3 here, 4 there"),
    "lr_decay_style": ("cosine", "cosine here, linear there"),
    "lr_schedule": ("neox-2022", "neox-2022 here, neox there"),
    "min_lr": (1e-5, "1e-05 here, 0.0 there"),
    "decay_lr_to": (0.1, "0.1 here, None there"),
    "warmup": (0.1, "0.1 here, 0.01 there"),
    "warmup_iters": (1, "1 here, None there"),
    "curriculum_learning.enabled": (True, "True here, False there"),
    "precision": ("bfloat16", "bf16 here, fp32 there"),
    "eod_mask_loss": (True, "True here, False there"),
    "reset_attention_mask": (True, "True here, False there"),
}


@pytest.mark.parametrize("key", TRAINING_KEYS)
def test_a_key_that_changes_the_training_is_named(key, notice_of):
    value, phrase = TRAINING_KEYS[key]
    changes = {key: value}
    if key == "curriculum_learning.enabled":
        changes = {"curriculum_learning": CURRICULUM}
    config = Config.from_flat(settings_of("none", "nowhere")).updated(**changes)
    keys = {name: config.to_flat()[name] for name in {part.split(".")[0] for part in changes}}
    assert notice_of({}, keys) == f"{key} {phrase}"
    states = {
        "precision": {"precision": "bf16"},
        "lr_schedule": {"training": {"lr_schedule": "neox-2022"}},
    }
    assert notice_of(keys, keys, states.get(key)) is None


def test_several_keys_of_a_training(notice_of):
    """Parameters are compared with the defaults of their optimizer, as far as both have them."""
    muon = {"type": "Muon", "params": {"lr": 0.001, "momentum": 0.8}}
    nesterov = {"type": "Muon", "params": {"lr": 0.001, "nesterov": False}}
    assert notice_of({"optimizer": muon}, {"optimizer": nesterov}) == (
        "optimizer.params.momentum 0.95 here, 0.8 there; "
        "optimizer.params.nesterov False here, True there"
    )
    longer = {**CURRICULUM, "min_difficulty": 16}
    assert notice_of({"curriculum_learning": CURRICULUM}, {"curriculum_learning": longer}) == (
        "curriculum_learning.min_difficulty 16 here, 8 there"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Defaults, and other spellings of the same.
        ({}, {"optimizer": {"type": "adamw", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}}}),
        (
            {"weight_decay": 0},
            {"optimizer": {**ADAM, "params": {"lr": 0.001, "weight_decay": 0.0}}},
        ),
        ({"lr_decay_iters": None}, {"lr_decay_iters": None, "train_iters": 9}),
        ({"lr_decay_iters": None}, {"lr_decay_iters": 4, "train_iters": 9}),
        ({"lr_schedule": "neox"}, {}),
        ({}, {"curriculum_learning": {**CURRICULUM, "enabled": False}}),
        # What is reported otherwise, and what does not change the training.
        ({}, {"seed": 3, "split": "1,1,1", "train_batch_size": 16, "train_iters": 5}),
        ({}, {"save": "here", "log_interval": 3, "eval_interval": 3, "num_workers": 1}),
        ({}, {"attention_backend": "sdpa", "zero_optimization": {"stage": 1}}),
        ({}, {"checkpoint_activations": True, "init_method_std": 1.0}),
    ],
)
def test_the_same_training_has_no_notice(before, after, notice_of):
    assert notice_of(before, after) is None


def test_the_training_of_another_program(notice_of):
    """Its defaults are unknown, such as those of the code of an earlier GPT-NeoX."""
    keys = {"weight_decay": 0.3, "warmup": 0.2, "lr_schedule": "neox", "precision": "bfloat16"}
    assert notice_of({}, keys, is_own=False) is None
    assert notice_of({"weight_decay": 0.2}, keys, is_own=False) == (
        "weight_decay 0.3 here, 0.2 there"
    )


# Keys that need no notice, because they
UNNOTICED_KEYS = {
    # are other names of a mapping's keys, one of SGD, and layout,
    "optimizer": {"params", "momentum", "zero_stage", "zero"},
    # are normal to raise,
    "schedule": {"train_iters"},
    # belong to a schedule that is on, as above,
    "curriculum": CurriculumConfig.model_fields.keys() - {"enabled"},
    # are compared by their effect, the data type,
    "precision": PrecisionConfig.model_fields.keys() - {"precision"},
    # or by the fingerprints of the data and the order of the samples, or are of evaluations.
    "data": {
        *("data_path", "train_data_paths", "valid_data_paths", "test_data_paths", "data_impl"),
        *("train_data_weights", "valid_data_weights", "test_data_weights", "num_workers", "split"),
        *("weight_by_num_documents", "weighted_sampler_alpha", "data_cache_path"),
    },
}
# Sections for layout, paths, logs and evaluation; the seed is part of the order of the samples.
UNNOTICED_SECTIONS = {
    *("parallel", "batch", "tokenizer", "checkpoint", "training", "logging", "evaluation"),
    *("generation", "launcher"),
}


def test_every_key_of_a_training_is_compared():
    """A new key belongs into TRAINING_KEYS, or above with its reason."""
    for path, (section, name) in FIELDS.items():
        is_model = section == "model" and name not in ("hidden_dropout", "attention_dropout")
        left_out = is_model or section in UNNOTICED_SECTIONS
        left_out = left_out or name in UNNOTICED_KEYS.get(section, ())
        assert left_out != (".".join(path) in TRAINING_KEYS), path
