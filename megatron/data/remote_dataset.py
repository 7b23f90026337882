"""Training data on S3, read through megatron-core: the .idx is kept in a local cache, the .bin is read where it is."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig, get_index_cache_path, parse_s3_path
from megatron.data.index_cache import build_once
from megatron.data.indexed_format import IndexedFiles, check_index, check_indexed_files, is_remote
from megatron.utils.errors import UserError

# Samples are read in random order, so what is fetched around one is of no use for the next.
_BYTES_PER_REQUEST = 1 << 18


@dataclass(frozen=True)
class RemoteFiles(IndexedFiles):
    """A pair on S3 whose .idx is in the local folder `cache`, where megatron-core looks for it."""

    cache: str


def open_files(prefix: str, cache_path: str | None) -> IndexedFiles:
    """The pair at `prefix`, local or on S3. Every rank must call this: rank 0 fetches, the others wait.

    Args:
        cache_path: `data-cache-path`, a folder that all ranks see; data on S3 need it.

    Raises:
        UserError: what `check_indexed_files` raises, another store than S3, no boto3, no cache_path, what S3 refuses.
    """
    if not is_remote(prefix):
        return check_indexed_files(prefix)
    if not prefix.startswith("s3://"):
        raise UserError(
            f"data-path {prefix}: training reads from local disks and s3:// alone; copy the .bin/.idx there"
        )
    if not cache_path:
        raise UserError(f"data-path {prefix} needs data-cache-path: a local folder, seen by all ranks, for its .idx")
    client = _client(prefix)
    state = {name: _head(client, f"{prefix}.{name}") for name in ("idx", "bin")}
    # The name of the folder tells of the state of both files: after a change the .idx is fetched again.
    digest = hashlib.sha256(json.dumps([prefix, state]).encode()).hexdigest()
    cache = Path(cache_path) / f"s3-{digest[:32]}"
    relative = Path(get_index_cache_path(f"{prefix}.idx", ObjectStorageConfig(""))).as_posix()

    def fetch(folder: Path) -> None:
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        bucket, key = parse_s3_path(f"{prefix}.idx")
        _ask(f"{prefix}.idx", client.download_file, bucket, key, str(folder / relative))

    build_once(cache, fetch)
    checked = check_index(cache / relative, f"{prefix}.bin", state["bin"][0])
    return RemoteFiles(prefix, *checked, cache=str(cache))


def open_dataset(files: IndexedFiles) -> IndexedDataset:
    """megatron-core's dataset on checked files."""
    return _CachedIndexDataset(files) if isinstance(files, RemoteFiles) else IndexedDataset(files.prefix)


class _CachedIndexDataset(IndexedDataset):
    """megatron-core's dataset without the download of the .idx, which it would do each time it is made."""

    def __init__(self, files: RemoteFiles):
        config = ObjectStorageConfig(path_to_idx_cache=files.cache, bin_chunk_nbytes=_BYTES_PER_REQUEST)
        self.initialize(files.prefix, multimodal=False, mmap=False, object_storage_config=config)


def _client(prefix: str):
    try:
        import boto3
    except ImportError as error:
        raise UserError(
            f"data-path {prefix} needs the package boto3, which is not installed: pip install -r requirements/data.txt"
        ) from error
    return _ask(prefix, boto3.client, "s3")


def _head(client, path: str) -> tuple[int, str]:
    """Size and ETag of an object."""
    bucket, key = parse_s3_path(path)
    answer = _ask(path, client.head_object, Bucket=bucket, Key=key)
    return int(answer["ContentLength"]), str(answer.get("ETag"))


def _ask(path: str, request, *arguments, **more):
    try:
        return request(*arguments, **more)
    except Exception as error:  # botocore's errors share no base that is not of botocore
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0] if str(error) else error!r}") from error
