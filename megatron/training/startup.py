"""Before anything is built: locks and checks of folders, machine and data, and the checkpoint to
start from.
"""

import contextlib
import math
import os
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kerple.attention import Requirements, check_backend
from megatron.checkpoint.cleanup import clean_up
from megatron.checkpoint.configuration import (
    check_trained_data,
    check_trained_tokenizer,
    saved_training,
    trained_text_notice,
    trained_tokenizer,
)
from megatron.checkpoint.directory import iteration_of
from megatron.checkpoint.layers import DTYPES
from megatron.checkpoint.loading import (
    check_model,
    checkpoint_vocab_size,
    locate_checkpoint,
    resumable_config,
    same_folder,
)
from megatron.checkpoint.state_dict import TrainingState
from megatron.config import Config, UserError
from megatron.data.datasets import Datasets
from megatron.data.indexed_dataset import data_fingerprint
from megatron.data.splits import dataset_prefixes
from megatron.data.streams import evaluation_corpora, part_documents
from megatron.model.settings import Layout
from megatron.model.trial import check_parts, not_finite, trial_step
from megatron.tokenizer.interface import Tokenizer
from megatron.tokenizer.tokenizer import padded_vocab_size
from megatron.training.deepspeed_setup import check_deepspeed
from megatron.utils.errors import first_line
from megatron.utils.files import check_writable
from megatron.utils.processes import Lock
from megatron.utils.ranks import Report, run_on_all_ranks, run_on_rank_0


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
    """Raises UserError on every rank if a host does not see the files that rank 0 writes."""

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


def identify_run(save: str | None, state: TrainingState, report: Report) -> str:
    """The run that continues from a state: that of the state, or a new one if `save` is a copy of
    its folder. Reports where it comes from.
    """
    if save is None or not state.run or not state.folder:
        return state.run or secrets.token_hex(8)
    folder, original = Path(save), Path(state.folder)
    still_there = original.is_dir() and original.stat().st_ino == state.inode
    if still_there and not original.samefile(folder):
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


@dataclass(frozen=True)
class Start:
    """What a run starts from.

    Attributes:
        source: the configuration that says which weights to load; that of the run, unless it
            resumes from `save`.
        checkpoint: the folder of one iteration; None: initial weights.
        branch: the iteration of `save` from which the run branched off, before it was resumed; or
            infinity.
    """

    source: Config
    checkpoint: Path | None
    iteration: int
    vocab_size: int
    branch: float

    def lineage_of(self, state: TrainingState) -> list[int] | None:
        """The earlier iterations of the loaded run, up to a branch; None if this is a new run."""
        if self.source.checkpoint.finetune:
            return None
        return [iteration for iteration in state.lineage if iteration <= self.branch]


def find_start(
    config: Config,
    layout: Layout,
    tokenizer: Tokenizer,
    resources: contextlib.ExitStack,
    report: Report,
) -> Start:
    """Check the machine and the folders, lock `save`, and find the checkpoint. Raises UserError."""
    # An error that several ranks find is printed once.
    report(str(run_on_rank_0(lambda: config.batch.resolve(layout.data_size))))
    run_on_all_ranks(lambda: check_attention(config, layout.device))
    run_on_all_ranks(lambda: check_deepspeed(config, layout.data_size))

    # Where the weights come from: `load`, or `save` if it has checkpoints of this run.
    source = _lock_and_resume(config, resources, report)
    checkpoint = run_on_all_ranks(lambda: locate_checkpoint(source, layout, report))[0]
    iteration = 0
    if checkpoint is not None and not source.checkpoint.finetune:
        iteration = iteration_of(checkpoint)
    last_iteration = config.schedule.last_iteration

    def checked_vocab_size() -> int:
        """The padded size. Raises UserError if the checkpoint does not fit the configuration, or no
        iterations are left.
        """
        # A run that only evaluates needs weights; others may start from scratch.
        if checkpoint is None and last_iteration == 0:
            problem = "load is not set"
            if load := config.checkpoint.load:
                problem = f"load: {load} contains no checkpoint"
            raise UserError(
                f"{problem}; train-iters: 0 evaluates a trained model, so load must name a "
                "checkpoint"
            )
        if checkpoint is None:
            divisor = config.model.make_vocab_size_divisible_by
            default = padded_vocab_size(tokenizer.vocab_size, divisor, layout.tensor_size)
            return config.model.padded_vocab_size or default

        # The tokenizer, the sizes and the iteration must fit.
        trained, allowed = trained_tokenizer(checkpoint), config.checkpoint.allow_other_tokenizer
        check_trained_tokenizer(trained, tokenizer, allowed=allowed, place=checkpoint)
        vocab_size = checkpoint_vocab_size(
            checkpoint, config, tokenizer.vocab_size, layout.tensor_size, report
        )
        check_model(checkpoint, source, vocab_size, report)
        if 0 < last_iteration < iteration:
            raise UserError(
                f"train-iters: {last_iteration:,} is below the {iteration:,} iterations of "
                f"{checkpoint}; raise train-iters to continue it, or set train-iters: 0 to "
                "evaluate it"
            )
        return vocab_size

    vocab_size = run_on_all_ranks(checked_vocab_size)[0]

    # Where the run branches off.
    settings, branch = config.checkpoint, math.inf
    if settings.iteration is not None and same_folder(settings.load, settings.save):
        branch = settings.iteration
    return Start(source, checkpoint, iteration, vocab_size, branch)


