"""A checkpoint's sizes against a configuration's, before a model is built."""

from pathlib import Path

import torch

from megatron.checkpoint.layers import check_layers
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings


def check_sizes(step: Path, settings: ModelSettings) -> None:
    """Raises CheckpointError, naming both sides, if the checkpoint's tensors are not those of a model of these sizes
    (on one rank). Nothing of their size is read or allocated.
    """
    with torch.device("meta"):
        layers = GPT(settings).layers()
    if settings.tied_embeddings:
        layers.pop(settings.num_layers + 4)
    check_layers(layers, step, tied=settings.tied_embeddings)
