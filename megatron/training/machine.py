"""Whether a run fits this machine: attention backend, memory and number of samples, before the model is built."""

import os

import torch

from kerple import positional
from kerple.attention import Requirements, check_backend
from megatron.checkpoint.layers import DTYPES
from megatron.config import Config, UserError
from megatron.training.distributed import Layout

# Weights, gradients and Adam's two moments in float32; with half precision, the same in other proportions.
_BYTES_PER_PARAMETER = 16
_BYTES_PER_SAMPLE = 12  # of the sample index: a position in the shuffled order, and a document and an offset
# Only larger multiples of the memory are rejected: with offloading, or several ranks per host, estimates are rough.
_MAX_TIMES_MEMORY = 10


def check_machine(config: Config, layout: Layout, vocab_size: int) -> None:
    """Raises UserError if the attention backend cannot train on this device, or if the model or one micro-batch needs
    more than ten times the memory of this machine. `vocab_size` is the padded one.
    """
    model = config.model
    with torch.device("meta"):
        methods = positional.build_layers(model.pos_emb, model.shape, **model.positional_options)
    requirements = Requirements(
        weight=any(method.has_weight for method in methods),
        modify_scores=any(method.modifies_scores for method in methods),
        decay=any(method.has_decay for method in methods),
        dropout=model.attention_dropout > 0,
        training=True,
        dtype=DTYPES[config.precision.dtype],
        head_size=model.head_size,
        device=layout.device,
    )
    try:
        check_backend(model.attention_backend, requirements)
    except NotImplementedError as error:
        raise UserError(f'"attention_backend": {error}') from error

    hidden, layers = model.hidden_size, model.num_layers
    embeddings = vocab_size * hidden * (2 if model.no_weight_tying else 1)
    attention = 2 * hidden * model.head_size * (model.num_attention_heads + model.num_kv_heads)
    blocks = layers * (attention + (3 if model.gated else 2) * hidden * model.mlp_features)
    positions = sum(parameter.numel() for method in methods for parameter in method.parameters())
    shards = layout.pipeline_size * layout.tensor_size * (layout.data_size if config.optimizer.zero_stage == 3 else 1)
    parameters = embeddings + blocks + positions
    _check_memory(
        parameters * _BYTES_PER_PARAMETER // shards,
        f"training {parameters:,} parameters ({embeddings:,} in embeddings, {blocks:,} in blocks, {positions:,} in the "
        f"positional method) needs about {{}} per rank",
        "reduce padded_vocab_size or make_vocab_size_divisible_by, hidden_size or num_layers, or use more ranks",
    )
    micro_batch = config.batch.resolve(layout.data_size).micro_batch
    length = max(model.seq_length, config.training.seq_length_val or 0)
    # The backward pass needs at least the input of every block.
    states = micro_batch * length * hidden * DTYPES[config.precision.dtype].itemsize * layers // layout.pipeline_size
    _check_memory(
        states,
        f"train_micro_batch_size_per_gpu {micro_batch:,} at length {length:,} needs at least {{}} for hidden states",
        "reduce train_micro_batch_size_per_gpu or seq_length",
    )


def check_number_of_samples(num_samples: int) -> None:
    """Raises UserError if the index of all samples needs more memory than this machine has."""
    if num_samples * _BYTES_PER_SAMPLE > _host_memory():
        raise UserError(
            f"the run needs {num_samples:,} samples, whose index takes {_gigabytes(num_samples * 12)} of memory, more "
            "than this machine has; reduce train_iters, eval_iters or train_batch_size"
        )


def _check_memory(needed: int, problem: str, remedy: str) -> None:
    memory = _host_memory()
    if torch.cuda.is_available():
        memory = max(memory, torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    if needed > _MAX_TIMES_MEMORY * memory:
        raise UserError(f"{problem.format(_gigabytes(needed))}, but this machine has {_gigabytes(memory)}; {remedy}")


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
