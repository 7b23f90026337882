"""The configuration saved with a checkpoint, and its comparison with that of a run."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from kerple.positional import method_class, registered_names
from kerple.positional.registry import canonical_name, source_digests
from kerple.positional.rotary import SCALINGS
from megatron.checkpoint.directory import iteration_of, read_state_file
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config
from megatron.config.loader import build, entries_of
from megatron.config.merging import Messages, contradictions, merge
from megatron.config.schema import FIELDS, canonical_path
from megatron.config.schema.base import WILDCARD, as_written
from megatron.config.schema.model import ModelConfig
from megatron.config.yaml_files import YamlEntry
from megatron.config.yaml_files import read_file as read_yaml
from megatron.tokenizer.interface import Tokenizer
from megatron.utils.errors import UserError, visible

# Ignored keys of a checkpoint's configuration. The first ones would run code, or read and write
# files, that the checkpoint's author chose (tasks of lm-evaluation-harness can contain code); the
# others concern one training only.
IGNORED_KEYS = (
    "pos_emb_module",
    "eval_tasks",
    "eval_include_path",
    "eval_results_prefix",
    "sample_input_file",
    "sample_output_file",
    "pipe_parallel_size",
    "model_parallel_size",
    "pipe_partition_method",
    "num_nodes",
    "checkpoint_scale",
    "attention_backend",
    "distributed_backend",
    "deepspeed_extra_args",
    "allow_other_tokenizer",
    "allow_other_data",
    "torch_compile",
    "enable_cuda_graph",
    "fp16",
    "bf16",
    "precision",
)

# Sizes that must match if the configuration of an evaluation sets them.
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")

# What changes the model's output but not the sizes of its tensors: attribute of ModelConfig -> the
# configuration keys that it follows from.
OUTPUT_SETTINGS: dict[str, tuple[str, ...]] = {
    "num_attention_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_kv_heads",),
    "head_size": ("head_size",),
    "window": ("sliding_window_width",),
    "norm": ("norm",),
    "norm_epsilon": ("layernorm_epsilon", "rms_norm_epsilon"),
    "activation_function": ("activation", "bias_gelu_fusion"),
    "gpt_j_residual": ("gpt_j_residual",),
    "no_weight_tying": ("no_weight_tying",),
}

# The sections of the configuration that say how a model is trained, and their keys that do not:
# where the data are, and how the work is done.
RECIPE = {"model", "optimizer", "schedule", "curriculum", "data"}
NOT_IN_RECIPE = {
    "model": {"attention_backend", "pos_emb_module"},
    "optimizer": {"zero_stage", "zero"},
    "data": {
        "data_path",
        "train_data_paths",
        "valid_data_paths",
        "test_data_paths",
        "data_impl",
        "num_workers",
        "data_cache_path",
    },
}

# Keys of the model that change only its training, not what it computes.
DROPOUTS = {"hidden_dropout", "attention_dropout"}
ONLY_TRAINING = {*DROPOUTS, "init_method", "init_method_std", "output_layer_init_method"}


class UnavailableMethod(CheckpointError):
    """A checkpoint has another positional method, which cannot be built here: this run does not
    name its module. The message is a phrase like those of `model_differences`.
    """


def checkpoint_config(step: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration in the checkpoint's configs/ folder, with `overrides` applied. Raises
    CheckpointError if it is missing or cannot be used, and UserError if two of its files are those
    of different models.
    """
    entries = _saved_entries(step)
    try:
        of_model, _ = _contradictions(entries)
        if not of_model:
            return build(entries, entries_of(overrides or {}, "overrides"))
    except UserError as error:
        raise CheckpointError(f"the checkpoint's configuration cannot be used: {error}") from error
    raise UserError(
        f"{step}: its configuration files contradict each other, so its model is unknown: "
        f"{'; '.join(of_model)}. Keep only the files of the run that saved the checkpoint"
    )


def files_notice(step: Path) -> str | None:
    """A line to print if files of a checkpoint's configuration contradict each other about its
    training or tokenizer; None if they do not. Raises UserError if they cannot be read.
    """
    _, of_training = _contradictions(_saved_entries(step))
    if not of_training:
        return None
    return (
        f"notice: {step}: its configuration files contradict each other, and the last one counts: "
        f"{'; '.join(of_training)}; keep only the files of the run that saved the checkpoint"
    )


def _contradictions(entries: Iterable[YamlEntry]) -> tuple[list[str], list[str]]:
    """The keys to which files of a checkpoint give different values, one phrase each: those that
    define the model, and those of its training and tokenizer; not others, such as paths.
    """
    of_model, of_training = [], []
    for change in contradictions(entries):
        # The field of the key, of its mapping (optimizer.params.*), or of the whole mapping.
        path = canonical_path(change.key)
        section, name = "", ""
        for known in (path[:1], (*path[:-1], WILDCARD), path):
            section, name = FIELDS.get(known, (section, name))
        is_in_recipe = section in RECIPE and name not in NOT_IN_RECIPE.get(section, ())
        if section == "model" and name not in ONLY_TRAINING:
            of_model.append(change.as_contradiction())
        elif is_in_recipe or name in ("seed", "tokenizer_type"):
            of_training.append(change.as_contradiction())
    return of_model, of_training


