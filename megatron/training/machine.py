"""Whether a run fits this machine: attention backend, memory and number of samples, before the model is built."""

from collections.abc import Callable

import torch

from kerple import positional
from kerple.attention import Requirements, check_backend
from megatron.checkpoint.layers import DTYPES
from megatron.config import Config, UserError
from megatron.training.distributed import Layout
from megatron.training.memory import check_memory
from megatron.utils.memory import free_memory

_BYTES_PER_SAMPLE = 12  # of the sample index: a position in the shuffled order, and a document and an offset


def check_machine(
    config: Config, layout: Layout, vocab_size: int, report: Callable[[str], None], *, force: bool
) -> None:
    """Raises UserError, on all ranks, if the attention backend cannot train on this device, or if training needs more
    memory than is free; with `force`, reports this instead. `vocab_size` is the padded one. Every rank must call this.
    """
    model = config.model
    with torch.device("meta"):
        methods = positional.build_layers(model.pos_emb, model.shape, **model.positional_options)
    requirements = Requirements(
        weight=any("weight" in method.hooks for method in methods),
        modify_scores=any("modify_scores" in method.hooks for method in methods),
        decay=any("decay" in method.hooks for method in methods),
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

    positions = sum(parameter.numel() for method in methods for parameter in method.parameters())
    check_memory(config, layout, vocab_size, positions, report, force=force)


def check_number_of_samples(num_samples: int) -> None:
    """Raises UserError if the index of all samples needs more memory than is free."""
    needed, free = num_samples * _BYTES_PER_SAMPLE, free_memory()
    if needed > free:
        raise UserError(
            f"the run needs {num_samples:,} samples, whose index takes {needed / 1e9:,.1f} GB of memory, but "
            f"{free / 1e9:,.1f} GB are free; reduce train_iters, eval_iters or train_batch_size"
        )
