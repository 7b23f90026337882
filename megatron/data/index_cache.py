"""Index files cached on a local disk: sample indices of GPTDataset, and the .idx of training data on S3."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig, get_index_cache_path, parse_s3_path
from megatron.data.indexed_dataset import (
    IndexedFiles,
    TokenFile,
    bin_path,
    is_remote,
    open_indexed_files,
    validate_index,
)
from megatron.utils.environment import check_version
from megatron.utils.errors import UserError, first_line, import_package
from megatron.utils.ranks import run_on_all_ranks, run_on_rank_0

check_version("megatron-core")

T = TypeVar("T")

# Samples are read in random order, so reading ahead does not help.
_BYTES_PER_REQUEST = 1 << 18


def cache_folder(files: IndexedFiles, cache_path: str | None, settings: Sequence[int]) -> Path:
    """Return the folder for the sample indices of a dataset with these settings.

    The folder name is a hash of the settings and the document lengths, which together determine the indices. So a
    changed corpus gets a new folder, and a copy of the corpus elsewhere shares the folder.

    Args:
        cache_path: parent folder; by default `PREFIX_indices`, next to the dataset.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(files.lengths.data)
    digest.update(files.document_index.data)
    parent = Path(cache_path) if cache_path else Path(f"{files.prefix}_indices")
    return parent / f"samples-{digest.hexdigest()[:32]}"


def order_of(folder: Path) -> str:
    """Identifies the order of the samples in a `cache_folder`."""
    return folder.name.removeprefix("samples-")


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
                f"cannot write the sample indices to {folder.parent} ({error.strerror}); set data-cache-path to a "
                "writable folder"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    run_on_rank_0(build_here)
    run_on_all_ranks(lambda: build_here() if os.environ.get("LOCAL_RANK", "0") == "0" else None)


@dataclass(frozen=True)
class RemoteFiles(IndexedFiles):
    """A `.bin/.idx` pair on S3. Its .idx is in the local folder `cache`, where megatron-core expects it."""

    cache: str


def open_dataset_files(prefix: str, cache_path: str | None) -> IndexedFiles:
    """Open and validate the pair at `prefix`, local or on S3. Every rank must call this: rank 0 downloads the .idx.

    Args:
        cache_path: `data-cache-path`. Required for data on S3.

    Raises UserError if the files are invalid (see `open_indexed_files`), the store is not S3, boto3 is not installed,
    cache_path is not set, or an S3 request fails.
    """
    # Local files need no cache, and other stores than S3 no client.
    if not is_remote(prefix):
        return open_indexed_files(prefix)
    if not prefix.startswith("s3://"):
        raise UserError(f"data-path {prefix}: training reads only local files and s3://; download the .bin and .idx")
    if not cache_path:
        raise UserError(f"data-path {prefix} needs data-cache-path: a folder for its .idx")
    boto3 = import_package("boto3", "s3", f"data-path {prefix}")

    # A request for each file also shows whether it can be read.
    client = _request(prefix, boto3.client, "s3")
    sizes_and_tags = {}
    for extension in ("idx", "bin"):
        bucket, key = parse_s3_path(f"{prefix}.{extension}")
        response = _request(f"{prefix}.{extension}", client.head_object, Bucket=bucket, Key=key)
        sizes_and_tags[extension] = (int(response["ContentLength"]), str(response.get("ETag")))

    # The folder name covers the versions of both files, so a changed .idx is downloaded again.
    digest = hashlib.sha256(json.dumps([prefix, sizes_and_tags]).encode()).hexdigest()
    cache = Path(cache_path) / f"s3-{digest[:32]}"
    relative = Path(get_index_cache_path(f"{prefix}.idx", ObjectStorageConfig(""))).as_posix()

    def download_index(folder: Path) -> None:
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        bucket, key = parse_s3_path(f"{prefix}.idx")
        _request(f"{prefix}.idx", client.download_file, bucket, key, str(folder / relative))

    # Rank 0 downloads the .idx, which all ranks read.
    build_once(cache, download_index)
    fields = validate_index(cache / relative, f"{prefix}.bin", sizes_and_tags["bin"][0])
    return RemoteFiles(prefix, *fields, cache=str(cache))


def open_megatron_dataset(files: IndexedFiles) -> IndexedDataset:
    """Open megatron-core's dataset for validated files."""
    return _CachedIndexDataset(files) if isinstance(files, RemoteFiles) else _LocalDataset(files.prefix)


class _LocalDataset(IndexedDataset):
    """megatron-core's dataset, which reads the .bin with TokenFile instead of mapping it into memory."""

    def initialize(self, path_prefix: str, multimodal: bool, mmap: bool, *arguments: Any) -> None:
        super().initialize(path_prefix, multimodal, False, *arguments)
        tokens = int(self.index.sequence_lengths.sum(dtype=np.int64))
        self.bin_reader = TokenFile(bin_path(path_prefix), np.dtype(self.index.dtype), 0, tokens)


class _CachedIndexDataset(IndexedDataset):
    """megatron-core's dataset on S3, without downloading the .idx each time it is constructed."""

    def __init__(self, files: RemoteFiles):
        config = ObjectStorageConfig(path_to_idx_cache=files.cache, bin_chunk_nbytes=_BYTES_PER_REQUEST)
        self.initialize(files.prefix, multimodal=False, mmap=False, object_storage_config=config)


def _request(path: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        return function(*args, **kwargs)
    except Exception as error:  # botocore's exceptions have no base class outside botocore
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
