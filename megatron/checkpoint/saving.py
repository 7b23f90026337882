"""Saving: everything goes to a folder of another name, which takes its own name when it is whole."""

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpoint import random_state
from megatron.checkpoint.directory import point_latest, remove_older, tag_for
from megatron.checkpoint.state import TrainingState
from megatron.checkpoint.storage import CheckpointError, sync_folder, write_text
from megatron.config import Config


def save_checkpoint(engine, config: Config, state: TrainingState) -> Path:
    """Write `config.checkpoint.save`/global_stepN and point `latest` at it; called by every rank together.

    `engine` is `megatron.training.engine.Engine`. If a rank cannot write (a full disk), every rank raises
    CheckpointError, what was written is removed, and the previous checkpoints stay as they were.
    """
    layout = engine.layout
    directory = Path(config.checkpoint.save)
    tag = tag_for(state.iteration)
    unfinished = directory / f"{tag}.unfinished"
    _on_main(layout, lambda: _prepare(directory, unfinished))
    error = _write(engine, config, state, directory, unfinished)
    failures: list[str | None] = [None] * layout.world_size
    dist.all_gather_object(failures, None if error is None else f"{type(error).__name__}: {error}".splitlines()[0])
    failure = next((f"rank {rank}: {text}" for rank, text in enumerate(failures) if text), None)
    if failure is not None:
        _on_main(layout, lambda: shutil.rmtree(unfinished, ignore_errors=True))
        raise CheckpointError(
            f"{directory / tag}: could not be saved ({failure}); free some space or check the folder's permissions. "
            "The checkpoints saved before are untouched"
        )
    _on_main(layout, lambda: _publish(directory, unfinished, tag, config.checkpoint.keep_last_n_checkpoints))
    return directory / tag


def _write(engine, config: Config, state: TrainingState, directory: Path, unfinished: Path) -> Exception | None:
    """This rank's files. The error is returned, not raised: the other ranks wait for this one at DeepSpeed's
    barriers.
    """
    ds_engine, layout = engine.engine, engine.layout
    client_state = {
        "training": state.to_dict(),
        "shape": engine.shape(),
        "optimizer_left_out": config.checkpoint.no_save_optim,
    }
    with ds_engine.optimizer_left_out(config.checkpoint.no_save_optim):
        ds_engine.save_checkpoint(str(directory), tag=unfinished.name, client_state=client_state, save_latest=False)
    if ds_engine.checkpoint_engine.error is not None:
        return ds_engine.checkpoint_engine.error
    try:
        if not config.checkpoint.no_save_rng:
            torch.save(random_state.capture(), unfinished / f"random_rank_{layout.rank:05d}.pt")
        if layout.is_main:
            configs = unfinished / "configs"
            configs.mkdir(exist_ok=True)
            # JSON is YAML: the file loads like any other configuration.
            write_text(configs / "config.yml", json.dumps(config.to_flat(), indent=2) + "\n")
    except (OSError, RuntimeError) as error:
        return error
    return None


def _prepare(directory: Path, unfinished: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir()
    except OSError as error:
        raise CheckpointError(f"save: {directory}: cannot be written ({error.strerror})") from error


def _publish(directory: Path, unfinished: Path, tag: str, keep: int | None) -> None:
    final, replaced = directory / tag, directory / f".{tag}.replaced"
    sync_folder(unfinished)
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        final.rename(replaced)
    unfinished.rename(final)
    sync_folder(directory)
    point_latest(directory, tag)
    if replaced.exists():
        shutil.rmtree(replaced)
    if keep is not None:
        remove_older(directory, keep)


def _on_main(layout, action) -> None:
    """Run on rank 0 while the others wait; its error is raised on every rank."""
    outcome: list[str | None] = [None]
    if layout.is_main:
        try:
            action()
        except CheckpointError as error:
            outcome[0] = str(error)
        except OSError as error:
            outcome[0] = f"{error.filename or 'checkpoint'}: {error.strerror}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise CheckpointError(outcome[0])
