"""Llama, Mistral, Qwen2 and Qwen3 of the transformers library: config.json and tensors, in both
directions.

All four have RMS norms, a gated MLP and rotary positions. They differ in biases, norms of queries
and keys, and sliding windows. Their values are those of our layers, except that query_key_value is
stored as three tensors.

Legend: g heads of keys and values, h / g query heads per key head, d head size.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config
from megatron.config.schema.model import ModelConfig

# model_type -> class of transformers.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Name in Hugging Face's GPT-NeoX, which `weights.py` uses -> name in these models.
TOP_NAMES = {
    "gpt_neox.embed_in.weight": "model.embed_tokens.weight",
    "gpt_neox.final_layer_norm.weight": "model.norm.weight",
    "embed_out.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "attention.dense.weight": "self_attn.o_proj.weight",
    "attention.dense.bias": "self_attn.o_proj.bias",
    "mlp.w1.weight": "mlp.gate_proj.weight",
    "mlp.w1.bias": "mlp.gate_proj.bias",
    "mlp.w3.weight": "mlp.up_proj.weight",
    "mlp.w3.bias": "mlp.up_proj.bias",
    "mlp.w2.weight": "mlp.down_proj.weight",
    "mlp.w2.bias": "mlp.down_proj.bias",
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
BLOCK = re.compile(r"gpt_neox\.layers\.(\d+)\.(.+)")

# hidden_act -> our activation.
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}

# Ours -> config.json, with the same value.
SAME_VALUE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "padded_vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_epsilon": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
}

# Other keys that `keys_from` reads: in all families, and in some.
OTHER_KEYS = (
    "model_type",
    "head_dim",
    "intermediate_size",
    "hidden_act",
    "tie_word_embeddings",
    "layer_types",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
)
FAMILY_KEYS = (
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
)
KNOWN_KEYS = frozenset((*SAME_VALUE.values(), *OTHER_KEYS, *FAMILY_KEYS))

# Keys that do not change the model's output.
IGNORED_KEYS = ("use_cache", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id")

WINDOWED, FULL = "sliding_attention", "full_attention"


def family_of(config: Config) -> str | None:
    """The model_type that can represent a model with rotary positions; None if there is none."""
    model = config.model
    if model.norm != "rmsnorm" or not model.gated or model.gpt_j_residual:
        return None
    if model.positional_options["fraction"] != 1:
        return None
    # Families differ in their biases.
    output, attention = model.use_bias_in_attn_output, model.use_bias_in_attn_linear
    mlp = model.use_bias_in_mlp
    if model.use_qk_layernorm:
        family, fits = "qwen3", output == attention and not mlp
    elif output != attention:
        default_size = model.head_size * model.num_attention_heads == model.hidden_size
        family, fits = "qwen2", attention and not mlp and default_size
    elif model.windows[0] is None:  # exports have the same window in all layers
        family, fits = "llama", True
    else:
        family, fits = "mistral", not attention and not mlp
    if not fits:
        return None
    return family


def config_json(model: ModelConfig, padded_vocab_size: int, family: str) -> dict[str, Any]:
    """config.json without the keys of rotary positions."""
    activation = model.activation_function
    values = {theirs: getattr(model, ours) for ours, theirs in SAME_VALUE.items()}
    values |= {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": padded_vocab_size,
        "head_dim": model.head_size,
        "intermediate_size": model.mlp_features,
        "hidden_act": next(name for name, ours in ACTIVATIONS.items() if ours == activation),
        "tie_word_embeddings": not model.no_weight_tying,
        "use_cache": True,
    }
    if family in ("llama", "qwen3"):
        values["attention_bias"] = model.use_bias_in_attn_linear
    if family == "llama":
        values["mlp_bias"] = model.use_bias_in_mlp
    else:
        values["sliding_window"] = model.window
    if family in ("qwen2", "qwen3"):
        windowed, first, kind = False, model.num_layers, FULL
        if model.window is not None:
            windowed, first, kind = True, 0, WINDOWED
        values |= {"use_sliding_window": windowed, "max_window_layers": first}
        values["layer_types"] = [kind] * model.num_layers
    return values


def keys_from(
    theirs: Mapping[str, Any], defaults: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """Our configuration keys, except those of rotary positions.

    defaults: those of transformers' configuration class. Raises CheckpointError, naming `source`
    and the key, for settings that this project does not support.
    """
    values = {name: value for name, value in defaults.items() if name in KNOWN_KEYS}
    for name, value in theirs.items():
        ignored = name in FAMILY_KEYS and name not in defaults  # by transformers too
        if not ignored and (value is not None or name == "sliding_window"):
            values[name] = value
    for name, default in defaults.items():
        if name not in KNOWN_KEYS and values.get(name, default) != default:
            raise CheckpointError(
                f"{source}: {name} {values[name]!r} is not supported; only {default!r} is"
            )
    activation = ACTIVATIONS.get(values["hidden_act"])
    if activation is None:
        raise CheckpointError(
            f"{source}: hidden_act {values['hidden_act']!r} is not supported; supported: "
            f"{', '.join(ACTIVATIONS)}"
        )
    window, attention_bias = _window(values, theirs, source), bool(values.get("attention_bias"))
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    head_size = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    window_width = None
    if window is not None:
        window_width = window - 1  # theirs counts the query's own position
    return {
        **{ours: values[name] for ours, name in SAME_VALUE.items()},
        "head_size": head_size,
        # A gated MLP has a third of GPT-NeoX's intermediate_size.
        "intermediate_size": 3 * values["intermediate_size"],
        "activation": activation,
        "norm": "rmsnorm",
        "use_bias_in_attn_linear": attention_bias or values["model_type"] == "qwen2",
        "use_bias_in_attn_output": attention_bias,
        "use_bias_in_mlp": bool(values.get("mlp_bias")),
        "use_qk_layernorm": values["model_type"] == "qwen3",
        "sliding_window_width": window_width,
        "no_weight_tying": not values["tie_word_embeddings"],
        "gpt_j_residual": False,
        "seq_length": values["max_position_embeddings"],
        "pos_emb": "rotary",
    }


def _window(values: Mapping[str, Any], theirs: Mapping[str, Any], source: str) -> int | None:
    """The sliding window of all layers."""
    window, layers = values.get("sliding_window"), values["num_hidden_layers"]
    if not values.get("use_sliding_window", True):
        window = None
    if window is not None and (not isinstance(window, int) or window < 2):
        raise CheckpointError(
            f"{source}: sliding_window {window!r} is not supported; it must be at least 2"
        )
    types = theirs.get("layer_types")
    if types is not None:
        key, kinds = "layer_types", set(types)
        if len(types) != layers or not kinds <= {WINDOWED, FULL}:
            raise CheckpointError(f"{source}: layer_types {types!r} is not supported")
    elif window is None:
        return None
    else:
        # The first layers are without a window.
        first = values.get("max_window_layers", 0)
        key, kinds = f"max_window_layers {first}", set()
        if first > 0:
            kinds.add(FULL)
        if first < layers:
            kinds.add(WINDOWED)
    if len(kinds) > 1:
        raise CheckpointError(
            f"{source}: {key} gives only some of the layers a sliding window, which is not "
            "supported; all or none must have it"
        )
    if kinds != {WINDOWED}:
        return None
    if window is None:
        raise CheckpointError(
            f"{source}: layer_types gives all layers a sliding window, but the model has no "
            "sliding_window, or use_sliding_window is false"
        )
    return window


def split_tensors(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Tensors under the names of these models, from those of a model under GPT-NeoX's names."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = BLOCK.fullmatch(name)
        if match is None:
            renamed[TOP_NAMES[name]] = tensor
            continue
        prefix, inner = f"model.layers.{match[1]}.", match[2]
        if not inner.startswith("attention.query_key_value."):
            renamed[prefix + BLOCK_NAMES[inner]] = tensor
            continue
        # [g, h / g + 2, d, ...]
        groups = tensor.unflatten(0, (model.num_kv_heads, -1, model.head_size))
        parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
        for projection, part in zip(PROJECTIONS, parts, strict=True):
            kind = inner.rpartition(".")[2]
            renamed[f"{prefix}self_attn.{projection}.{kind}"] = part.flatten(0, 2).contiguous()
    return renamed


def merge_tensors(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `split_tensors`. Raises KeyError for another name."""
    top = {theirs: ours for ours, theirs in TOP_NAMES.items()}
    inside = {theirs: ours for ours, theirs in BLOCK_NAMES.items()}
    merged: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in top:
            merged[top[name]] = tensor
            continue
        _, _, block, inner = name.split(".", 3)
        prefix = f"gpt_neox.layers.{block}."
        if inner in inside:
            merged[prefix + inside[inner]] = tensor
        elif inner.startswith("self_attn.q_proj."):
            names = [name.replace("q_proj", projection) for projection in PROJECTIONS]
            rows = [tensors[each].unflatten(0, (model.num_kv_heads, -1)) for each in names]
            kind = inner.rpartition(".")[2]
            merged[f"{prefix}attention.query_key_value.{kind}"] = torch.cat(rows, dim=1).flatten(
                0, 1
            )
    return merged
