"""What a checkpoint's positional method does to the scores, as numbers over distance: Figures 2-4 and 6 of KERPLE.

Only the positional parameters are read, so any checkpoint will do, also one of the release.

Legend: h heads.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.directory import find_step
from megatron.checkpoint.inspection import positional_methods
from megatron.evaluation.measures.effective_length import LIMIT
from megatron.model.settings import ModelSettings


@dataclass(frozen=True)
class Kernel:
    """One method of a checkpoint, of all layers or of one (`place`).

    `distances`: float32 `[n]`; `bias`, `weight`: float32 `[h, n]`, None where the method has none; `effective_lengths`:
    int64 `[h]`, the smallest distance whose bias is below -2, `limit` where there is none (and None without a bias).
    """

    pos_emb: str
    place: str
    distances: Tensor
    bias: Tensor | None
    weight: Tensor | None
    effective_lengths: Tensor | None


@torch.no_grad()
def kernels_of(
    directory: str | Path, iteration: int | None = None, *, longest: int = 16_384, limit: int = LIMIT
) -> list[Kernel]:
    """The kernels of a checkpoint at distances 0 ... `longest` - 1; empty for a method that is no function of distance.

    Raises CheckpointError where there is no checkpoint that can be read.
    """
    step = find_step(directory, iteration)
    config = checkpoint_config(step)
    settings = ModelSettings.from_config(config, padded_vocab_size=1)
    distances = torch.arange(longest, dtype=torch.float32)
    found = []
    for place, method in positional_methods(step, settings):
        bias = method.bias(distances) if method.has_bias else None
        weight = method.weight(distances) if method.has_weight else None
        if bias is not None or weight is not None:
            lengths = method.effective_length(limit) if bias is not None else None
            found.append(Kernel(config.model.pos_emb, place, distances, bias, weight, lengths))
    return found
