"""Our configuration keys and those of Hugging Face's config.json, in both directions, declared once."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config
from megatron.model.settings import ModelSettings
from megatron.utils.errors import first_problem

# Ours -> config.json, with the same value. padded_vocab_size is the number of rows of the embedding.
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

# Rotary: ours -> (name in rope_parameters, top-level name in files of transformers 4, default).
ROTARY = {
    "rotary_pct": ("partial_rotary_factor", "rotary_pct", 0.25),
    "rotary_emb_base": ("rope_theta", "rotary_emb_base", 10_000),
}

# Rotary scalings that transformers supports: our option -> name in rope_parameters.
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

# (activation, bias_gelu_fusion) -> hidden_act, the first of which is written. The fused GELU is the tanh form.
ACTIVATIONS = {
    ("gelu", False): ("gelu",),
    ("gelu", True): ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    ("relu", False): ("relu",),
    ("silu", False): ("silu", "swish"),
}


class HuggingFaceConfig(BaseModel):
    """Types and transformers' defaults of the keys in config.json that `config_from` reads. Others are ignored."""

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
    intermediate_size: int | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rotary_pct: float = 0.25
    rotary_emb_base: float = 10_000
    norm: str = "layernorm"
    positional_method: str = ""
    positional_options: dict[str, Any] | None = None


KNOWN_KEYS = frozenset(HuggingFaceConfig.model_fields)


def is_stock(config: Config) -> bool:
    """Whether transformers' own GPTNeoXForCausalLM can represent the model: LayerNorm, and rotary positions without
    scaling or with one that transformers supports.
    """
    scaling = config.model.pos_emb_options.get("scaling")
    supported = scaling is None or scaling in SCALINGS
    return config.model.pos_emb == "rotary" and config.model.norm == "layernorm" and supported


def stock_config(config: Config, settings: ModelSettings) -> dict[str, Any]:
    """config.json of a GPTNeoXForCausalLM, with the rotary keys of both transformers 5 and 4."""
    options = config.model.positional_options
    rotary = {"rotary_pct": options["fraction"], "rotary_emb_base": options["base"]}
    scaling = options.get("scaling")
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        values = {name: options[name] for name in SCALINGS[scaling] if options.get(name) is not None}
        if "trained_length" in SCALINGS[scaling]:
            values.setdefault("trained_length", config.model.max_position_embeddings)
        rope = {"rope_type": scaling, **{SCALINGS[scaling][name]: value for name, value in values.items()}}
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        **_common_config(config, settings),
        "attention_bias": True,
        "intermediate_size": 4 * settings.hidden_size,
        "rope_parameters": {**rope, **{inside: rotary[ours] for ours, (inside, _, _) in ROTARY.items()}},
        **{top: rotary[ours] for ours, (_, top, _) in ROTARY.items()},
    }


def self_contained_config(config: Config, settings: ModelSettings) -> dict[str, Any]:
    """config.json of a self-contained model."""
    return {
        "architectures": ["KerpleForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_kerple.KerpleConfig",
            "AutoModelForCausalLM": "modeling_kerple.KerpleForCausalLM",
        },
        "model_type": "kerple",
        **_common_config(config, settings),
        "norm": settings.norm,
        "positional_method": config.model.pos_emb,
        "positional_options": dict(settings.pos_emb_options),
    }


def _common_config(config: Config, settings: ModelSettings) -> dict[str, Any]:
    model = config.model
    return {
        **{theirs: getattr(model, ours) for ours, theirs in SAME_VALUE.items()},
        "vocab_size": settings.padded_vocab_size,
        "hidden_act": ACTIVATIONS[model.activation, model.activation == "gelu" and model.bias_gelu_fusion][0],
        "layer_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": settings.tied_embeddings,
        "use_cache": True,
    }


def config_from(theirs: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Our configuration keys from the config.json of GPT-NeoX, Pythia or a self-contained model.

    Raises CheckpointError, naming `source`, for other kinds of models and for settings this project does not support.
    """
    model_type = theirs.get("model_type")
    if model_type not in ("gpt_neox", "kerple"):
        raise CheckpointError(
            f"{source}: model_type {model_type!r} is not supported; gpt_neox (GPT-NeoX, Pythia) and this project's "
            "kerple are"
        )
    missing = [
        name for name, field in HuggingFaceConfig.model_fields.items() if field.is_required() and name not in theirs
    ]
    if missing:
        raise CheckpointError(f"{source}: lacks {', '.join(missing)}; it is not the config.json of a complete model")
    try:
        given = HuggingFaceConfig.model_validate(theirs)
    except ValidationError as error:
        raise CheckpointError(f"{source}: {first_problem(error)}") from error
    theirs = {name: value for name, value in given.model_dump().items() if value is not None}
    hidden_act = theirs["hidden_act"]
    activation, fused = next((key for key, names in ACTIVATIONS.items() if hidden_act in names), (None, False))
    if activation is None:
        supported = ", ".join(name for names in ACTIVATIONS.values() for name in names)
        raise CheckpointError(f"{source}: hidden_act {hidden_act!r} is not supported; supported: {supported}")
    if model_type == "gpt_neox":
        for name, value in {"attention_bias": True, "intermediate_size": 4 * theirs["hidden_size"]}.items():
            if theirs.get(name, value) != value:
                raise CheckpointError(f"{source}: {name} {theirs[name]!r} is not supported; only {value!r} is")
        own = {
            "pos_emb": "rotary",
            **_rotary_keys(theirs, source),
            "norm": "layernorm",
            "layernorm_epsilon": theirs["layer_norm_eps"],
        }
    else:
        norm = theirs["norm"]
        own = {
            "pos_emb": theirs["positional_method"],
            "pos_emb_options": theirs.get("positional_options") or {},
            "norm": norm,
            "layernorm_epsilon" if norm == "layernorm" else "rms_norm_epsilon": theirs["layer_norm_eps"],
        }
    return {
        **{ours: theirs[name] for ours, name in SAME_VALUE.items()},
        "activation": activation,
        "bias_gelu_fusion": fused,
        "seq_length": theirs["max_position_embeddings"],
        "no_weight_tying": not theirs["tie_word_embeddings"],
        **own,
    }


def _rotary_keys(theirs: Mapping[str, Any], source: str) -> dict[str, Any]:
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    keys = {ours: rope.get(name, theirs.get(top, default)) for ours, (name, top, default) in ROTARY.items()}
    if rope_type == "default":
        return keys
    if rope_type not in SCALINGS:
        raise CheckpointError(f"{source}: rope_type {rope_type!r} is not supported; default, {', '.join(SCALINGS)} are")
    known = {"rope_type", "type", *SCALINGS[rope_type].values(), *(name for name, _, _ in ROTARY.values())}
    for name, value in rope.items():
        if name not in known and value is not None:
            raise CheckpointError(f"{source}: {name} {value!r} of rope_type {rope_type!r} is not supported")
    options = {ours: rope[name] for ours, name in SCALINGS[rope_type].items() if rope.get(name) is not None}
    return {**keys, "pos_emb_options": {"scaling": rope_type, **options}}
