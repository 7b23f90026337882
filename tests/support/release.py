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


def checkpoints(method: str) -> Path:
    return RELEASE / f"{method}_checkpoints"


def reference(method: str) -> dict[Any, Any]:
    """`losses`, `train_tokens`, and per length `tokens`, `labels`, `logits`, `loss`: see the README there."""
    return torch.load(RELEASE / f"{method}_reference.pt", weights_only=True)
