"""Our configuration keys and those of Hugging Face's config.json, in both directions, declared
once.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from kerple.positional import rotary
from megatron.checkpoint.configuration import code_digests
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config
from megatron.config.schema.model import ModelConfig
from megatron.convert import llama
from megatron.convert.tokenizer_files import TOKENIZER_IDS
from megatron.utils.errors import shortened
from megatron.utils.typed_json import Count, error_text

# The documents that an exported model was trained on, as in `TrainingState`.
TRAINED_DOCUMENTS = "trained_documents"
# The `code_digests` of an exported model's external method.
POSITIONAL_CODE = "positional_code"

# Ours -> config.json, with the same value. padded_vocab_size is the number of rows of the
# embedding.
SAME_VALUE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "padded_vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "gpt_j_residual": "use_parallel_residual",
    "hidden_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
}

# Settings of blocks -> config.json of a self-contained model, with the same value.
BLOCK_SETTINGS = {
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "mlp_features": "intermediate_size",
    "norm": "norm",
    "use_bias_in_norms": "norm_bias",
    "use_bias_in_attn_linear": "attention_bias",
    "use_bias_in_attn_output": "attention_output_bias",
    "use_bias_in_mlp": "mlp_bias",
    "use_qk_layernorm": "qk_norm",
    "window": "attention_window",
}

# Rotary: ours -> (name in rope_parameters, top-level name in files of transformers 4, default).
ROTARY = {
    "rotary_pct": ("partial_rotary_factor", "rotary_pct", 0.25),
    "rotary_emb_base": ("rope_theta", "rotary_emb_base", 10_000),
}
LLAMA_ROTARY = {
    "rotary_pct": ("partial_rotary_factor", "partial_rotary_factor", 1),
    "rotary_emb_base": ("rope_theta", "rope_theta", 10_000),
}

# Rotary scalings that transformers supports, with our options. The trained length of dynamic is
# max_position_embeddings.
SCALINGS = {name: rotary.SCALINGS[name] for name in ("linear", "yarn", "llama3")} | {
    "dynamic": ("factor",)
}
# Our option -> its name in rope_parameters, where that differs.
RENAMED = {"trained_length": "original_max_position_embeddings"}

# Options that transformers requires, with our defaults.
REQUIRED = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}

# (activation, bias_gelu_fusion) -> hidden_act, the first of which is written. The fused GELU is the
# tanh form.
ACTIVATIONS = {
    ("gelu", False): ("gelu",),
    ("gelu", True): ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    ("relu", False): ("relu",),
    ("silu", False): ("silu", "swish"),
    ("swiglu", False): ("swiglu",),
    ("geglu", False): ("geglu",),
}


class HuggingFaceConfig(BaseModel):
    """Types and transformers' defaults of the keys in config.json that `config_from` reads. Others
    are ignored.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model_type: str
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt = 2048
    use_parallel_residual: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = True
    mlp_bias: bool = False
    intermediate_size: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int | None = None
    layer_types: list[str] | None = None
    rope_theta: float = 10_000
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: PositiveInt | None = None
    rotary_pct: float = 0.25
    rotary_emb_base: float = 10_000
    norm: str = "layernorm"
    norm_bias: bool = True
    attention_output_bias: bool = True
    qk_norm: bool = False
    attention_window: PositiveInt | None = None
    training_length: PositiveInt | None = None
    positional_method: str = ""
    positional_options: dict[str, Any] | None = None
    positional_code: list[str] | None = None
    trained_documents: dict[str, Annotated[list[Count], Field(min_length=2, max_length=2)]] = {}


KNOWN_KEYS = frozenset(HuggingFaceConfig.model_fields) | llama.KNOWN_KEYS

