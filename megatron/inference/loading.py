"""Loading a trained model as plain PyTorch, without a launcher, process group or DeepSpeed."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.checkpoint.configuration import (
    checkpoint_config,
    code_notice,
    files_notice,
    saved_training,
)
from megatron.checkpoint.directory import looks_like_checkpoint
from megatron.checkpoint.layers import (
    check_sizes,
    embedding_rows,
    load_layers,
    open_layers,
    weight_layers,
)
from megatron.checkpoint.manifest import find_valid_step
from megatron.config import Config
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from megatron.utils.errors import UserError


def load_model(
    directory: str | Path,
    iteration: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[GPT, Config]:
    """Load a checkpoint's model, in evaluation mode, and its configuration. Prints a line to
    standard error if the file of an external positional method has changed since it was trained, or
    files of the configuration contradict each other about the training.

    The model maps int64 tokens [batch, seq] to logits [batch, seq, padded vocabulary]. It is
    trainable.

    Args:
        directory: contains `latest` and global_stepN, as this project or the KERPLE release writes
            them, of any tensor-parallel size; or hf:ORG/NAME[@REVISION], a model on the Hugging
            Face hub of a family in docs/huggingface.md.
        iteration: the checkpoint to load; default: the one `latest` names.
        overrides: configuration keys to change, such as {"attention_backend": "reference"};
            mappings are merged with those of the checkpoint, and nested keys have dots. An external
            positional method needs {"pos_emb_module": ...}, because a checkpoint's configuration
            cannot name code to run.

    Raises:
        UserError: (CheckpointError) if the checkpoint is missing or damaged, or its weights do not
            have the sizes in its configuration; if files of its configuration contradict each other
            about the model.
    """
    if not looks_like_checkpoint(directory):
        from megatron.convert.hub import local_checkpoint  # imports all converters

        keys = {key.replace("-", "_"): value for key, value in (overrides or {}).items()}
        directory = local_checkpoint(directory, pos_emb_module=keys.get("pos_emb_module"))
    step = find_valid_step(directory, iteration)
    config = checkpoint_config(step, overrides)
    for notice in (code_notice(step, config), files_notice(step)):
        if notice:
            print(notice, file=sys.stderr, flush=True)
    states = open_layers(step)
    settings = ModelSettings(config.model, embedding_rows(states, step))
    check_sizes(step, settings, states)
    model = GPT(settings)
    load_layers(weight_layers(model.layers(), config.model), step, states=states)
    model.provenance = saved_training(step)
    return model.to(device=device, dtype=dtype).eval(), config


def check_finite(model: nn.Module, place: object) -> None:
    """Raises UserError, starting with `place`, if a weight is NaN or infinite."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(
                f"{place}: weight {name} contains NaN or infinity, so no loss can be measured; "
                "choose an earlier checkpoint (--iteration N), or train again with a lower "
                "learning rate"
            )
