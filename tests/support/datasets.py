"""Training samples of one corpus, and the ends of its documents."""

from pathlib import Path

import numpy as np

from megatron.data.datasets import Datasets, datasets_from_blends
from megatron.data.indexed_dataset import open_indexed_files
from megatron.data.splits import Blend


def datasets_from_split(prefix: str, split: str, *arguments) -> Datasets:
    """`datasets_from_blends` of one corpus that is split."""
    blend = Blend((prefix,), split=split)
    return datasets_from_blends([blend, blend, blend], *arguments)


def end_documents(prefix: str | Path, token: int, first: int = 0) -> None:
    """Replace the last token of each sequence, from sequence `first` on."""
    files = open_indexed_files(prefix)
    # Empty sequences have no last token.
    numbers = first + np.flatnonzero(files.lengths[first:])
    last_tokens = files.offsets()[numbers + 1] - 1
    ids = np.fromfile(f"{prefix}.bin", files.dtype)
    ids[last_tokens] = token
    ids.tofile(f"{prefix}.bin")
