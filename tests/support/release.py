"""Checkpoints and numbers written by the original KERPLE code (tests/data/kerple_release)."""

from pathlib import Path
from typing import Any

import torch

RELEASE = Path(__file__).resolve().parents[1] / "data" / "kerple_release"

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

# Tensors that the original code splits over the tensor-parallel ranks, and the dimension. All
# others are replicated.
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


def checkpoints(method: str) -> Path:
    return RELEASE / f"{method}_checkpoints"


def split_for_ranks(step: Path, ranks: int) -> None:
    """Split the layer files of a step's folder, which have one rank, as the original code does."""
    for path in sorted(step.glob("layer_*-model_00-*.pt")):
        state = torch.load(path, weights_only=True)
        pieces = {
            name: state[name].chunk(ranks, dim)
            for name, dim in PARTITION_DIM.items()
            if name in state
        }
        for rank in range(ranks):
            shard = {**state, **{name: split[rank].clone() for name, split in pieces.items()}}
            torch.save(shard, path.with_name(path.name.replace("model_00", f"model_{rank:02d}")))


def reference(method: str) -> dict[Any, Any]:
    """`losses`, `train_tokens`, and per length `tokens`, `labels`, `logits`, `loss`: see the README
    there.
    """
    return torch.load(RELEASE / f"{method}_reference.pt", weights_only=True)
