"""The cache of the sample indices of GPTDataset."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.data.indexed_dataset import IndexedFiles, TokenFile, bin_path, file_sha256
from megatron.utils.environment import check_version
from megatron.utils.errors import UserError, first_line, visible
from megatron.utils.files import read_file, sync_folder
from megatron.utils.ranks import run_on_all_ranks, run_on_rank_0

check_version("megatron-core")

# Files of the arrays document_index, sample_index and shuffle_index of GPTDataset.
INDICES = ("document_index.npy", "sample_index.npy", "shuffle_index.npy")
_CHECKSUM = "sha256"


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


def build_once(folder: Path, build: Callable[[], Sequence[np.ndarray]]) -> None:
    """Write the arrays that `build` returns to `folder` as INDICES, unless it contains them. Every rank must call this.

    Rank 0 writes them, with a checksum, which later runs compare. What is damaged or incomplete is built again. If the
    folder is on a local disk, the first rank of every other machine does the same. Concurrent runs do not disturb each
    other, because they write the same bytes to the same places.

    Raises UserError if the folder cannot be written.
    """

    def build_here() -> None:
        if _is_whole(folder):
            return
        if folder.exists():
            note = f"{folder}: the sample indices are incomplete or damaged; building them again"
            print(visible(note), file=sys.stderr, flush=True)
        arrays = build()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, array in zip(INDICES, arrays, strict=True):
                _write(folder / name, partial(np.save, arr=array, allow_pickle=False))
            checksum = _checksum(folder)
            _write(folder / _CHECKSUM, lambda stream: stream.write(checksum))
            sync_folder(folder)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise UserError(
                f"cannot write the sample indices to {folder.parent} ({error.strerror or first_line(error)}); set "
                "data-cache-path to a writable folder"
            ) from error
        if not _is_whole(folder):
            raise UserError(f"{folder} reads back differently from what was written; check the disk")

    run_on_rank_0(build_here)
    run_on_all_ranks(lambda: build_here() if os.environ.get("LOCAL_RANK", "0") == "0" else None)


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` write a file and sync it to disk. An existing file is not truncated first, because a process may have
    mapped it, and a link is not followed.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "wb") as stream:
        write(stream)
        stream.truncate()
        stream.flush()
        os.fsync(descriptor)


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
