"""Checks before anything is built: folders are writable, no other run saves to `save`, and the
machine has a suitable attention backend.
"""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import torch

from kerple.attention import Requirements, check_backend
from megatron.checkpoint.cleanup import clean_up
from megatron.checkpoint.layers import DTYPES
from megatron.checkpoint.state_dict import TrainingState
from megatron.config import Config, UserError
from megatron.utils.errors import first_line
from megatron.utils.files import check_writable
from megatron.utils.processes import Lock
from megatron.utils.ranks import run_on_all_ranks, run_on_rank_0


def lock_log_folders(config: Config, resources: contextlib.ExitStack) -> None:
    """Lock `log-dir` and `tensorboard-dir` until `resources` are released. Every rank must call
    this.

    Raises UserError, on all ranks, if one of them cannot be written, or another run logs to it:
    their metrics would be mixed.
    """
    logging = config.logging
    folders = {"log-dir": logging.log_dir, "tensorboard-dir": logging.tensorboard_dir}
    locked = set[Path]()
    for key, folder in folders.items():
        if folder and Path(folder).resolve() not in locked:
            locked.add(Path(folder).resolve())
            message = (
                f"{key}: another run logs to {folder}; wait until it ends, or choose another folder"
            )
            lock = Lock(Path(folder) / "log.lock", message)
            resources.callback(lock.release)
            run_on_rank_0(lock.acquire)


def lock_save_folder(save: str, resources: contextlib.ExitStack) -> None:
    """Check that all ranks can write to the folder, and lock it until `resources` are released.
    Every rank must call this.

    Raises UserError, on all ranks, if one of them cannot write to it, a host has another folder of
    this name, or another run holds the lock.
    """
    busy_message = (
        f"save: another run saves to {save}; wait until it ends, or choose another folder"
    )
    lock = Lock(Path(save) / "run.lock", busy_message)
    resources.callback(lock.release)
    # With its own test, because the lock is not flushed to disk.
    run_on_rank_0(lambda: check_writable(save, "save"))
    run_on_rank_0(lock.acquire)
    run_on_rank_0(lambda: _clean_up(Path(save)))
    run_on_all_ranks(lambda: check_writable(save, "save"))
    _check_that_all_hosts_share(Path(save))


def _clean_up(folder: Path) -> None:
    """Remove what a killed run left in its folder. Raises UserError if that is not possible."""
    try:
        clean_up(folder)
    except OSError as error:
        raise UserError(
            f"save: cannot write {error.filename or folder}: {error.strerror or first_line(error)}"
        ) from error


def _check_that_all_hosts_share(folder: Path) -> None:
    """Raises UserError on every rank if a host does not see the files that rank 0 writes to the
    folder.
    """

    def create() -> Path:
        # Network file systems may cache for a minute that a file does not exist, so use a new name.
        probe = folder / f".shared-{os.uname().nodename}-{os.getpid()}"
        probe.touch()
        return probe

    def check() -> None:
        if not probe.exists():
            raise UserError(
                f"save: {folder.absolute()} on {os.uname().nodename} is not the folder that rank 0 "
                "writes to; checkpoints need a folder that all hosts share"
            )

    probe = run_on_rank_0(create)
    try:
        run_on_all_ranks(check)
    finally:
        run_on_rank_0(lambda: probe.unlink(missing_ok=True))


def identify_run(save: str | None, state: TrainingState, report: Callable[[str], None]) -> str:
    """The run that continues from a state: that of the state, or a new one if `save` is a copy of
    its folder. Reports where it comes from.
    """
    if save is None or not state.run or not state.folder:
        return state.run or secrets.token_hex(8)
    folder, original = Path(save), Path(state.folder)
    if (
        original.is_dir()
        and original.stat().st_ino == state.inode
        and not original.samefile(folder)
    ):
        report(
            f"notice: {save} is a copy of {original}; its logs (log-dir, use_wandb) are those of a "
            "new run"
        )
        return secrets.token_hex(8)
    if folder.resolve() != original:
        report(f"notice: {save} was moved from {original}; its logs continue those of the run")
    return state.run


def check_attention(config: Config, device: torch.device) -> None:
    """Raises UserError if the attention backend cannot train on this device."""
    model = config.model
    requirements = Requirements.of(
        *model.build_on_meta(),
        dropout=model.attention_dropout > 0,
        training=True,
        dtype=DTYPES[config.precision.dtype],
        head_size=model.head_size,
        device=device,
    )
    try:
        check_backend(model.attention_backend, requirements)
    except NotImplementedError as error:
        raise UserError(f'"attention_backend": {error}') from error
