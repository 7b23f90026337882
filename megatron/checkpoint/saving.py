"""Saving a checkpoint.

Files are written to `global_stepN.unfinished`, which gets its final name when all of them are on
disk:

    layer_XX-model_YY-model_states.pt   weights of layer XX, tensor-parallel slice YY
    optimizer_rank_NNNNN.pt             this rank's part of the optimizer state
    random_rank_NNNNN.pt                this rank's random states
    mp_rank_00_model_states.pt          progress and counters of the run (rank 0)
    configs/config.yml                  the configuration, without secrets (rank 0)
    manifest.json                       size and CRC-32 of every file, written last (rank 0)
"""

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.cleanup import check_replaced, clean_up, publish, remove_older
from megatron.checkpoint.configuration import saved_config
from megatron.checkpoint.directory import (
    CONFIG_FILE,
    OPTIMIZER_FILES,
    STATE_FILE,
    layer_file,
    step_folder,
    tag_for,
)
from megatron.checkpoint.layers import layer_state, weight_layers
from megatron.checkpoint.manifest import write_manifest
from megatron.checkpoint.optimizer import optimizer_file, optimizer_state
from megatron.checkpoint.state_dict import (
    TrainingEngine,
    TrainingState,
    capture_random_state,
    gathered,
    random_state_file,
    run_state,
)
from megatron.checkpoint.storage import CheckpointError, FileRecord, file_record, save_file
from megatron.config import Config
from megatron.utils.errors import UserError, first_line
from megatron.utils.files import sync_folder, write_atomically
from megatron.utils.ranks import Report, run_on_rank_0
from megatron.utils.secrets import without_secrets

# File name -> record, and the error of this rank.
WriteResult = tuple[dict[str, FileRecord], str | None]


class Checkpointer:
    """Saves to `config.checkpoint.save`. Every rank has one and calls it at the same steps."""

    def __init__(
        self,
        engine: TrainingEngine,
        config: Config,
        report: Report,
        first_lineage: Collection[int] | None = (),
    ):
        """`report` prints a line on rank 0. first_lineage: `lineage` of `check_replaced`."""
        if config.checkpoint.save is None:
            raise ValueError("config.checkpoint.save is not set")
        self.engine, self.config, self.report = engine, config, report
        self.directory = Path(config.checkpoint.save)
        self.first_lineage = first_lineage

    def save(self, state: TrainingState) -> None:
        """Write global_stepN and point `latest` at it.

        If any rank fails to write (disk full), every rank raises CheckpointError, the partial
        checkpoint is removed, and previous checkpoints are unchanged. It is also raised if another
        run has saved this iteration to the folder; a signal can end a run at any iteration.
        """
        unfinished = self.directory / f"{tag_for(state.iteration)}.unfinished"

        def prepare() -> list[int]:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                clean_up(self.directory)
                replaced = check_replaced(
                    self.directory, lambda saved: saved == state.iteration, self.first_lineage
                )
                unfinished.mkdir()
                state.folder = str(self.directory.resolve())
                state.inode = self.directory.stat().st_ino
                return replaced
            except OSError as error:
                raise CheckpointError(
                    f"save: {self.directory}: cannot be written ({error.strerror})"
                ) from error

        replaced = run_on_rank_0(prepare)

        # `lineage` contains this checkpoint and those it continues.
        earlier = [saved for saved in state.lineage if saved < state.iteration]
        state.lineage = [*earlier, state.iteration]
        if self.first_lineage is None:  # from now on, the run has checkpoints of its own
            self.first_lineage = state.lineage

        self._write(state, unfinished)
        message = f"saved {self.directory / tag_for(state.iteration)}"
        if replaced:
            message += ", which replaces an earlier one of this run"
        self.report(message)
        run_on_rank_0(lambda: self._remove_older(state.lineage))

    def _write(self, state: TrainingState, unfinished: Path) -> None:
        # All ranks write, whether or not another one fails, because they gather together.
        tag, files = tag_for(state.iteration), rank_files(self.engine, self.config, state)
        results: list[WriteResult] = [({}, None)] * self.engine.layout.world_size
        dist.all_gather_object(results, write_files(unfinished, files))
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(results) if error]

        # Rank 0 completes the checkpoint or removes it.
        def complete() -> None:
            if errors:
                shutil.rmtree(unfinished, ignore_errors=True)
                return
            records: dict[str, FileRecord] = {}
            for of_rank, _ in results:
                records |= of_rank
            try:
                write_manifest(unfinished, state.iteration, records)
                publish(self.directory, unfinished, tag)
            except OSError as error:
                raise CheckpointError(
                    f"{error.filename or self.directory}: {error.strerror}"
                ) from error
            except UserError as error:
                raise CheckpointError(str(error)) from error

        run_on_rank_0(complete)
        if errors:
            raise CheckpointError(
                f"{self.directory / tag}: could not be saved ({errors[0]}); free some disk space "
                "or check the folder's permissions. Previously saved checkpoints are unchanged"
            )

    def _remove_older(self, lineage: list[int]) -> None:
        """Delete older checkpoints of this run, as `keep_last_n_checkpoints` says, and report them.
        Errors are only reported.
        """
        keep = self.config.checkpoint.keep_last_n_checkpoints
        if keep is None:
            return
        try:
            deletable = [iteration for iteration in lineage if not self._keeps(iteration)]
            for iteration in remove_older(self.directory, keep, deletable):
                self.report(
                    f"deleted {self.directory / tag_for(iteration)} (keep_last_n_checkpoints "
                    f"{keep})"
                )
        except (OSError, UserError) as error:
            self.report(
                "warning: an older checkpoint could not be deleted, so the disk may become full: "
                f"{first_line(error)}"
            )

    def _keeps(self, iteration: int) -> bool:
        """Whether a checkpoint is never deleted: this run's configuration says so, or the one that
        it was saved with, or that one cannot be read.
        """
        step = step_folder(self.directory, tag_for(iteration))
        if self.config.checkpoint.keeps(iteration):
            return True
        if not step.is_dir():
            return False
        try:
            return saved_config(step, self.config).checkpoint.keeps(iteration)
        except UserError as error:
            self.report(
                f"warning: {step} is not deleted, because its configuration cannot be read: "
                f"{first_line(error)}"
            )
            return True