def _lock_and_resume(config: Config, resources: contextlib.ExitStack, report: Report) -> Config:
    """Lock `save` if the run trains. Returns the configuration that names the weights."""
    load, save = config.checkpoint.load, config.checkpoint.save
    if save is None or config.schedule.last_iteration == 0:
        return config
    lock_save_folder(save, resources)
    resumed = run_on_rank_0(lambda: resumable_config(config))
    if resumed is None:
        return config
    origin = "scratch"
    if load:
        origin = f"load: {load}"
    report(
        f"save: {save} already contains checkpoints of this run, which resumes from them; to start "
        f"again from {origin}, choose another folder"
    )
    return resumed


def try_model(config: Config, place: str) -> None:
    """A trial step of the model in its dtype (see `trial_step`). Raises UserError, starting with
    `place`, for gradients that are not finite, and as `check_parts`.
    """
    check_parts(config.model)
    broken = trial_step(config.model, DTYPES[config.precision.dtype])
    if broken:
        raise UserError(f"{place}: {not_finite(config.model.pos_emb, broken)}")


def report_trained_text(config: Config, start: Start, datasets: Datasets, report: Report) -> None:
    """Report if the run validates or tests on documents that it trains on, or that its checkpoint
    was trained on.
    """
    trained: dict[str, dict[str, Any]] = {}
    if datasets.train is not None:
        documents = run_on_rank_0(partial(part_documents, config, "train"))
        trained["this run trains on them"] = {"trained_documents": documents}
    if start.checkpoint is not None:
        problem = f"{start.checkpoint} may have been trained on them"
        trained[problem] = run_on_rank_0(partial(saved_training, start.checkpoint))
    for part in ("valid", "test"):
        if getattr(datasets, part) is None:
            continue
        documents = run_on_rank_0(partial(part_documents, config, part))
        prefixes, _ = evaluation_corpora(config, part)
        for problem, training in trained.items():
            if notice := trained_text_notice(training, documents, prefixes):
                report(f"notice: {part} data: {problem}: {notice}")


def identify_data(config: Config, start: Start, report: Report) -> dict[str, str]:
    """Absolute prefix -> fingerprint of the datasets of a run that trains. Reports those that are
    new to a run that resumes; raises UserError if one of them has changed.
    """
    if config.schedule.last_iteration == 0:
        return {}
    data = {prefix: data_fingerprint(prefix) for prefix in dataset_prefixes(config)}
    starts_anew = start.source.checkpoint.finetune or config.checkpoint.allow_other_data
    if start.checkpoint is not None and not starts_anew:
        for prefix in check_trained_data(start.checkpoint, data):
            report(
                f"notice: the run continues with {prefix}, which {start.checkpoint} was not "
                "trained with"
            )
    # Another process may read the checkpoint in another working directory.
    return {str(Path(prefix).absolute()): fingerprint for prefix, fingerprint in data.items()}