def _saved_entries(step: Path) -> list[YamlEntry]:
    """The keys of the checkpoint's configuration that are used. Raises CheckpointError if it has no
    configuration.
    """
    folders = [folder for folder in (step / "configs", step.parent / "configs") if folder.is_dir()]
    # Without hidden files: macOS writes ._NAME next to NAME on other file systems and into
    # archives.
    paths: list[Path] = []
    if folders:
        files = sorted(folders[0].glob("[!.]*"))
        paths = [path for path in files if path.suffix in (".yml", ".yaml")]
    if not paths:
        raise CheckpointError(
            f"{step}: has no configs/*.yml, so the model's configuration is unknown"
        )
    entries = [entry for path in paths for entry in read_yaml(path)]
    return [entry for entry in entries if entry.key.replace("-", "_") not in IGNORED_KEYS]


def saved_config(step: Path, config: Config) -> Config:
    """The checkpoint's configuration. An external method is imported only from the module that this
    run names, never from one that the checkpoint names. Raises CheckpointError if the configuration
    is missing or cannot be used, and UnavailableMethod if it has another method than this run.
    """
    overrides = {}
    if config.model.pos_emb_module:
        overrides["pos_emb_module"] = config.model.pos_emb_module
    try:
        return checkpoint_config(step, overrides)
    except CheckpointError as error:
        own = describe_method(canonical_name(config.model.pos_emb), config.model.pos_emb_options)
        saved = _saved_method(step) or own
        if saved == own:
            raise
        raise UnavailableMethod(f"pos_emb {saved} in the checkpoint, {own} here") from error


def _saved_method(step: Path) -> str | None:
    """The `describe_method` of the checkpoint's configuration, whose method need not be registered.
    None if the configuration does not tell.
    """
    try:
        keys = merge(_saved_entries(step), (), False, Messages())
    except UserError:
        return None
    options = keys["pos_emb_options"].value if "pos_emb_options" in keys else None
    if "pos_emb" not in keys or not isinstance(options, dict | None):
        return None
    return describe_method(canonical_name(str(keys["pos_emb"].value)), options or {})


def saved_training(step: Path) -> dict[str, Any]:
    """The `TrainingState` in a checkpoint; without the keys that its files do not contain, such as
    those of other programs, or empty if they cannot be read.
    """
    try:
        saved = read_state_file(step)
    except CheckpointError:
        return {}
    # A converted checkpoint has no training state, but some of its keys.
    training: dict[str, Any] = saved.get("training", saved)
    return training


def is_converted(step: Path) -> bool:
    """Whether a checkpoint is a converted model, which was not trained with the seed in its
    configuration.
    """
    return iteration_of(step) == 0 and "run" not in saved_training(step)


def trained_tokenizer(step: Path) -> str | None:
    """The fingerprint of the tokenizer that a checkpoint was trained with; None if it does not
    tell.
    """
    return saved_training(step).get("tokenizer") or None


def code_digests(config: ModelConfig) -> list[str]:
    """The `source_digests` of the positional method, without building its parameters."""
    return source_digests(config.build_on_meta())


def code_notice(step: Path, config: Config) -> str | None:
    """A line to print if the code of an external method is not that with which the checkpoint was
    trained; None if it is, or the checkpoint does not tell.
    """
    if not code_digests(config.model):
        return None  # without reading the state
    trained = saved_training(step).get("code")
    return changed_code_notice(trained, config, f"{step} was trained")


def changed_code_notice(trained: list[str] | None, config: Config, event: str) -> str | None:
    """Like `code_notice`. trained: the earlier `code_digests`; None if unknown. event: what
    happened with that code.
    """
    code = code_digests(config.model)
    if not code or trained is None or trained == code:
        return None
    return (
        f"notice: the file of pos_emb {config.model.pos_emb} has changed since {event}, so the "
        "weights may not fit it; if that was not on purpose, restore the file"
    )


def check_trained_tokenizer(
    trained: str | None, tokenizer: Tokenizer, *, allowed: bool, place: str | Path
) -> None:
    """Raises CheckpointError, starting with `place`, if a checkpoint was trained with another
    tokenizer.

    trained: the `tokenizer` of the checkpoint's `saved_training`; empty or None if it does not
    tell. allowed: the value of allow_other_tokenizer.
    """
    if not trained or trained == tokenizer.fingerprint or allowed:
        return
    raise CheckpointError(
        f"{place}: was trained with another tokenizer (fingerprint {visible(str(trained)[:12])}) "
        f"than this {tokenizer.name} ({tokenizer.fingerprint[:12]}). Restore its files, or name "
        "them (tokenizer-type, vocab-file, merge-file); to use this tokenizer on purpose, set "
        "allow_other_tokenizer"
    )


