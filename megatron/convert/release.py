"""Writing the layout of the KERPLE authors' release, which is GPT-NeoX's of 2022, at any tensor-parallel size.

Reading it needs no conversion: `load_model` and `load:` accept it. Writing it adds buffers that the release's code
stores in its files, and splits all tensors over the tensor-parallel ranks as that code does, including positional ones.
The folder has neither an optimizer state nor random states, so its configuration sets `no_load_optim` and
`no_load_rng`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kerple.positional import method_class
from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.layers import ROW_PARALLEL_BIASES, SCALE_NAMES, check_sizes, layer_state, load_layers
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config
from megatron.convert.hugging_face_config import options_beyond_2022
from megatron.convert.output import (
    Report,
    check_same_logits,
    new_folder,
    report_exact_distances,
    rounded,
    write_checkpoint,
)
from megatron.convert.weights import cast, layers_with_weights
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings

# Positional methods of the release's code, by its names. This list cannot be derived from the registry, which contains
# more methods.
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

# Options of a method -> configuration keys. The release supports no other options.
OPTION_KEYS = {
    "rotary": {"fraction": "rotary_pct", "base": "rotary_emb_base"},
    "rpe": {"num_buckets": "rpe_num_buckets", "max_distance": "rpe_max_distance"},
}

# Activations of the MLP -> the release's names.
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "swish"}

# Tensors that are split over the tensor-parallel ranks, and the dimension. All others are replicated.
PARTITION_DIM = {
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

# Configuration keys that the release supports, besides those of OPTION_KEYS.
CONFIG_KEYS = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length"),
    *("norm", "layernorm_epsilon", "rms_norm_epsilon", "no_weight_tying", "gpt_j_residual"),
    "bias_gelu_fusion",
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
    report: Report = print,
) -> None:
    """Write `model` to the new folder `output` in the release's layout, without an optimizer.

    Raises CheckpointError, and writes nothing, for a method or option that the release does not support, a
    tensor-parallel size that does not divide the heads and the vocabulary, or if the written model gives different
    logits.
    """
    vocabulary = model.settings.padded_vocab_size
    if names := options_beyond_2022(config.model):
        raise CheckpointError(
            f"the release's blocks do not support {', '.join(names)}; its format cannot store this model"
        )
    config_values = original_config(config, vocabulary, tensor_parallel)
    for name, size in (("heads", config.model.num_attention_heads), ("rows of the vocabulary", vocabulary)):
        if size % tensor_parallel:
            raise CheckpointError(f"tensor-parallel size {tensor_parallel} does not divide the {size} {name}")
    source = rounded(model, dtype)
    report_exact_distances(config, f"{output}: release layout", report)
    summed = ROW_PARALLEL_BIASES if config.model.gpt_j_residual else ()
    norm_names = {ours: theirs for theirs, ours in SCALE_NAMES.items()} if config.model.norm == "rmsnorm" else {}

    def states() -> Iterator[tuple[int, list[dict[str, Tensor]]]]:
        for index, layer in layers_with_weights(model).items():
            state = {**layer_state(layer), **original_buffers(model, config_values["pos_emb"], index)}
            state |= {name: state[name] / tensor_parallel for name in summed if name in state}
            state = {norm_names.get(name, name): tensor for name, tensor in state.items()}
            yield index, split_for_ranks(state, tensor_parallel, dtype)

    with new_folder(output) as folder:
        entries = deepspeed_state(iteration, tensor_parallel)
        step = write_checkpoint(folder, iteration, states(), config_values, model.settings, entries)
        written_settings = ModelSettings(checkpoint_config(step).model, vocabulary)
        check_sizes(step, written_settings)
        written = GPT(written_settings).eval()
        load_layers(layers_with_weights(written), step)
        check_same_logits(source, written, vocabulary, config, f"{output}: release layout", report)


def original_config(config: Config, padded_vocab_size: int, tensor_parallel: int) -> dict[str, Any]:
    """The configuration in the release's keys. Raises CheckpointError for what they cannot express."""
    method = method_class(config.model.pos_emb)
    name = next((name for name in METHODS if method_class(name) is method), None)
    if name is None:
        raise CheckpointError(
            f"pos_emb {config.model.pos_emb}: not supported by the release, which supports {', '.join(METHODS)}"
        )
    flat = config.to_flat()
    values = {key: flat[key] for key in CONFIG_KEYS if key in flat}
    for option, value in config.model.positional_options.items():
        if option not in OPTION_KEYS.get(name, {}):
            raise CheckpointError(f"pos_emb_options: the release's {name} has no option {option}")
        values[OPTION_KEYS[name][option]] = value
    return {
        **values,
        "pos_emb": name,
        "activation": ACTIVATIONS[config.model.activation],
        "max_position_embeddings": config.model.max_position_embeddings,
        "hidden_dropout": config.model.hidden_dropout,
        "attention_dropout": config.model.attention_dropout,
        "padded_vocab_size": padded_vocab_size,
        "pipe_parallel_size": 1,
        "model_parallel_size": tensor_parallel,
        "output_layer_parallelism": "column",
        "no_load_optim": True,
        "no_load_rng": True,
    }


def deepspeed_state(iteration: int, tensor_parallel: int) -> dict[str, Any]:
    """What DeepSpeed reads from `mp_rank_XX_model_states.pt`, in the release's version and in later ones. `module` is
    None because the weights are in the layer files.
    """
    return {
        "module": None,
        "optimizer": None,
        "lr_scheduler": None,
        "buffer_names": [],
        "csr_tensor_module_names": [],
        "sparse_tensor_module_names": [],
        "skipped_steps": 0,
        "global_steps": iteration,
        "dp_world_size": 1,
        "mp_world_size": tensor_parallel,
    }


def original_buffers(model: GPT, pos_emb: str, index: int) -> dict[str, Tensor]:
    """Tensors in the release's file of layer `index` that this model computes."""
    method: Any = next(iter(model.positional_methods().values()), None)

    def inverse_frequencies(size: int) -> Tensor:
        """base^(-2i/size), `[size / 2]`."""
        base: float = method.angles.base
        return 1.0 / base ** (torch.arange(0, size, 2).float() / size)

    if pos_emb == "sinusoidal" and index == 0:
        return {"position_embeddings.inv_freq": inverse_frequencies(model.settings.config.hidden_size)}
    if not 2 <= index < model.settings.config.num_layers + 2:
        return {}
    if pos_emb == "rotary":
        return {"attention.rotary_emb.inv_freq": inverse_frequencies(method.rotated)}
    if pos_emb == "alibi":
        return {"attention.alibi_embed.slopes": torch.tensor(method.slopes)}
    if pos_emb == "kerple_power_original":
        return {"attention.rpe.bias_a": torch.tensor(method.slopes).reshape(-1, 1, 1)}
    return {}


def split_for_ranks(state: dict[str, Tensor], ranks: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The tensors of one layer for each tensor-parallel rank."""
    shards: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for name, tensor in state.items():
        pieces = tensor.chunk(ranks, PARTITION_DIM[name]) if name in PARTITION_DIM else [tensor] * ranks
        for shard, piece in zip(shards, pieces, strict=True):
            shard[name] = cast(piece, dtype)
    return shards
