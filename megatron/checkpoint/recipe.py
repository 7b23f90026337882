"""How a checkpoint was trained: what identifies it, and what differs in a run that continues it."""

import hashlib
from pathlib import Path
from typing import Any

from megatron.checkpoint.configuration import (
    DROPOUTS,
    NOT_IN_RECIPE,
    RECIPE,
    code_digests,
    saved_config,
    saved_training,
)
from megatron.checkpoint.directory import read_state_file, saved_by_this_project
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config
from megatron.config.schema import FIELDS
from megatron.config.schema.base import as_written
from megatron.config.schema.model import ModelConfig

# Keys of the recipe that `training_notice` leaves out: the model and the order of the samples are
# compared themselves, and it adds those of the optimizer and the schedule with effective values.
NOT_IN_NOTICE = {
    "model": ModelConfig.model_fields.keys() - DROPOUTS,
    "optimizer": {"betas", "eps", "momentum", "params"},
    "schedule": {"train_iters", "lr_decay_iters", "lr_schedule"},
    "data": {
        "split",
        "train_data_weights",
        "valid_data_weights",
        "test_data_weights",
        "weight_by_num_documents",
        "weighted_sampler_alpha",
    },
}


def training_notice(step: Path, config: Config) -> str | None:
    """A line to print if a run that resumes from a checkpoint trains the same model in another way:
    the keys that differ, but not where the training ends. None if none differs, or the checkpoint
    does not tell.
    """
    is_own = saved_by_this_project(step)
    try:
        saved, state = saved_config(step, config), read_state_file(step)
    except CheckpointError:
        return None
    before, now = _training_keys(saved, complete=is_own), _training_keys(config, complete=True)

    # Without lr_decay_iters, the decay follows train_iters, which may change.
    decay = saved.schedule.lr_decay_iters or saved.schedule.train_iters
    if decay and (saved.schedule.lr_decay_iters or config.schedule.lr_decay_iters):
        before["lr_decay_iters"] = decay
        now["lr_decay_iters"] = config.schedule.lr_decay_iters or config.schedule.train_iters

    # What the state tells better than the configuration.
    if is_own and "precision" in state:
        before["precision"], now["precision"] = state["precision"], config.precision.dtype
    schedule = state.get("training", {}).get("lr_schedule")
    if schedule and config.schedule.lr_schedule:
        before["lr_schedule"], now["lr_schedule"] = schedule, config.schedule.lr_schedule
    phrases = []
    for key, value in now.items():
        if key in before and value != before[key]:
            phrases.append(f"{key} {as_written(value)} here, {as_written(before[key])} there")
    if not phrases:
        return None
    return (
        f"notice: {step}: the run differs from the checkpoint's configuration: {'; '.join(phrases)}"
    )


def _training_keys(config: Config, *, complete: bool) -> dict[str, Any]:
    """Configuration key -> value, of all keys that change how the same model is trained.

    complete: with the defaults of keys that are not set. Other programs may have other defaults.
    """
    keys: dict[str, Any] = {}
    for path, (section, name) in FIELDS.items():
        values = getattr(config, section)
        left_out = {*NOT_IN_RECIPE.get(section, ()), *NOT_IN_NOTICE.get(section, ())}
        if section not in RECIPE or name in left_out:
            continue
        # A schedule of lengths that is off has no effect.
        if section == "curriculum" and name != "enabled" and not config.curriculum.enabled:
            continue
        if complete or name in values.model_fields_set:
            keys[".".join(path)] = getattr(values, name)

    # The defaults of parameters depend on the optimizer; apex changes only how it is computed.
    optimizer = config.optimizer
    if "optimizer.type" in keys:
        keys["optimizer.type"] = _algorithm(config)
    for name, value in optimizer.all_params.items():
        is_set = name in optimizer.model_fields_set or name in optimizer.params
        if name != "apex" and (complete or is_set):
            keys[f"optimizer.params.{name}"] = value
    return keys


def _algorithm(config: Config) -> str:
    """The optimizer's type, with one name for adam and adamw, which are the same."""
    if config.optimizer.type == "adamw":
        return "adam"
    return config.optimizer.type


def _recipe(config: Config) -> dict[str, Any]:
    """The sections of a configuration that change how a model is trained, and their keys."""
    keys = config.model_dump(include=RECIPE, exclude=NOT_IN_RECIPE)
    keys["optimizer"]["type"] = _algorithm(config)
    return keys


def training_recipe(step: Path, saved: Config) -> str:
    """16 hexadecimal digits that identify how a checkpoint was trained, except for its seed: its
    configuration, without what does not change the training, and the data, batch size, precision,
    code of an external method and earlier recipes that its state records.

    saved: its `checkpoint_config`.
    """
    keys = _recipe(saved)
    try:
        state = read_state_file(step)
    except CheckpointError:
        state = {}
    training = saved_training(step)
    if training.get("code"):
        keys["code"] = training["code"]
    data = sorted({*training.get("data", {}).values(), *training.get("trained_documents", {})})
    batch, precision = state.get("global_batch"), state.get("precision")
    earlier = training.get("earlier_recipes", [])
    identity = keys, saved.checkpoint.finetune, data, batch, precision, earlier
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


def earlier_recipes(step: Path, config: Config, global_batch: int) -> list[str]:
    """`TrainingState.earlier_recipes` of a run that starts from a checkpoint: also with the
    checkpoint's, if the run does not train in the same way.
    """
    earlier: list[str] = saved_training(step).get("earlier_recipes", [])
    try:
        saved, state = saved_config(step, config), read_state_file(step)
    except CheckpointError:  # as of other programs
        return earlier
    before = saved.training.seed, state.get("global_batch"), state.get("precision")
    now = config.training.seed, global_batch, config.precision.dtype
    is_same = same_training(saved, config) and before == now
    is_same = is_same and saved_training(step).get("code", []) == code_digests(config.model)
    settings = config.checkpoint
    starts_anew = settings.finetune or settings.no_load_optim or settings.no_load_rng
    if is_same and not starts_anew:
        return earlier
    return [*earlier, training_recipe(step, saved)]


def same_training(one: Config, other: Config) -> bool:
    """Whether two configurations train in the same way, apart from where they end."""
    both = []
    for config in (one, other):
        keys = _recipe(config)
        decay = config.schedule.lr_decay_iters or config.schedule.train_iters
        keys["schedule"] |= {"train_iters": None, "lr_decay_iters": decay}
        both.append(keys)
    return both[0] == both[1]
