"""The cache of the sample indices of GPTDataset."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.data.indexed_dataset import IndexedFiles, TokenFile, bin_path, file_sha256
from megatron.utils.environment import check_version
from megatron.utils.errors import UserError, visible
from megatron.utils.files import check_writable, read_file, write_atomically, write_errors
from megatron.utils.processes import Lock
from megatron.utils.ranks import run_on_all_ranks, run_on_rank_0

check_version("megatron-core")

# Files of the arrays document_index, sample_index and shuffle_index of GPTDataset.
INDICES = ("document_index.npy", "sample_index.npy", "shuffle_index.npy")
_CHECKSUM = "sha256"


def cache_folder(files: IndexedFiles, cache_path: str | None, settings: Sequence[int]) -> Path:
    """Return the folder for the sample indices of a dataset with these settings, in `cache_path`
    or, by default, in `PREFIX_indices` next to the dataset.

    The folder name is a hash of the settings and the document lengths, which together determine the
    indices. So a changed corpus gets a new folder, and a copy of the corpus elsewhere shares the
    folder.
    """
    digest = hashlib.sha256(json.dumps(settings).encode())
    digest.update(files.lengths.data)
    digest.update(files.document_index.data)
    parent = Path(cache_path or f"{files.prefix}_indices")
    return parent / f"samples-{digest.hexdigest()[:32]}"


def build_once(folder: Path, build: Callable[[], Sequence[np.ndarray]]) -> None:
    """Write the arrays that `build` returns to `folder` as INDICES, unless it contains them. Every
    rank must call this.

    Rank 0 writes them, with a checksum, which later runs compare. A folder without a valid checksum
    is replaced. If the folder is on a local disk, the first rank of every other machine does the
    same. Concurrent runs do not disturb each other, and a killed run leaves no incomplete folder.

    Raises UserError if the folder cannot be written.
    """

    @cache  # rank 0 is also the first rank of its machine
    def build_here() -> None:
        if _is_whole(folder):
            return
        check_writable(folder.parent, f"{folder} has no valid checksum; data-cache-path")
        arrays = build()
        lock = Lock(folder.with_suffix(".lock"), "")
        lock.acquire(timeout=-1)
        try:
            if not _is_whole(folder):  # otherwise another run has written it in the meantime
                _write(folder, arrays)
        finally:
            lock.release()

    def build_on_this_machine() -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            build_here()

    # The other machines may share the disk, so they look only after rank 0 has written.
    run_on_rank_0(build_here)
    run_on_all_ranks(build_on_this_machine)


def _write(folder: Path, arrays: Sequence[np.ndarray]) -> None:
    """Write the files in a temporary folder, and rename it. The caller holds the lock."""
    temporary = folder.with_suffix(".partial")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed run
    new = temporary / folder.name
    try:
        with write_errors(f"{folder} (data-cache-path)"):
            new.mkdir(parents=True)
            for name, array in zip(INDICES, arrays, strict=True):
                with open(new / name, "wb", buffering=0) as stream:
                    np.save(stream, array, allow_pickle=False)
                    os.fsync(stream)

            # The checksum comes last, so it exists only next to complete arrays.
            write_atomically(new / _CHECKSUM, _checksum(new))
            if not _is_whole(new):
                raise UserError(
                    f"{new} reads back differently from what was written; check the disk"
                )

            # Processes that have mapped the files of an old folder keep them.
            if folder.exists():
                note = f"{folder} has no valid checksum; replacing it"
                print(visible(note), file=sys.stderr, flush=True)
                folder.rename(temporary / "old")
            new.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _checksum(folder: Path) -> bytes:
    """Of the name of the folder, which identifies the settings, and of the arrays.

    Raises UserError if one is missing.
    """
    hashes = [f"{name} {file_sha256(folder / name)}" for name in INDICES]
    return hashlib.sha256("\n".join([folder.name, *hashes]).encode()).hexdigest().encode()


def _is_whole(folder: Path) -> bool:
    try:
        return read_file(folder / _CHECKSUM) == _checksum(folder)
    except UserError:
        return False


class FileDataset(IndexedDataset):
    """megatron-core's dataset, which reads the .bin with TokenFile instead of mapping it into
    memory. Raises UserError for negative ids, of which GPTDataset takes -1 for padding.
    """

    def initialize(self, path_prefix: str, multimodal: bool, mmap: bool, *arguments: Any) -> None:
        super().initialize(path_prefix, multimodal, False, *arguments)
        tokens = int(self.index.sequence_lengths.sum(dtype=np.int64))
        self.bin_reader = TokenFile(bin_path(path_prefix), np.dtype(self.index.dtype), 0, tokens)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        ids: np.ndarray = super().get(idx, offset, length)
        if (ids < 0).any():
            raise UserError(
                f"{bin_path(self.path_prefix)}: token id {ids.min()} is negative; build the data "
                "again"
            )
        return ids
