"""Saving: everything goes to a folder of another name, which takes its own name when it is whole and on the disk."""

import os
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint.directory import publish, remove_older, tag_for, tidy
from megatron.checkpoint.manifest import write_manifest
from megatron.checkpoint.optimizer import FILES as OPTIMIZER_FILES
from megatron.checkpoint.state import TrainingState
from megatron.checkpoint.state_dict import rank_files
from megatron.checkpoint.storage import CheckpointError, FileRecord, record_of, save_file
from megatron.config import Config, UserError
from megatron.utils.files import sync_folder, write_atomically

# (file name -> record, or None if this rank failed; the error)
Written = tuple[dict[str, FileRecord] | None, str | None]


class Checkpointer:
    """Saves to `config.checkpoint.save`. Every rank has one and calls it at the same steps."""

    def __init__(self, engine, config: Config, report: Callable[[str], None]):
        """`engine` is `megatron.training.engine.Engine`; `report` prints once per run."""
        self.engine, self.config, self.report = engine, config, report
        self.directory = Path(config.checkpoint.save)
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._copy: dict[str, Any] = {}
        self._group = None
        if config.checkpoint.async_save and dist.get_world_size() > 1:
            # The writers of the ranks meet here, while training uses the other groups.
            self._group = dist.new_group(backend="gloo")

    def save(self, state: TrainingState) -> None:
        """Write global_stepN and point `latest` at it. With `async-save` this returns when the tensors are copied to
        the host's memory, and the rest is done in the background.

        If a rank cannot write (a full disk), every rank raises CheckpointError, what was written is removed, and the
        previous checkpoints stay as they were; of a save in the background, at the next `save` or `finish`.
        """
        self.finish()
        unfinished = self.directory / f"{tag_for(state.iteration)}.unfinished"
        self._on_main(lambda: _prepare(self.directory, unfinished))
        files = rank_files(self.engine, self.config, state)
        if self.config.checkpoint.async_save:
            # The memory of the last copy is used again: what costs time is to be given new memory.
            self._copy = {name: to_host(value, self._copy.get(name)) for name, value in files}
            files = list(self._copy.items())
            self._thread = threading.Thread(
                target=self._write_in_background, args=(files, state.iteration, unfinished), name="checkpoint"
            )
            self._thread.start()
        else:
            self._write(files, state.iteration, unfinished)

    def finish(self) -> None:
        """Wait for a save in the background. Raises its CheckpointError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_in_background(self, files: list[tuple[str, Any]], iteration: int, unfinished: Path) -> None:
        try:
            self._write(files, iteration, unfinished)
        except CheckpointError as error:
            self._error = error
        except RuntimeError as error:  # the other ranks are gone
            self._error = CheckpointError(f"{unfinished}: could not be saved ({error})")

    def _write(self, files: Iterable[tuple[str, Any]], iteration: int, unfinished: Path) -> None:
        tag = tag_for(iteration)
        written: list[Written] = [(None, None)] * self.engine.layout.world_size
        dist.all_gather_object(written, write_files(unfinished, files), group=self._group)
        failure = next((f"rank {rank}: {error}" for rank, (_, error) in enumerate(written) if error), None)
        if failure is not None:
            self._on_main(lambda: shutil.rmtree(unfinished, ignore_errors=True))
            raise CheckpointError(
                f"{self.directory / tag}: could not be saved ({failure}); free some space or check the folder's "
                "permissions. The checkpoints saved before are untouched"
            )
        records = {name: record for part, _ in written for name, record in (part or {}).items()}
        self._on_main(lambda: self._publish(records, iteration, unfinished))
        self.report(f"saved {self.directory / tag}")

    def _publish(self, records: dict[str, FileRecord], iteration: int, unfinished: Path) -> None:
        write_manifest(unfinished, iteration, records)
        publish(self.directory, unfinished, tag_for(iteration))
        keep = self.config.checkpoint.keep_last_n_checkpoints
        if keep is not None:
            remove_older(self.directory, keep, iteration)

    def _on_main(self, action: Callable[[], object]) -> None:
        """Run on rank 0 while the others wait; its error is raised on every rank."""
        outcome: list[str | None] = [None]
        if self.engine.layout.is_main:
            try:
                action()
            except UserError as error:
                outcome[0] = str(error)
            except OSError as error:
                outcome[0] = f"{error.filename or 'checkpoint'}: {error.strerror}"
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[0] is not None:
            raise CheckpointError(outcome[0])


def write_files(folder: Path, files: Iterable[tuple[str, Any]]) -> Written:
    """Write one rank's files. An error is returned rather than raised, and the iterable is run through in any case: the
    other ranks wait for this one.
    """
    records: dict[str, FileRecord] = {}
    failure: str | None = None
    # The disk works on one file while the next one is put together.
    with ThreadPoolExecutor(1) as disk:
        pending: list[Future] = []

        def sync(descriptor: int) -> None:
            pending.append(disk.submit(_sync_and_close, os.dup(descriptor)))

        for name, value in files:
            if failure is None:
                try:
                    records[name] = _write_file(folder, name, value, sync)
                except (OSError, RuntimeError, UserError) as error:
                    failure = _first_line(error)
        for future in pending:
            if (error := future.exception()) is not None and failure is None:
                failure = _first_line(error)
    if failure is not None:
        return None, failure
    sync_folder(folder)
    return records, None


def _write_file(folder: Path, name: str, value: Any, sync: Callable[[int], None]) -> FileRecord:
    path = folder / name
    if path.parent != folder:
        path.parent.mkdir(exist_ok=True)
    if isinstance(value, bytes):
        write_atomically(path, value)
        return record_of(path)
    return save_file(path, value, zip_checksums=not fnmatch(name, OPTIMIZER_FILES), sync=sync)


def _sync_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]


def to_host(value: Any, old: Any = None) -> Any:
    """A copy of nested containers with every tensor copied to the host's memory, in storage of its own; in that of
    `old`, an earlier copy, where there is such a tensor.
    """
    if isinstance(value, torch.Tensor):
        if not (isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype)):
            old = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return old.copy_(value)
    if isinstance(value, dict):
        old = old if isinstance(old, dict) else {}
        return {name: to_host(item, old.get(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_host(item) for item in value)
    return value


def _prepare(directory: Path, unfinished: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tidy(directory)
        unfinished.mkdir()
    except OSError as error:
        raise CheckpointError(f"save: {directory}: cannot be written ({error.strerror})") from error