# All keys of a self-contained model: those of configuration_kerple.py, and those of the export.
SELF_CONTAINED_KEYS = frozenset((*SAME_VALUE.values(), *BLOCK_SETTINGS.values()))
SELF_CONTAINED_KEYS |= {"model_type", "hidden_act", "layer_norm_eps", "tie_word_embeddings"}
SELF_CONTAINED_KEYS |= {"use_cache", "training_length", "inference_mode", TOKENIZER_IDS}
SELF_CONTAINED_KEYS |= {"positional_method", "positional_options"}
SELF_CONTAINED_KEYS |= {POSITIONAL_CODE, TRAINED_DOCUMENTS}
# Keys that transformers and libraries around it add, besides those of their own configurations.
ADDED_KEYS = frozenset(("auto_map", "torch_dtype", "quantization_config", "tokenizer_class"))
ADDED_KEYS |= {"num_labels", "is_decoder", "add_cross_attention"}
# Keys of other models, which transformers would ignore, or make it quantize the weights.
REJECTED_KEYS = ("quantization_config", "num_experts", "num_local_experts", "n_routed_experts")
# From this similarity on (of difflib), a key is a misspelling of one that is not in the file.
_MISSPELLED = 0.88


def stock_type(config: Config) -> str | None:
    """The model_type of transformers' own model that can represent this one: gpt_neox, or a family
    in `llama.py`. None if there is none, as for positional methods other than rotary and scalings
    that transformers does not support.
    """
    model, scaling = config.model, config.model.pos_emb_options.get("scaling")
    if model.pos_emb != "rotary" or not (scaling is None or scaling in SCALINGS):
        return None
    is_neox = (
        model.norm == "layernorm"
        and model.use_bias_in_norms
        and not model.gated
        and model.use_bias_in_mlp
        and model.use_bias_in_attn_linear == model.use_bias_in_attn_output
        and not model.use_qk_layernorm
        and model.num_kv_heads == model.num_attention_heads
        and model.head_size * model.num_attention_heads == model.hidden_size
        and model.window is None
    )
    if is_neox:
        return "gpt_neox"
    return llama.family_of(config)


