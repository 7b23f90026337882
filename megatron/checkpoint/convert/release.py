"""The layout of the KERPLE authors' release, which is GPT-NeoX's of 2022, at any tensor-parallel size.

Reading it needs no conversion: `load_model` and `load:` take it as it is. Writing it adds what its code computes and
keeps in its files, and splits tensors over the tensor-parallel ranks as that code does, the positional ones included.

Legend: h heads, e hidden size, r rotated dimensions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kerple.positional import method_class
from megatron.checkpoint.convert.compare import check_same_logits
from megatron.checkpoint.convert.folder import new_folder
from megatron.checkpoint.convert.layout import write_checkpoint
from megatron.checkpoint.convert.names import layers_with_weights
from megatron.checkpoint.convert.weights import cast, rounded
from megatron.checkpoint.layers import layer_state, load_layers
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings

# Methods of the release, under its names: a fact about its code, which the registry, where more are added, cannot tell.
METHODS = (
    "none",
    "learned",
    "sinusoidal",
    "rotary",
    "rpe",
    "alibi",
    "kerple_log",
    "kerple_power_ap_",
    "kerple_power__ap",
    "kerple_power_ap_ap",
    "kerple_power_original",
)

# A method's options as keys of the configuration; the release has no others.
OPTION_KEYS = {
    "rotary": {"fraction": "rotary_pct", "base": "rotary_emb_base"},
    "rpe": {"num_buckets": "rpe_num_buckets", "max_distance": "rpe_max_distance"},
}

# Tensors split over the tensor-parallel ranks, and the dimension; all others are the same on every rank.
PARTITION = {
    "word_embeddings.weight": 0,
    "attention.query_key_value.weight": 0,
    "attention.query_key_value.bias": 0,
    "attention.dense.weight": 1,
    "attention.rpe.bias_p": 0,
    "attention.rpe.bias_a": 0,
    "attention.rpe.wei_p": 0,
    "attention.rpe.wei_a": 0,
    "attention.rpe.weight": 1,
    "attention.alibi_embed.slopes": 0,
    "mlp.dense_h_to_4h.weight": 0,
    "mlp.dense_h_to_4h.bias": 0,
    "mlp.dense_4h_to_h.weight": 1,
    "final_linear.weight": 0,
}

# Keys of a run's configuration that the release knows, beside those of its options.
KEYS = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"),
    *("norm", "layernorm_epsilon", "rms_norm_epsilon", "no_weight_tying", "gpt_j_residual"),
    *("hidden_dropout", "attention_dropout", "bias_gelu_fusion"),
    *("init_method", "output_layer_init_method", "init_method_std", "make_vocab_size_divisible_by"),
    *("tokenizer_type", "vocab_file", "merge_file"),
    *("optimizer", "gradient_clipping", "weight_decay", "train_iters", "lr_decay_iters", "lr_decay_style", "warmup"),
    *("min_lr", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "split", "seed"),
)


def to_release(
    model: GPT,
    config: Config,
    output: str | Path,
    *,
    iteration: int = 0,
    tensor_parallel: int = 1,
    dtype: torch.dtype = torch.float32,
    report: Callable[[str], None] = print,
) -> None:
    """Write `model` to the new folder `output` in the release's layout, without an optimizer.

    Raises CheckpointError, and writes nothing, for a method or an option that the release has not, a tensor-parallel
    size that does not divide the heads and the vocabulary, or if what was written gives other logits.
    """
    settings = model.settings
    keys = _keys(config, settings, tensor_parallel)
    for name, size in (("heads", settings.num_heads), ("rows of the vocabulary", settings.padded_vocab_size)):
        if size % tensor_parallel:
            raise CheckpointError(f"tensor-parallel size {tensor_parallel} does not divide the {size} {name}")
    source = rounded(model, dtype)
    extra = computed_tensors(model, keys["pos_emb"])
    with new_folder(output) as folder:
        states = (
            (index, split(_ordered({**layer_state(layer), **extra(index)}), tensor_parallel, dtype))
            for index, layer in layers_with_weights(model).items()
        )
        step = write_checkpoint(folder, iteration, states, keys, settings)
        written = GPT(settings).eval()
        load_layers(layers_with_weights(written), step)
        check_same_logits(source, written, settings.padded_vocab_size, config, f"{output}: release layout", report)


def release_name(pos_emb: str) -> str:
    """The release's name of a method. Raises CheckpointError for one that it has not."""
    for name in METHODS:
        if method_class(name) is method_class(pos_emb):
            return name
    raise CheckpointError(f"pos_emb {pos_emb}: the release has no such method; it has {', '.join(METHODS)}")


def _keys(config: Config, settings: ModelSettings, tensor_parallel: int) -> dict[str, Any]:
    name = release_name(config.model.pos_emb)
    flat = config.to_flat()
    keys = {key: flat[key] for key in KEYS if key in flat}
    for option, value in config.model.positional_options.items():
        if option not in OPTION_KEYS.get(name, {}):
            raise CheckpointError(f"pos_emb_options: the release's {name} has no option {option}")
        keys[OPTION_KEYS[name][option]] = value
    return {
        **keys,
        "pos_emb": name,
        "padded_vocab_size": settings.padded_vocab_size,
        "pipe_parallel_size": 1,
        "model_parallel_size": tensor_parallel,
    }


def computed_tensors(model: GPT, name: str) -> Callable[[int], dict[str, Tensor]]:
    """A function from a layer's index to the tensors that the release's files hold there and this model computes."""
    settings = model.settings
    method = next(iter(model.positional_methods().values()), None)
    blocks = range(2, settings.num_layers + 2)

    def of(index: int) -> dict[str, Tensor]:
        if name == "sinusoidal" and index == 0:
            return {"position_embeddings.inv_freq": _frequencies(settings.hidden_size, method.angles.base)}
        if index not in blocks:
            return {}
        if name == "rotary":
            return {"attention.rotary_emb.inv_freq": _frequencies(method.rotated, method.angles.base)}
        if name == "alibi":
            return {"attention.alibi_embed.slopes": torch.tensor(method.slopes)}
        if name == "kerple_power_original":
            return {"attention.rpe.bias_a": torch.tensor(method.slopes).reshape(-1, 1, 1)}
        return {}

    return of


def _frequencies(size: int, base: float) -> Tensor:
    """base^(-2i/size), `[size / 2]`."""
    return 1.0 / base ** (torch.arange(0, size, 2).float() / size)


def _ordered(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Norms, attention, MLP: the order of the release's files."""
    order = ("input_layernorm", "attention.query_key_value", "attention.", "post_attention_layernorm", "mlp.")
    rank = {name: next((i for i, prefix in enumerate(order) if name.startswith(prefix)), -1) for name in state}
    return {name: state[name] for name in sorted(state, key=lambda name: rank[name])}


def split(state: dict[str, Tensor], ranks: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The state of one layer for each tensor-parallel rank."""
    pieces = {
        name: tensor.chunk(ranks, PARTITION[name]) if name in PARTITION else [tensor] * ranks
        for name, tensor in state.items()
    }
    return [{name: cast(piece[rank], dtype) for name, piece in pieces.items()} for rank in range(ranks)]
