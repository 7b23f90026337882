"""The random states of a rank, as tensors and plain values, so that reading them runs no code."""

import random
from typing import Any

import numpy as np
import torch

FILES = "random_rank_*.pt"


def rank_file(rank: int) -> str:
    return f"random_rank_{rank:05d}.pt"


def capture() -> dict[str, Any]:
    """Python's, NumPy's and torch's generators (CPU and, where there is one, the current GPU)."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (the generator that libraries share)
    return {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` took. Raises ValueError for anything else."""
    try:
        _restore(state)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"these are not random states ({error})") from error


def _restore(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy_state = (kind, keys.numpy().astype(np.uint32), position, has_gauss, cached)
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