def stock_config(model: ModelConfig, padded_vocab_size: int, model_type: str) -> dict[str, Any]:
    """config.json of transformers' own model, with the rotary keys of both transformers 5 and 4."""
    # Scaling of the positions.
    options = model.positional_options
    rotary = {"rotary_pct": options["fraction"], "rotary_emb_base": options["base"]}
    scaling = options.get("scaling")
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        values = dict(REQUIRED.get(scaling, {}))
        for name in SCALINGS[scaling]:
            if options.get(name) is not None:
                values[name] = options[name]
        if "trained_length" in SCALINGS[scaling]:
            values.setdefault("trained_length", model.max_position_embeddings)
        rope = {"rope_type": scaling}
        for name, value in values.items():
            rope[RENAMED.get(name, name)] = value

    # Keys of the family.
    if model_type == "gpt_neox":
        names, own = ROTARY, _common_config(model, padded_vocab_size)
        own |= {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
        own |= {
            "attention_bias": model.use_bias_in_attn_linear,
            "intermediate_size": model.mlp_features,
        }
    else:
        names = {"rotary_emb_base": LLAMA_ROTARY["rotary_emb_base"]}  # all dimensions are rotated
        own = llama.config_json(model, padded_vocab_size, model_type)
    if scaling == "dynamic":
        own["max_position_embeddings"] = (
            options.get("trained_length") or model.max_position_embeddings
        )

    # The rotary keys of transformers 5 are in rope_parameters, those of transformers 4 beside it.
    own["rope_scaling"] = None
    if scaling is not None:
        own["rope_scaling"] = dict(rope)
    own["rope_parameters"] = rope
    for ours, (inside, top, _) in names.items():
        rope[inside] = own[top] = rotary[ours]
    return own


def self_contained_config(model: ModelConfig, padded_vocab_size: int) -> dict[str, Any]:
    """config.json of a self-contained model, without `auto_map` and `inference_mode`."""
    return {
        "architectures": ["KerpleForCausalLM"],
        "model_type": "kerple",
        **_common_config(model, padded_vocab_size),
        **{theirs: getattr(model, ours) for ours, theirs in BLOCK_SETTINGS.items()},
        "training_length": model.seq_length,
        "positional_method": model.pos_emb,
        "positional_options": model.positional_options,
        POSITIONAL_CODE: code_digests(model),
    }


def _common_config(model: ModelConfig, padded_vocab_size: int) -> dict[str, Any]:
    return {
        **{theirs: getattr(model, ours) for ours, theirs in SAME_VALUE.items()},
        "vocab_size": padded_vocab_size,
        "hidden_act": ACTIVATIONS[
            model.activation, model.activation == "gelu" and model.bias_gelu_fusion
        ][0],
        "layer_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": not model.no_weight_tying,
        "use_cache": True,
    }


def config_from(theirs: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Our configuration keys from the config.json of GPT-NeoX, Pythia, a family in `llama.py` or a
    self-contained model.

    Raises CheckpointError, naming `source`, for other kinds of models and for settings this project
    does not support.
    """
    # Reject other models before their keys, which may have another meaning.
    model_type = theirs.get("model_type")
    if model_type not in ("gpt_neox", "kerple", *llama.ARCHITECTURES):
        raise CheckpointError(
            f"{source}: model_type {model_type!r} is not supported; gpt_neox (GPT-NeoX, Pythia), "
            f"{', '.join(llama.ARCHITECTURES)} and this project's kerple are"
        )
    _check_names(theirs, source)
    try:
        given = HuggingFaceConfig.model_validate(theirs)
    except ValidationError as error:
        raise CheckpointError(
            f"{source}: {error_text(error.errors(include_url=False)[0])}"
        ) from error
    if model_type in llama.ARCHITECTURES:
        keys = llama.keys_from(theirs, family_defaults(str(model_type)), source)
        return {**keys, **_rotary_keys(theirs, source, LLAMA_ROTARY)}

    # Keys that depend on the kind of model.
    theirs = {name: value for name, value in given.model_dump().items() if value is not None}
    hidden_act = theirs["hidden_act"]
    activation, fused = next(
        (key for key, names in ACTIVATIONS.items() if hidden_act in names), (None, False)
    )
    if activation is None or (model_type == "gpt_neox" and activation in ("swiglu", "geglu")):
        supported = ", ".join(name for names in ACTIVATIONS.values() for name in names)
        raise CheckpointError(
            f"{source}: hidden_act {hidden_act!r} is not supported; supported: {supported}"
        )
    if model_type == "gpt_neox":
        own = {
            "pos_emb": "rotary",
            **_rotary_keys(theirs, source, ROTARY),
            "norm": "layernorm",
            "layernorm_epsilon": theirs["layer_norm_eps"],
            "use_bias_in_attn_linear": theirs["attention_bias"],
            # transformers' default is the size of GPT-NeoX-20B.
            "intermediate_size": theirs.get("intermediate_size", 24576),
        }
    else:
        epsilon_key = "rms_norm_epsilon"
        if theirs["norm"] == "layernorm":
            epsilon_key = "layernorm_epsilon"
        own = {
            "pos_emb": theirs["positional_method"],
            "pos_emb_options": theirs.get("positional_options") or {},
            "seq_length": theirs.get("training_length", theirs["max_position_embeddings"]),
            "norm": theirs["norm"],
            epsilon_key: theirs["layer_norm_eps"],
            **_block_keys(theirs, gated=activation in ("swiglu", "geglu")),
        }
    return {
        **{ours: theirs[name] for ours, name in SAME_VALUE.items()},
        "activation": activation,
        "bias_gelu_fusion": fused,
        "seq_length": theirs["max_position_embeddings"],
        "no_weight_tying": not theirs["tie_word_embeddings"],
        **own,
    }


def _check_names(theirs: Mapping[str, Any], source: str) -> None:
    """Raises CheckpointError for a key of another kind of model, for an unknown key of a
    self-contained model, and for one of another model that is nearly the name of a key that is
    missing: its default would be used instead.
    """
    if "kerple_positional" in theirs:
        raise CheckpointError(
            f"{source}: the model was saved with a method of kerple.transformers, which is no part "
            "of an imported model; evaluate it with --positional FOLDER, or, if its weights have "
            "no method, remove kerple_positional from config.json"
        )
    for name in REJECTED_KEYS:
        if theirs.get(name) is not None:
            raise CheckpointError(
                f"{source}: {name} is not supported; {theirs['model_type']} models do not have it"
            )
    known, similarity = set(KNOWN_KEYS), _MISSPELLED
    accepted = known
    if theirs["model_type"] == "kerple":
        from transformers import GenerationConfig, PretrainedConfig

        known, similarity = set(SELF_CONTAINED_KEYS), 0.0
        accepted = known | ADDED_KEYS
        accepted.update(PretrainedConfig().to_dict(), GenerationConfig().to_dict())
    missing = sorted(known - theirs.keys()) or sorted(known)
    for name in theirs:
        nearest = difflib.get_close_matches(name, missing, n=1, cutoff=similarity)
        if nearest and name not in accepted and not name.startswith("_"):
            raise CheckpointError(
                f"{source}: {shortened(name)} is not a known key; nearest: {nearest[0]}; rename "
                "it, or remove it"
            )


def _block_keys(theirs: Mapping[str, Any], gated: bool) -> dict[str, Any]:
    """Our keys for the blocks of a self-contained model. `theirs` has no None values."""
    sizes = {
        "num_kv_heads": "num_key_value_heads",
        "head_size": "head_dim",
        "intermediate_size": "intermediate_size",
    }
    keys = {ours: theirs[name] for ours, name in sizes.items() if name in theirs}
    if gated and "intermediate_size" in keys:  # GPT-NeoX divides it by three
        keys["intermediate_size"] *= 3
    if "attention_window" in theirs:
        keys["sliding_window_width"] = theirs["attention_window"] - 1
    for ours, name in BLOCK_SETTINGS.items():
        if ours.startswith("use_"):
            keys[ours] = theirs[name]
    return keys


def family_defaults(model_type: str) -> dict[str, Any]:
    """The defaults of transformers' configuration class, without keys that all its models have."""
    from transformers import AutoConfig, PretrainedConfig

    defaults = AutoConfig.for_model(model_type).to_dict()
    for name in (
        *PretrainedConfig().to_dict(),
        *llama.IGNORED_KEYS,
        "rope_parameters",
        "rope_scaling",
        "layer_types",
    ):
        if name != "tie_word_embeddings":
            defaults.pop(name, None)
    if model_type == "llama":
        defaults |= {"head_dim": None, "num_key_value_heads": None}  # derived from other keys
    elif model_type == "mistral":
        defaults["head_dim"] = None
    return defaults


def _rotary_keys(
    theirs: Mapping[str, Any], source: str, names: Mapping[str, tuple[str, str, float]]
) -> dict[str, Any]:
    # Base and fraction, the same for all layers.
    # Like transformers, prefer rope_scaling, which users add to a file with rope_parameters.
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    for name, value in rope.items():
        if isinstance(value, dict):
            raise CheckpointError(
                f"{source}: rope_parameters has the entry {name}, for one type of layers, which is "
                "not supported; all layers must have the same rotary positions"
            )
    keys = {}
    for ours, (name, top, default) in names.items():
        keys[ours] = rope.get(name, theirs.get(top, default))
    if names is LLAMA_ROTARY and keys["rotary_pct"] != 1:
        raise CheckpointError(
            f"{source}: partial_rotary_factor {keys['rotary_pct']!r} is not supported; only 1 is"
        )

    # The scaling and its options.
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    scalings = {"default": (), **SCALINGS}
    if not isinstance(rope_type, str) or rope_type not in scalings:
        raise CheckpointError(
            f"{source}: rope_type {rope_type!r} is not supported; default, {', '.join(SCALINGS)} "
            "are"
        )
    scaling_names = {option: RENAMED.get(option, option) for option in scalings[rope_type]}
    known = {"rope_type", "type", *scaling_names.values(), *(name for name, _, _ in names.values())}
    for name, value in rope.items():
        if name not in known and value is not None:
            raise CheckpointError(
                f"{source}: {name} {value!r} of rope_type {rope_type!r} is not supported"
            )
    if rope_type == "default":
        return keys
    options = {"scaling": rope_type}
    for ours, name in scaling_names.items():
        if rope.get(name) is not None:
            options[ours] = rope[name]
    # transformers 5 prefers the key beside rope_parameters to the one in it. (transformers 4 does
    # not, so there the comparison of the logits fails.)
    trained_length = theirs.get("original_max_position_embeddings")
    if "trained_length" in scaling_names and trained_length is not None:
        options["trained_length"] = trained_length
    return {**keys, "pos_emb_options": options}
