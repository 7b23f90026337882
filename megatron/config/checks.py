"""Checks of a configuration: combinations of keys that contradict each other, and keys of GPT-NeoX
that have no effect in this project, because they are unsupported or ignored. neox_compat.yml lists
the latter.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kerple.positional.wrappers import PerLayer, Randomized
from megatron.config.schema import FIELDS, Sections, canonical_path
from megatron.config.schema.base import ConfigSection
from megatron.utils.errors import UserError, shortened


def check_vocabulary(config: Sections, tokenizer_vocab_size: int) -> None:
    """Raises UserError if the tokenizer has more tokens than the embedding has rows."""
    padded = config.model.padded_vocab_size
    if padded is not None and padded < tokenizer_vocab_size:
        raise UserError(
            f"padded_vocab_size is {padded}, but the tokenizer has {tokenizer_vocab_size} tokens; "
            "remove the key (it is computed) or use the tokenizer the model was trained with"
        )


def validate(config: Sections) -> Iterator[str]:
    """One message for each contradiction between keys of several sections."""
    yield from _tensor_parallelism(config)
    yield from _pipeline(config)
    yield from _positional_method(config)
    yield from _training_length(config)
    yield from _extrapolation(config)


def warnings_for(config: Sections) -> Iterator[str]:
    """One message for each key whose meaning in GPT-NeoX differs or is easily mistaken."""
    for _, section in config:
        yield from section.warnings()
    yield from _keys_without_effect(config)
    growing, last = config.curriculum.total_curriculum_step, config.schedule.train_iters
    if config.curriculum.enabled and growing is not None and last and growing > last:
        yield (
            f"curriculum_learning.schedule_config.total_curriculum_step is {growing}, but "
            f"train_iters is {last}: the length does not reach seq_length"
        )
    if config.optimizer.use_bnb_optimizer and config.model.pos_emb == "learned":
        yield (
            "use_bnb_optimizer with pos_emb learned: the position embeddings have no layer norm, "
            "unlike those of GPT-NeoX with this key (bitsandbytes' StableEmbedding)"
        )


@dataclass(frozen=True)
class _Dependent:
    """Keys that act only where `acts` is true. `otherwise` is the cause where it is false: a
    format string of the sections.
    """

    keys: tuple[str, ...]
    acts: Callable[[Sections], bool]
    otherwise: str


def _is_decided(section: ConfigSection, switch: str) -> bool:
    """True if a switch is on, or was turned off in the configuration: then the keys beside it stay
    there on purpose, as in `fp16: {enabled: false, loss_scale_window: 500}`.
    """
    return bool(getattr(section, switch)) or switch in section.model_fields_set


def _draws_normal(config: Sections) -> bool:
    methods = (config.model.init_method, config.model.output_layer_init_method)
    return any(method.endswith("normal") and "xavier" not in method for method in methods)


def _has_positional_parameters(config: Sections) -> bool:
    return any(list(method.parameters()) for method in config.model.build_on_meta())


# Keys that need another key. Those of positional methods are in schema/model.py, and those that
# contradict each other are errors. A key that only asks for what is done anyway is not listed
# (use_bias_in_norms: false with rmsnorm), nor one that an option of a script may need.
_DEPENDENT = (
    # Model.
    _Dependent(
        ("layernorm_epsilon",), lambda c: c.model.norm == "layernorm", "with norm {model.norm}"
    ),
    _Dependent(
        ("rms_norm_epsilon",), lambda c: c.model.norm == "rmsnorm", "with norm {model.norm}"
    ),
    _Dependent(
        ("bias_gelu_fusion",),
        lambda c: c.model.activation == "gelu",
        "with activation {model.activation}",
    ),
    _Dependent(
        ("init_method_std",),
        _draws_normal,
        "with init_method {model.init_method} and output_layer_init_method "
        "{model.output_layer_init_method}",
    ),
    # Optimizer, schedule and precision.
    _Dependent(
        ("positional_lr_factor",),
        _has_positional_parameters,
        "with pos_emb {model.pos_emb}, which has no parameters",
    ),
    _Dependent(
        ("min_lr", "decay_lr_to"),
        lambda c: c.schedule.lr_decay_style != "constant",
        "with lr_decay_style {schedule.lr_decay_style}",
    ),
    _Dependent(
        ("fp16.type",),
        lambda c: _is_decided(c.precision, "fp16_enabled"),
        "without fp16.enabled",
    ),
    _Dependent(
        (
            "fp16.loss_scale",
            "fp16.loss_scale_window",
            "fp16.initial_scale_power",
            "fp16.hysteresis",
            "fp16.min_loss_scale",
        ),
        lambda c: (
            c.precision.dtype == "fp16"
            or (not c.precision.fp16_enabled and _is_decided(c.precision, "fp16_enabled"))
        ),
        "in the data type {precision.dtype}",
    ),
    _Dependent(
        (
            "fp16.loss_scale_window",
            "fp16.initial_scale_power",
            "fp16.hysteresis",
            "fp16.min_loss_scale",
        ),
        lambda c: c.precision.loss_scale == 0 or c.precision.dtype != "fp16",
        "with fp16.loss_scale {precision.loss_scale:g}, which is constant",
    ),
    # Data and tokenizer.
    _Dependent(
        ("weighted_sampler_alpha",),
        lambda c: c.data.weight_by_num_documents,
        "without weight_by_num_documents",
    ),
    _Dependent(
        ("vocab_file",),
        lambda c: c.tokenizer.tokenizer_type != "CharLevelTokenizer",
        "with tokenizer_type {tokenizer.tokenizer_type}",
    ),
    _Dependent(
        ("merge_file",),
        lambda c: c.tokenizer.tokenizer_type == "GPT2BPETokenizer",
        "with tokenizer_type {tokenizer.tokenizer_type}",
    ),
    # Training.
    _Dependent(
        ("pipe_partition_method",),
        lambda c: c.parallel.pipe_parallel_size > 1,
        "with pipe_parallel_size {parallel.pipe_parallel_size}",
    ),
    _Dependent(
        ("checkpoint_num_layers",),
        lambda c: c.training.checkpoint_activations,
        "without checkpoint_activations",
    ),
    _Dependent(
        ("seq_length_val",),
        lambda c: c.training.eval_iters > 0,
        "with eval_iters {training.eval_iters}",
    ),
    _Dependent(
        tuple(".".join(path) for path in FIELDS if path[0] == "curriculum_learning"),
        lambda c: _is_decided(c.curriculum, "enabled"),
        "without curriculum_learning.enabled",
    ),
    # Logs and the launcher.
    _Dependent(
        ("wandb_project", "wandb_group", "wandb_team", "wandb_run_name", "wandb_host"),
        lambda c: _is_decided(c.logging, "use_wandb"),
        "without use_wandb",
    ),
    _Dependent(
        ("profile_step_start", "profile_step_stop"),
        lambda c: _is_decided(c.logging, "profile"),
        "without profile",
    ),
    _Dependent(
        ("comment", "account"),
        lambda c: c.launcher.launcher == "slurm",
        "with launcher {launcher.launcher}",
    ),
)


def _keys_without_effect(config: Sections) -> Iterator[str]:
    """One message for each key that differs from its default, but needs another key to act."""
    for rule in _DEPENDENT:
        for key in rule.keys:
            name, field = FIELDS[canonical_path(key)]
            section = getattr(config, name)
            value = getattr(section, field)
            is_default = value == type(section).model_fields[field].default
            if not is_default and not rule.acts(config):
                cause = rule.otherwise.format(**dict(config))
                yield f"{key} {shortened(str(value))} has no effect {cause}"


def _tensor_parallelism(config: Sections) -> Iterator[str]:
    model, size = config.model, config.parallel.model_parallel_size
    # Heads, features and rows are split evenly over the ranks.
    if model.num_attention_heads % size:
        yield (
            f"num_attention_heads {model.num_attention_heads} is not divisible by "
            f"model_parallel_size {size}; tensor parallelism does not split heads"
        )
    if model.num_attention_heads % model.num_kv_heads == 0 and model.num_kv_heads % size:
        yield (
            f"num_kv_heads {model.num_kv_heads} is not divisible by model_parallel_size {size}; "
            "tensor parallelism does not split or copy heads of keys and values"
        )
    if model.mlp_features % size:
        yield (
            f"the MLP has {model.mlp_features} features, which model_parallel_size {size} does not "
            f"divide; set mlp_multiple_of to a multiple of {size}"
        )
    if model.padded_vocab_size is not None and model.padded_vocab_size % size:
        yield (
            f"padded_vocab_size {model.padded_vocab_size} is not divisible by model_parallel_size "
            f"{size}; remove the key (it is computed)"
        )

    # Features that do not work together with it.
    if model.attention_dropout > 0 and size > 1:
        yield (
            f"attention_dropout {model.attention_dropout} with model_parallel_size {size} is not "
            "supported: all ranks would draw the same dropout mask for their different heads; set "
            "attention_dropout to 0 (hidden_dropout is supported)"
        )
    if config.optimizer.zero_stage == 3 and size > 1:
        yield (
            f"zero_optimization.stage 3 with model_parallel_size {size} is not supported: tensor "
            "parallelism has already split the parameters; use stage 2 or model_parallel_size 1"
        )


def _pipeline(config: Sections) -> Iterator[str]:
    stages, zero_stage = config.parallel.pipe_parallel_size, config.optimizer.zero_stage
    # Stages need blocks, and only some ZeRO stages know pipelines.
    if stages > config.model.num_layers:
        yield (
            f"pipe_parallel_size {stages} is more than num_layers {config.model.num_layers}; every "
            "stage needs at least one block"
        )
    if zero_stage > 1 and stages > 0:
        yield (
            f"zero_optimization.stage {zero_stage} with pipe_parallel_size {stages}: DeepSpeed's "
            "pipeline does not shard gradients and supports only ZeRO 0 and 1; use stage 1, or "
            "pipe_parallel_size 0"
        )


def _positional_method(config: Sections) -> Iterator[str]:
    """The method does not support the parallel layout or the lengths."""
    # Heads and positions that cannot be split over ranks or documents.
    model, size = config.model, config.parallel.model_parallel_size
    try:
        methods = model.build_on_meta()
    except (ValueError, NotImplementedError, TypeError):
        return  # a contradiction of the section
    if any("modify_scores" in method.hooks for method in methods) and size > 1:
        yield (
            f"pos_emb {model.pos_emb} computes the scores of all heads together, which "
            f"model_parallel_size {size} splits over ranks; use model_parallel_size 1 (pipeline "
            "parallelism and ZeRO are supported)"
        )

    of_layers = [each.method for each in methods if isinstance(each, PerLayer)]
    randomized = [each for each in (*methods, *of_layers) if isinstance(each, Randomized)]
    random_rotation = any("rotate" in method.hooks for method in randomized)
    if config.data.reset_attention_mask and random_rotation:
        yield (
            f"reset_attention_mask with random positions (random_range) of pos_emb {model.pos_emb} "
            "is not supported: queries and keys are rotated by positions in the row, not in the "
            "document; remove one of the two keys"
        )

    # Lengths of sequences in training and validation.
    random_ranges = {method.random.range for method in randomized}
    lengths = {"seq_length": model.seq_length, "seq_length_val": config.training.seq_length_val}
    given = [(name, length) for name, length in lengths.items() if length is not None]
    for name, length in given:
        for longest in random_ranges:
            if length > longest:
                yield (
                    f"{name} {length} is more than random_range {longest}, the number of positions "
                    "to sample from; raise pos_emb_options.random_range"
                )

    # Positions of the learned table.
    if model.pos_emb == "learned":
        given += [("random_range", longest) for longest in random_ranges]
        for name, length in given:
            if length > model.max_position_embeddings:
                yield (
                    f"{name} {length} is more than max_position_embeddings "
                    f"{model.max_position_embeddings}, and pos_emb learned has no embeddings "
                    "beyond; raise max_position_embeddings or choose another pos_emb"
                )


def _extrapolation(config: Sections) -> Iterator[str]:
    parallel, stage = config.parallel, config.optimizer.zero_stage
    keys_that_split_the_model = {
        f"pipe_parallel_size {parallel.pipe_parallel_size}": parallel.pipe_parallel_size > 1,
        f"model_parallel_size {parallel.model_parallel_size}": parallel.model_parallel_size > 1,
        f"zero_optimization.stage {stage}": stage == 3,
    }
    for key, splits in keys_that_split_the_model.items():
        if splits and config.training.extrapolation_lengths:
            yield (
                f"extrapolation_lengths with {key} is not supported: each rank must have the "
                "complete model; remove extrapolation_lengths, and evaluate the checkpoints with "
                "kerple evaluate"
            )


def _training_length(config: Sections) -> Iterator[str]:
    schedule, lr, logging = config.schedule, config.optimizer.lr, config.logging
    if schedule.min_lr > lr:
        yield f"min_lr {schedule.min_lr} exceeds optimizer.params.lr {lr}; lower min_lr"
    curriculum, length = config.curriculum, config.model.seq_length
    if curriculum.enabled and curriculum.max_difficulty not in (None, length):
        yield (
            f"curriculum_learning.max_difficulty {curriculum.max_difficulty} is not seq_length "
            f"{length}, the length of the sequences in the data; set both to the last length of "
            "the schedule"
        )
    start, last = logging.profile_step_start, schedule.train_iters
    if logging.profile and last is not None and 0 < last <= start < logging.profile_step_stop:
        problem = f"profile_step_start {start}, but train_iters is {last}"
        yield f"{problem}: no step would be profiled; lower it"


@dataclass(frozen=True)
class Unsupported:
    """Why a key is not supported or what to use instead, and the values (besides null) that mean
    "off".
    """

    reason: str
    off: tuple[Any, ...] = ()

    def is_off(self, value: Any) -> bool:
        """True for the values that mean "off", an empty mapping, and a mapping with
        `enabled: false`.
        """
        if isinstance(value, dict):
            return not value or value.get("enabled") is False or value in self.off
        return any(type(value) is type(off) and value == off for off in (None, *self.off))


def _read_keys() -> tuple[dict[str, Unsupported], dict[str, str], dict[str, str]]:
    """The unsupported and the ignored keys of neox_compat.yml, and those of other projects."""
    data = yaml.safe_load((Path(__file__).with_name("neox_compat.yml")).read_text(encoding="utf-8"))
    unsupported: dict[str, Unsupported] = {}
    for entry in data["unsupported"]:
        unsupported |= dict.fromkeys(
            entry["keys"], Unsupported(entry["reason"], tuple(entry.get("neutral", ())))
        )
    ignored: dict[str, str] = {}
    elsewhere: dict[str, str] = {}
    for name, reasons in (("ignored", ignored), ("elsewhere", elsewhere)):
        for entry in data[name]:
            reasons |= dict.fromkeys(entry["keys"], entry["reason"])
    return unsupported, ignored, elsewhere


UNSUPPORTED, IGNORED, ELSEWHERE = _read_keys()

ATTENTION_CONFIG = "attention_config"
_DENSE_ATTENTION = ("global", "flash")
# All keys of this file, nested ones with dots.
KNOWN_KEYS = (*UNSUPPORTED, *IGNORED, ATTENTION_CONFIG)


def unsupported_reason(key: str, value: Any, keys: Mapping[str, Any]) -> str | None:
    """Why this value of a known key is not supported, or None if it is accepted.

    keys: the values of all top-level keys, on which the neutral value of some keys depends.
    """
    if key == ATTENTION_CONFIG and value is not None:
        return _attention_reason(value, keys.get("num_layers"))
    if key not in UNSUPPORTED or UNSUPPORTED[key].is_off(value):
        return None
    try:
        if key == "data_types" and value == {"grad_accum_dtype": "fp32"} and _sums_in_fp32(keys):
            return None
    except (AttributeError, TypeError):
        pass  # another key is missing or wrong, which is reported separately
    return UNSUPPORTED[key].reason


def _sums_in_fp32(keys: Mapping[str, Any]) -> bool:
    """Whether gradients are summed in fp32 anyway: in bf16 with ZeRO 0 or 1."""
    fp16, bf16, zero = (keys.get(name) or {} for name in ("fp16", "bf16", "zero_optimization"))
    is_bf16 = (
        keys.get("precision") == "bfloat16"
        or bf16.get("enabled") is True
        or (fp16.get("enabled") is True and fp16.get("type") in ("bf16", "bfloat16"))
    )
    return is_bf16 and bool(zero.get("stage", 0) <= 1)


def _attention_reason(value: Any, num_layers: Any) -> str | None:
    """The value is one type per layer, or [[[type, type ...], repetitions] ...]; "all" repeats a
    pattern for all layers. `flash` is an implementation of dense attention.
    """
    expected = f'expected [[["global"], {num_layers or "NUM_LAYERS"}]]'
    if isinstance(value, str):
        return expected
    types: list[Any] = []
    try:
        for item in value:
            if isinstance(item, str):
                types.append(item)
                continue
            pattern, count = item
            if isinstance(pattern, str):
                return expected
            if count == "all":
                count = num_layers // len(pattern)
            types += pattern * count
    except (TypeError, ValueError, ZeroDivisionError):
        return expected
    sparse = sorted({str(type_) for type_ in types if type_ not in _DENSE_ATTENTION})
    if sparse:
        hint = ""
        if "local" in sparse:
            hint = "; for a sliding window in these layers, set sliding_window_width to a list"
        return f"only dense attention (global, flash) is supported, not {', '.join(sparse)}{hint}"
    if len(types) == num_layers:
        return None
    return f"it describes {len(types)} layers, but num_layers is {num_layers}; {expected}"
