"""A trained model as plain PyTorch: no launcher, no process group, no DeepSpeed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.directory import find_whole_step
from megatron.checkpoint.layers import layer_files, load_layer_file, load_layers
from megatron.checkpoint.sizes import check_sizes
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings

EMBEDDING = "word_embeddings.weight"


def load_model(
    directory: str | Path,
    iteration: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
    *,
    fallback: bool = False,
) -> tuple[GPT, Config]:
    """A checkpoint's model in evaluation mode, and its configuration.

    directory: holds `latest` and global_stepN, as this project and the KERPLE release write them; any tensor-parallel
    size. iteration: the step to load; default: the one `latest` names. overrides: keys of the configuration to set,
    e.g. {"attention_backend": "reference"}; a method of one's own needs
        {"pos_emb_module": ...} here, since a checkpoint's configuration may not name code to run. fallback: take the
        newest whole checkpoint, and print so, when the files of the one to load are not as its manifest says.

    The model maps int64 tokens [batch, seq] to logits [batch, seq, padded vocabulary]; it is trainable plain torch.
    Raises UserError (CheckpointError) if the checkpoint is missing or damaged, or its weights are of other sizes than
    its configuration says.
    """
    step = find_whole_step(directory, iteration, fallback=fallback)
    config = checkpoint_config(step, overrides)
    files = layer_files(step)
    rows = _embedding_rows(files)
    settings = ModelSettings.from_config(config, rows)
    check_sizes(step, settings)
    model = GPT(settings)
    layers = model.layers()
    if settings.tied_embeddings:
        layers.pop(settings.num_layers + 4)
    load_layers(layers, step)
    return model.to(device=device, dtype=dtype).eval(), config


def _embedding_rows(files: dict[int, list[Path]]) -> int:
    """The padded vocabulary: the rows of the word embedding, over all tensor-parallel ranks."""
    if 0 not in files:
        raise CheckpointError(f"{next(iter(files.values()))[0].parent}: has no file of layer 0 (the embedding)")
    rows = 0
    for path in files[0]:
        state = load_layer_file(path)
        if EMBEDDING not in state:
            raise CheckpointError(f"{path}: holds no {EMBEDDING}")
        rows += state[EMBEDDING].shape[0]
    return rows
