"""Checks before anything is built: whether folders are writable, no other run saves to `save`, and checkpoints fit."""

import contextlib
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.checkpoint.directory import clean_up, saved_iterations
from megatron.checkpoint.layers import DTYPES
from megatron.config import Config, UserError
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from megatron.training.flops import count_parameters
from megatron.utils.errors import first_line
from megatron.utils.files import check_writable
from megatron.utils.locks import Lock
from megatron.utils.ranks import run_on_all_ranks, run_on_rank_0


def check_log_folders(config: Config) -> None:
    """Check that the folders that rank 0 writes to, besides `save`, are writable. Every rank must call this.

    Sample indices are not included: they are written before the model is built, and a read-only folder that already
    contains them is enough.

    Raises UserError, on all ranks.
    """
    logging = config.logging
    folders = {
        "log-dir": logging.log_dir,
        "tensorboard-dir": logging.tensorboard_dir,
        "eval-results-prefix": config.evaluation.eval_results_prefix,
        "use_wandb (environment variable WANDB_DIR)": os.environ.get("WANDB_DIR", ".") if logging.use_wandb else None,
    }

    def check() -> None:
        for key, folder in folders.items():
            if folder:
                check_writable(folder, key)

    run_on_rank_0(check)


def lock_log_folders(config: Config, resources: contextlib.ExitStack) -> None:
    """Lock `log-dir` and `tensorboard-dir` until `resources` are released. Every rank must call this.

    Raises UserError, on all ranks, if another run logs to one of them: their metrics would be mixed.
    """
    logging = config.logging
    folders = {"log-dir": logging.log_dir, "tensorboard-dir": logging.tensorboard_dir}
    locked = set[Path]()
    for key, folder in folders.items():
        if folder and Path(folder).resolve() not in locked:
            locked.add(Path(folder).resolve())
            message = f"{key}: another run logs to {folder}; wait until it ends, or choose another folder"
            lock = Lock(Path(folder) / "log.lock", message)
            resources.callback(lock.release)
            run_on_rank_0(lock.acquire)


def lock_save_folder(save: str, resources: contextlib.ExitStack) -> Lock:
    """Check that all ranks can write to the folder, and lock it until `resources` are released. Every rank must call
    this.

    Raises UserError, on all ranks, if one of them cannot write to it, a host has another folder of this name, or
    another run holds the lock.
    """
    busy_message = f"save: another run saves to {save}; wait until it ends, or choose another folder"
    lock = Lock(Path(save) / "run.lock", busy_message)
    resources.callback(lock.release)
    # With its own test, because the lock is not flushed to disk.
    run_on_rank_0(lambda: check_writable(save, "save"))
    run_on_rank_0(lock.acquire)
    run_on_rank_0(lambda: _clean_up(Path(save)))
    run_on_all_ranks(lambda: check_writable(save, "save"))
    _check_that_all_hosts_share(Path(save))
    return lock


def _clean_up(folder: Path) -> None:
    """Remove what a killed run left in its folder. Raises UserError if that is not possible."""
    try:
        clean_up(folder)
    except OSError as error:
        raise UserError(
            f"save: cannot write {error.filename or folder}: {error.strerror or first_line(error)}"
        ) from error


def _check_that_all_hosts_share(folder: Path) -> None:
    """Raises UserError on every rank if a host does not see the files that rank 0 writes to the folder."""

    def create() -> Path:
        # Network file systems may cache for a minute that a file does not exist, so use a new name.
        probe = folder / f".shared-{os.uname().nodename}-{os.getpid()}"
        probe.touch()
        return probe

    def check() -> None:
        if not probe.exists():
            raise UserError(
                f"save: {folder.absolute()} on {os.uname().nodename} is not the folder that rank 0 writes to; "
                "checkpoints need a folder that all hosts share"
            )

    probe = run_on_rank_0(create)
    try:
        run_on_all_ranks(check)
    finally:
        run_on_rank_0(lambda: probe.unlink(missing_ok=True))


def check_space(config: Config, padded_vocab_size: int, start: int, report: Callable[[str], None]) -> None:
    """Check that the disk of `save` has room for the checkpoints after iteration `start`. Every rank must call this.

    An old checkpoint is deleted after the new one is written, so `keep-last-n-checkpoints` + 1 must fit, minus those
    that exist, plus those that are always kept. Without that key, two must fit, and a note is printed if not all of
    them fit.

    Raises UserError, on all ranks.
    """
    settings, last = config.checkpoint, config.schedule.train_iters or 0
    folder, keep, count = Path(settings.save or ""), settings.keep_last_n_checkpoints, _count_saves(config, start)
    if not count:
        return

    def check() -> str:
        size, description = checkpoint_bytes(config, padded_vocab_size)
        free = shutil.disk_usage(folder).free
        existing = len([iteration for iteration in saved_iterations(folder) if iteration <= start])
        extra = sum(start < iteration <= last for iteration in settings.extra_save_iters)
        at_once = count
        if keep is not None and settings.checkpoint_scale == "linear":
            at_once = min(count, keep + 1 - min(existing, keep) + extra)
        needed = min(at_once, 2) if keep is None else at_once
        if needed * size > free:
            raise UserError(
                f"save: {folder} has {_readable(free)} of free space, but training needs {_readable(needed * size)} "
                f"for {needed} checkpoint{'s' * (needed > 1)} of about {_readable(size)} ({description}); free some "
                "space, choose another folder, or lower keep_last_n_checkpoints"
            )
        note = ""
        if at_once * size > free:
            note = f"; only about {free // size} of them fit: set keep_last_n_checkpoints"
        return (
            f"checkpoints: {count:,} up to iteration {last:,}, about {_readable(size)} each ({description}); "
            f"{_readable(free)} of free space{note}"
        )

    report(run_on_rank_0(check))


def checkpoint_bytes(config: Config, padded_vocab_size: int) -> tuple[int, str]:
    """Estimated size of a checkpoint in bytes, and a description of its contents.

    Counts weights and optimizer state. The positional method, which may be the user's own, is not built: its
    parameters are few.
    """
    without_positions = {"pos_emb": "none", "pos_emb_options": {}, "attention_backend": "auto"}
    model_config = config.model.model_copy(update={**without_positions, "release_bf16_distances": False})
    settings = ModelSettings(model_config, padded_vocab_size)
    with torch.device("meta"):
        parameters = count_parameters(GPT(settings).layers(), settings)["total"]
    dtype = DTYPES[config.precision.dtype]
    weights, optimizer = parameters * dtype.itemsize, 0
    if not config.checkpoint.no_save_optim:
        tensors = config.optimizer.spec.state_per_element + (dtype != torch.float32)  # master weights
        optimizer = int(parameters * tensors * torch.float32.itemsize)
    return weights + optimizer, f"weights {_readable(weights)}, optimizer {_readable(optimizer)}"


def _count_saves(config: Config, start: int) -> int:
    """Number of checkpoints after iteration `start` (at iteration 0 too, if it starts there)."""
    settings, last = config.checkpoint, config.schedule.train_iters or 0
    steps = {step for step in settings.extra_save_iters if start < step <= last or step == start == 0}
    if start < last:
        steps.add(last)
    factor = settings.save_interval
    if factor is None:
        return len(steps)
    if settings.checkpoint_scale == "linear":
        multiples = last // int(factor) - start // int(factor)
        return multiples + len([step for step in steps if step == 0 or step % int(factor)])
    powers = range(int(math.log(max(last, 1), factor)) + 2)
    return len(steps | {step for step in (int(factor**power) for power in powers) if start < step <= last})


def _readable(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.2f} MB"
