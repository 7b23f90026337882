"""The cache of the sample indices of GPTDataset."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.data.indexed_dataset import IndexedFiles, TokenFile, bin_path
from megatron.utils.environment import check_version
from megatron.utils.errors import UserError, first_line
from megatron.utils.ranks import run_on_all_ranks, run_on_rank_0

check_version("megatron-core")


def cache_folder(files: IndexedFiles, cache_path: str | None, settings: Sequence[int]) -> Path:
    """Return the folder for the sample indices of a dataset with these settings, in `cache_path` or, by default, in
    `PREFIX_indices` next to the dataset.

    The folder name is a hash of the settings and the document lengths, which together determine the indices. So a
    changed corpus gets a new folder, and a copy of the corpus elsewhere shares the folder.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(files.lengths.data)
    digest.update(files.document_index.data)
    parent = Path(cache_path) if cache_path else Path(f"{files.prefix}_indices")
    return parent / f"samples-{digest.hexdigest()[:32]}"


def build_once(folder: Path, build: Callable[[Path], object]) -> None:
    """Create `folder` by calling `build`, unless it exists. Every rank must call this.

    Rank 0 builds in a temporary folder and renames it, so a killed run leaves no incomplete folder and concurrent runs
    do not disturb each other. If the folder is on a local disk, the first rank of every other machine builds it too.

    Raises UserError if the folder cannot be written.
    """

    def build_here() -> None:
        if folder.is_dir():
            return
        temporary = folder.with_name(f"{folder.name}.partial-{os.uname().nodename}-{os.getpid()}")
        try:
            temporary.mkdir(parents=True)
            build(temporary)
            try:
                temporary.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another run has created the same folder
                    raise
        except OSError as error:
            raise UserError(
                f"cannot write the sample indices to {folder.parent} ({error.strerror or first_line(error)}); set "
                "data-cache-path to a writable folder"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    run_on_rank_0(build_here)
    run_on_all_ranks(lambda: build_here() if os.environ.get("LOCAL_RANK", "0") == "0" else None)


class FileDataset(IndexedDataset):
    """megatron-core's dataset, which reads the .bin with TokenFile instead of mapping it into memory. Raises UserError
    for negative ids, of which GPTDataset takes -1 for padding.
    """

    def initialize(self, path_prefix: str, multimodal: bool, mmap: bool, *arguments: Any) -> None:
        super().initialize(path_prefix, multimodal, False, *arguments)
        tokens = int(self.index.sequence_lengths.sum(dtype=np.int64))
        self.bin_reader = TokenFile(bin_path(path_prefix), np.dtype(self.index.dtype), 0, tokens)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        ids: np.ndarray = super().get(idx, offset, length)
        if (ids < 0).any():
            raise UserError(f"{bin_path(self.path_prefix)}: token id {ids.min()} is negative; build the data again")
        return ids
