"""Writing a folder in the layout of our checkpoints and the release's: `latest`, and one global_stepN."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.directory import layer_file, point_latest, tag_for, write_manifest_of_folder
from megatron.checkpoint.storage import write_json
from megatron.model.settings import ModelSettings


def write_checkpoint(
    folder: Path,
    iteration: int,
    layers: Iterable[tuple[int, list[dict[str, Tensor]]]],
    keys: Mapping[str, Any],
    settings: ModelSettings,
) -> Path:
    """Weights without an optimizer, as global_stepN in `folder`, with a manifest; returns its path.

    layers: (layer index, the state for each tensor-parallel rank). keys: the run's configuration.
    """
    step = folder / tag_for(iteration)
    (step / "configs").mkdir(parents=True)
    ranks = 1
    for index, states in layers:
        ranks = len(states)
        for rank, state in enumerate(states):
            torch.save(state, layer_file(step, index, rank))
    sizes = {
        "num_layers": settings.num_layers,
        "hidden_size": settings.hidden_size,
        "num_attention_heads": settings.num_heads,
        "max_position_embeddings": settings.max_positions,
        "padded_vocab_size": settings.padded_vocab_size,
        "model_parallel_size": ranks,
    }
    for rank in range(ranks):
        torch.save({"iteration": iteration, "args": sizes}, step / f"mp_rank_{rank:02d}_model_states.pt")
    write_json(step / "configs" / "config.yml", dict(keys))
    write_manifest_of_folder(step, iteration)
    point_latest(folder, step.name)
    return step
