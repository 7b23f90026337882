"""The configuration that a checkpoint carries, and how it differs from another."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kerple.positional import method_class
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config, UserError
from megatron.config.yaml_files import read_file
from megatron.model.settings import ModelSettings

# Keys of a checkpoint's configuration that are not followed: the first would run code that the checkpoint's author
# names, the others describe how it was trained rather than what it is.
NOT_FOLLOWED = (
    "pos_emb_module",
    "pipe_parallel_size",
    "model_parallel_size",
    "attention_backend",
    "fp16",
    "bf16",
    "precision",
)

# What a model computes beyond the sizes of its tensors: field of ModelSettings -> keys of the configuration.
COMPUTES = {
    "num_heads": "num_attention_heads",
    "norm": "norm",
    "norm_epsilon": "layernorm_epsilon (or rms_norm_epsilon)",
    "activation": "activation (with bias_gelu_fusion)",
    "parallel_residual": "gpt_j_residual",
    "tied_embeddings": "no_weight_tying",
    "pos_emb_options": "the options of pos_emb",
}


def checkpoint_config(step: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration that a checkpoint carries in its configs/ folder, with `overrides` put over it."""
    folders = [folder for folder in (step / "configs", step.parent / "configs") if folder.is_dir()]
    paths = sorted(path for folder in folders[:1] for path in folder.iterdir() if path.suffix in (".yml", ".yaml"))
    if not paths:
        raise CheckpointError(f"{step}: has no configs/*.yml, so the model's configuration is not known")
    keys: dict[str, Any] = {}
    for path in paths:
        for entry in read_file(path):
            keys[entry.key.replace("-", "_")] = entry.value
    for name in NOT_FOLLOWED:
        keys.pop(name, None)
    keys.update({name.replace("-", "_"): value for name, value in (overrides or {}).items()})
    try:
        return Config.from_flat(keys, source=str(paths[0].parent))
    except UserError as error:
        raise CheckpointError(f"the checkpoint's configuration cannot be used: {error}") from error


def model_differences(saved: Config, given: Config, *, evaluation: bool = False) -> list[str]:
    """What the two configurations compute differently with the same weights, each as one phrase; empty if nothing.

    evaluation: leave out the options of the positional method that change no weight (its `evaluation_options`), which
    a trained model may be evaluated with: interpolated rotary positions are such.
    """
    ours, theirs = (ModelSettings.from_config(config, padded_vocab_size=1) for config in (saved, given))
    found = []
    if method_class(ours.pos_emb) is not method_class(theirs.pos_emb):
        found.append(f"pos_emb {ours.pos_emb} in the checkpoint, {theirs.pos_emb} here")
    for field, key in COMPUTES.items():
        was, now = getattr(ours, field), getattr(theirs, field)
        if field == "pos_emb_options":
            if found:
                continue  # another method has other options
            was, now = (_options(ours.pos_emb, options, evaluation) for options in (was, now))
        if was != now:
            found.append(f"{key} {was} in the checkpoint, {now} here")
    return found


def _options(pos_emb: str, options: tuple[tuple[str, object], ...], evaluation: bool) -> dict[str, object]:
    """A method's options with their defaults, without those that may differ."""
    method = method_class(pos_emb)
    left_out = method.evaluation_options if evaluation else ()
    everything = {**method.default_options(), **dict(options)}
    return {name: value for name, value in everything.items() if name not in left_out}


def evaluated_method(config: Config) -> str:
    """The positional method and those of its options that are not the defaults: "rotary (scaling linear, factor 4)"."""
    model = config.model
    defaults = method_class(model.pos_emb).default_options()
    chosen = [
        f"{name} {value}"
        for name, value in model.positional_options.items()
        if value is not None and value != defaults.get(name)
    ]
    return f"{model.pos_emb} ({', '.join(chosen)})" if chosen else model.pos_emb
