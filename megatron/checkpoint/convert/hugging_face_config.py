"""Our configuration's keys and config.json's, both directions, declared once."""

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config
from megatron.model.settings import ModelSettings

# Ours -> config.json, where the value is the same. padded_vocab_size is the number of rows of the weights.
SAME = {
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

# Rotary: ours -> inside config.json's rope_parameters, and at its top in files of transformers 4.
ROTARY = {
    "rotary_pct": ("partial_rotary_factor", "rotary_pct", 0.25),
    "rotary_emb_base": ("rope_theta", "rotary_emb_base", 10_000),
}

# Scalings of rotary positions that transformers has: ours -> inside rope_parameters, name by name.
SCALINGS = {
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "trained_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
}

# (activation, bias_gelu_fusion) -> hidden_act. The fused GELU is the tanh form, which has several names there.
ACTIVATIONS = {
    ("gelu", False): ("gelu",),
    ("gelu", True): ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    ("relu", False): ("relu",),
    ("silu", False): ("silu", "swish"),
}

# What this model always has.
REQUIRED = {"attention_bias": True}

# What a config.json of GPT-NeoX means where it says nothing.
NEOX_DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}


def is_stock(config: Config) -> bool:
    """Whether transformers' own GPTNeoXForCausalLM is this model: LayerNorm, and rotary positions, plain or with a
    scaling that it has too.
    """
    scaling = config.model.pos_emb_options.get("scaling")
    plain = scaling is None or scaling in SCALINGS
    return config.model.pos_emb == "rotary" and config.model.norm == "layernorm" and plain


def common_keys(config: Config, settings: ModelSettings) -> dict[str, Any]:
    """What config.json says for both kinds of model."""
    model = config.model
    values = {theirs: getattr(model, ours) for ours, theirs in SAME.items()}
    fused = model.activation == "gelu" and model.bias_gelu_fusion
    return {
        **values,
        "vocab_size": settings.padded_vocab_size,
        "hidden_act": ACTIVATIONS[model.activation, fused][0],
        "layer_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": settings.tied_embeddings,
        "use_cache": True,
    }


def stock_keys(config: Config, settings: ModelSettings) -> dict[str, Any]:
    """config.json of a GPTNeoXForCausalLM. The rotary keys are given as transformers 5 reads them and as 4 does."""
    options = config.model.positional_options
    values = {"rotary_pct": options["fraction"], "rotary_emb_base": options["base"]}
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        **common_keys(config, settings),
        **REQUIRED,
        "intermediate_size": 4 * settings.hidden_size,
        "rope_parameters": {
            **_scaling_keys(options, config),
            **{inside: values[ours] for ours, (inside, _, _) in ROTARY.items()},
        },
        **{top: values[ours] for ours, (_, top, _) in ROTARY.items()},
    }


def _scaling_keys(options: Mapping[str, Any], config: Config) -> dict[str, Any]:
    scaling = options.get("scaling")
    if scaling is None:
        return {"rope_type": "default"}
    given = {name: options[name] for name in SCALINGS[scaling] if options.get(name) is not None}
    if "trained_length" in SCALINGS[scaling]:
        given.setdefault("trained_length", config.model.max_position_embeddings)
    return {"rope_type": scaling, **{SCALINGS[scaling][name]: value for name, value in given.items()}}


def self_contained_keys(config: Config, settings: ModelSettings) -> dict[str, Any]:
    """config.json of the model whose files are in the folder itself."""
    return {
        "architectures": ["KerpleForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_kerple.KerpleConfig",
            "AutoModelForCausalLM": "modeling_kerple.KerpleForCausalLM",
        },
        "model_type": "kerple",
        **common_keys(config, settings),
        "norm": settings.norm,
        "positional_method": config.model.pos_emb,
        "positional_options": dict(settings.pos_emb_options),
    }


def keys_from(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Our keys from a config.json that `stock_keys` or `self_contained_keys` could have written.

    Raises CheckpointError for another kind of model, and for what this project has not.
    """
    kind = theirs.get("model_type")
    if kind not in ("gpt_neox", "kerple"):
        raise CheckpointError(
            f"{where}: model_type is {kind!r}; gpt_neox (GPT-NeoX, Pythia) and this project's kerple can be converted"
        )
    theirs = {**NEOX_DEFAULTS, **theirs}
    missing = [name for name in SAME.values() if name not in theirs]
    if missing:
        raise CheckpointError(f"{where}: lacks {', '.join(missing)}; it is not the config.json of a whole model")
    own = _stock(theirs, where) if kind == "gpt_neox" else _self_contained(theirs, where)
    return {
        **{ours: theirs[name] for ours, name in SAME.items()},
        **_activation(theirs["hidden_act"], where),
        "seq_length": theirs["max_position_embeddings"],
        "no_weight_tying": not theirs["tie_word_embeddings"],
        **own,
    }


def _stock(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name, value in {**REQUIRED, "intermediate_size": 4 * theirs["hidden_size"]}.items():
        if theirs.get(name, value) != value:
            raise CheckpointError(f"{where}: {name} is {theirs[name]!r}; only {value!r} can be converted")
    return {
        "pos_emb": "rotary",
        **_rotary(theirs, where),
        "norm": "layernorm",
        "layernorm_epsilon": theirs["layer_norm_eps"],
    }


def _self_contained(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    norm = theirs.get("norm", "layernorm")
    return {
        "pos_emb": theirs["positional_method"],
        "pos_emb_options": theirs.get("positional_options") or {},
        "norm": norm,
        "layernorm_epsilon" if norm == "layernorm" else "rms_norm_epsilon": theirs["layer_norm_eps"],
    }


def _activation(name: str, where: str) -> dict[str, Any]:
    for (activation, fused), names in ACTIVATIONS.items():
        if name in names:
            return {"activation": activation, "bias_gelu_fusion": fused}
    known = ", ".join(name for names in ACTIVATIONS.values() for name in names)
    raise CheckpointError(f"{where}: hidden_act {name!r} is not one of those this project has: {known}")


def _rotary(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    inside = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = inside.get("rope_type", inside.get("type", "default"))
    keys = {ours: inside.get(name, theirs.get(top, default)) for ours, (name, top, default) in ROTARY.items()}
    if kind == "default":
        return keys
    if kind not in SCALINGS:
        raise CheckpointError(f"{where}: rope_type {kind!r} is not supported; default, {', '.join(SCALINGS)} are")
    known = {"rope_type", "type", *SCALINGS[kind].values(), *(name for name, _, _ in ROTARY.values())}
    for name, value in inside.items():
        if name not in known and value is not None:
            raise CheckpointError(f"{where}: {name} {value!r} of rope_type {kind!r} is not supported")
    options = {ours: inside[name] for ours, name in SCALINGS[kind].items() if inside.get(name) is not None}
    return {**keys, "pos_emb_options": {"scaling": kind, **options}}
