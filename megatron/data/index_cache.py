"""The sample indices of GPTDataset on disk: built once, by one rank, whole or not at all, and never out of date."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed

from megatron.data.indexed_format import IndexedFiles
from megatron.utils.errors import UserError

Value = TypeVar("Value")


def cache_folder(files: IndexedFiles, cache_path: str | None, settings: dict) -> Path:
    """The folder for the indices of one dataset under one group of settings.

    The name covers the lengths of the documents, which are all that the indices depend on besides the settings: a
    changed corpus gets a folder of its own. The same corpus at another place shares it.

    Args:
        cache_path: folder to make it in; by default a folder beside the dataset.
        settings: whatever else decides the indices; JSON values.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(files.lengths)
    digest.update(files.document_index)
    parent = Path(cache_path) if cache_path else Path(f"{files.prefix}_indices")
    return parent / digest.hexdigest()[:32]


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Make `folder` exist with what `build(folder)` writes into it. Every rank must call this.

    Rank 0 builds in a temporary folder and renames it, so a killed run leaves no half-built one and two runs cannot
    disturb each other; the others wait, and fail with it if it fails.

    Raises:
        UserError: the folder cannot be written, or another machine cannot see it.
    """
    on_rank_0(lambda: _build(folder, build))
    if not folder.is_dir():
        raise UserError(
            f"{folder}, built by rank 0, is not visible on this machine; set data-cache-path to a folder that all share"
        )


def on_rank_0(compute: Callable[[], Value]) -> Value:
    """What `compute()` gives on rank 0, on every rank; all fail with it if it fails. Every rank must call this."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    value, failure = None, None
    if not distributed or torch.distributed.get_rank() == 0:
        try:
            value = compute()
        except Exception as error:
            failure = error
    if distributed:
        # A broadcast rather than a barrier: the others must not go on to look for what was not built.
        message = [value, str(failure) if failure else None]
        torch.distributed.broadcast_object_list(message, src=0)
        value = message[0]
        if failure is None and message[1] is not None:
            raise UserError(message[1])
    if failure is not None:
        raise failure
    return value


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    if folder.is_dir():
        return
    temporary = folder.with_name(f"{folder.name}.partial-{os.uname().nodename}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        build(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another run finished the same folder meanwhile
                raise
    except OSError as error:
        raise UserError(
            f"cannot write the sample indices to {folder.parent} ({error.strerror}); set data-cache-path to a writable "
            "folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