def check_trained_data(step: Path, data: Mapping[str, str]) -> list[str]:
    """The prefixes of datasets that the checkpoint was not trained with, as far as it tells. Raises
    CheckpointError if one that it was trained with has other contents under the same path.

    data: prefix -> `data_fingerprint` of the present datasets.
    """
    # The saved paths are absolute, but may be spelled differently.
    saved = saved_training(step).get("data", {})
    trained = {os.path.realpath(prefix): fingerprint for prefix, fingerprint in saved.items()}
    for prefix, fingerprint in data.items():
        before = trained.get(os.path.realpath(prefix), fingerprint)
        if before != fingerprint:
            raise CheckpointError(
                f"{step}: was trained with other contents of {prefix} (fingerprint {before[:12]}, "
                f"now {fingerprint[:12]}). Restore the dataset, give the new one another path "
                "(data-path), or continue with it on purpose: set allow_other_data"
            )
    if not trained:
        return []
    return [prefix for prefix, fingerprint in data.items() if fingerprint not in trained.values()]


def trained_text_notice(
    trained: Mapping[str, Any], documents: Mapping[str, tuple[int, int]], prefixes: Iterable[str]
) -> str | None:
    """A sentence if weights may have been trained on a text; None if they were not, as far as is
    known.

    trained: the checkpoint's `saved_training`. documents, prefixes: of the text, see
    `part_documents`.
    """
    spans = trained.get("trained_documents", {})
    common = total = 0
    for fingerprint, (first, end) in documents.items():
        total += end - first
        trained_first, trained_end = spans.get(fingerprint, (0, 0))
        common += max(0, min(end, trained_end) - max(first, trained_first))
    if common:
        return f"{common:,} of the {total:,} documents of the text are of its training data"

    # Earlier contents may have had the same documents.
    replaced = set(map(os.path.realpath, trained.get("replaced_data", [])))
    for prefix in prefixes:
        if os.path.realpath(prefix) in replaced:
            return f"it was also trained with other contents of {prefix}"
    return None


def model_differences(saved: Config, config: Config, *, evaluation: bool = False) -> list[str]:
    """Differences of two configurations that change the model's output for the same weights, one
    phrase each.

    evaluation: ignore options of the positional method that may be changed after training (its
    `evaluation_options`), such as rotary scaling, and compare the sizes that `config` sets.
    """
    before, after = saved.model, config.model
    settings: list[tuple[str, object, object]] = []
    if evaluation:
        for key in SIZES:
            if key in config.to_flat():
                settings.append((key, getattr(before, key), getattr(after, key)))
    method = method_class(before.pos_emb)
    same_method = method is method_class(after.pos_emb)
    if not same_method:
        settings.append(("pos_emb", before.pos_emb, after.pos_emb))

    def options(config: ModelConfig) -> dict[str, object]:
        complete = {**method.default_options(), **config.positional_options}
        if evaluation:
            return method.trained_options(**complete)
        uses_length = "trained_length" in SCALINGS.get(str(complete.get("scaling")), ())
        if uses_length and complete["trained_length"] is None:
            complete["trained_length"] = config.max_position_embeddings
        return complete

    # An attribute may differ, although not all of its keys do.
    for attribute, keys in OUTPUT_SETTINGS.items():
        if getattr(before, attribute) != getattr(after, attribute):
            for key in keys:
                settings.append((key, getattr(before, key), getattr(after, key)))
    if same_method:  # another method has other options
        settings.append(("the options of pos_emb", options(before), options(after)))
    differences: dict[str, None] = {}
    for key, saved_value, value in settings:
        if saved_value != value:
            old, new = as_written(saved_value), as_written(value)
            differences[f"{key} {old} in the checkpoint, {new} here"] = None
    return list(differences)


def replaces_positional_method(saved: Config, config: Config) -> bool:
    """Whether the positional method of `config` is another one than that of the checkpoint, or has
    other parameters, so that the checkpoint's positional parameters cannot be used.
    """

    def parameters(config: ModelConfig) -> tuple[bool, list[dict[str, torch.Size]]]:
        methods, shapes = config.build_on_meta(), []
        for method in methods:
            named = method.named_parameters()
            shapes.append({name: parameter.shape for name, parameter in named})
        return methods[0].shared, shapes

    before, after = saved.model, config.model
    if method_class(before.pos_emb) is not method_class(after.pos_emb):
        return True
    if before.positional_options == after.positional_options:
        return False
    return parameters(before) != parameters(after)


def evaluated_method(config: Config) -> str:
    """Like `describe_method`, for the method of a configuration."""
    return describe_method(config.model.pos_emb, config.model.positional_options)


def describe_method(pos_emb: str, options: Mapping[str, object]) -> str:
    """A positional method with its non-default options: "rotary (scaling linear, factor 4)"."""
    defaults: Mapping[str, object] = {}
    if pos_emb in registered_names():
        defaults = method_class(pos_emb).default_options()
    changed = []
    for name, value in options.items():
        if value is not None and value != defaults.get(name):
            changed.append(f"{name} {value}")
    if not changed:
        return pos_emb
    return f"{pos_emb} ({', '.join(changed)})"