def rank_files(
    engine: TrainingEngine, config: Config, state: TrainingState
) -> Iterator[tuple[str, Any]]:
    """(file name, contents) of this rank's files. Every rank iterates at the same time.

    Contents of type bytes are written unchanged, all others with torch.save. Tensors are not
    copied, and valid only until the next file is requested.
    """
    layout, settings = engine.layout, config.checkpoint
    for index, layer in weight_layers(engine.layers(), engine.config.model).items():
        with gathered(engine, layer):
            if layout.data_rank == 0:
                yield layer_file(Path(), index, layout.tensor_rank).name, layer_state(layer)
    # Replicas have the same state, unless DeepSpeed splits it among them.
    has_own_state = layout.data_rank == 0 or engine.deepspeed.zero_optimization()
    if has_own_state and not settings.no_save_optim:
        yield optimizer_file(layout.rank), optimizer_state(engine)
    if not settings.no_save_rng:
        yield random_state_file(layout.rank), capture_random_state()
    if layout.rank == 0:
        yield STATE_FILE, run_state(engine, config, state)
        # JSON is valid YAML, so the file loads like any other configuration.
        keys = without_secrets(config.to_flat())
        text = json.dumps(keys, indent=2) + "\n"
        yield CONFIG_FILE, text.encode()


def write_files(folder: Path, files: Iterable[tuple[str, Any]]) -> WriteResult:
    """Write this rank's files. Always consumes the whole iterable and returns an error instead of
    raising it, because the other ranks wait for this one.
    """
    records: dict[str, FileRecord] = {}
    errors: list[BaseException] = []

    # One thread flushes a file to disk while the next one is serialized.
    with ThreadPoolExecutor(1) as disk:
        pending: list[Future[None]] = []

        def sync(descriptor: int) -> None:
            pending.append(disk.submit(_sync_and_close, os.dup(descriptor)))

        for name, value in files:
            if errors:
                continue
            try:
                path = folder / name
                path.parent.mkdir(exist_ok=True)
                if isinstance(value, bytes):
                    write_atomically(path, value)
                    records[name] = file_record(path)
                else:
                    # Only torch.load reads optimizer files, and it ignores these checksums.
                    zip_checksums = not fnmatch(name, OPTIMIZER_FILES)
                    records[name] = save_file(path, value, zip_checksums=zip_checksums, sync=sync)
            except (OSError, RuntimeError, UserError) as error:
                errors.append(error)
        errors += [failure for future in pending if (failure := future.exception()) is not None]
    if errors:
        problem = first_line(errors[0])
        if not isinstance(errors[0], UserError):
            problem = f"{type(errors[0]).__name__}: {problem}"
        return records, problem
    sync_folder(folder)
    return records, None


def _sync_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
