"""The training loop: setup, iterations, validation, checkpoints, and a clean end."""

import contextlib
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.cleanup import check_replaced
from megatron.checkpoint.configuration import code_digests
from megatron.checkpoint.loading import load_checkpoint
from megatron.checkpoint.saving import Checkpointer
from megatron.checkpoint.state_dict import TrainingState
from megatron.config import Config, UserError, check_vocabulary
from megatron.data.datasets import Datasets, build_datasets
from megatron.data.streams import part_documents
from megatron.model.settings import Layout
from megatron.model.trial import check_parts
from megatron.tokenizer.interface import Tokenizer
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.training import distributed
from megatron.training.engine import Engine, build_engine
from megatron.training.flops import count_parameters, flops_per_token
from megatron.training.logging import Logger, StepLog, non_finite_loss, profiled_steps
from megatron.training.optimizer import Schedule
from megatron.training.startup import (
    Start,
    find_start,
    identify_data,
    identify_run,
    lock_log_folders,
    report_trained_text,
)
from megatron.training.validation import ExtrapolationCurves, Validator
from megatron.utils.ranks import Report, run_on_all_ranks, run_on_rank_0

# -- the whole run ---------------------------------------------------------------------------------


def train(config: Config) -> TrainingState:
    """Train as configured, or only validate if `train-iters` is 0. Returns the state at the end of
    the run.

    Raises UserError for an invalid configuration, invalid data or an unusable checkpoint, before
    anything is written.
    """
    layout = distributed.initialize(config)
    try:
        # A schedule without an end is an error before anything is locked or written.
        run_on_rank_0(lambda: config.schedule.last_iteration)
        # Locks and log files are released when the run ends, also by an error.
        with contextlib.ExitStack() as resources:
            lock_log_folders(config, resources)
            logger = resources.enter_context(contextlib.closing(Logger(config, layout)))
            trainer = build_trainer(config, layout, logger, resources)
            iteration = trainer.state.iteration
            # Within, a signal ends the run after an iteration, with a checkpoint; later, it ends
            # the process.
            with (
                distributed.DistributedSignalHandler() as signals,
                profiled_steps(config, layout, iteration, logger.info) as profiler_step,
            ):
                finished = trainer.train(signals, profiler_step)
            if finished:
                trainer.evaluate_at_end()
            else:
                trainer.check_data_workers()
            return trainer.state
    finally:
        distributed.shutdown()


# -- setup: what needs no model comes first, so that its errors do ---------------------------------


def build_trainer(
    config: Config, layout: Layout, logger: Logger, resources: contextlib.ExitStack
) -> "Trainer":
    """Build the tokenizer, the datasets and the model, and load the checkpoint. `resources`
    releases the lock on `save`.

    Raises UserError for an invalid configuration, invalid data, an unusable checkpoint, or a folder
    that is locked or not writable; if possible before the model is built.
    """
    # Random numbers of all later steps depend on the seed.
    report = logger.info
    report(layout.describe())
    distributed.seed_everything(config.training.seed, layout)

    # Whatever needs no model: its errors are found first.
    tokenizer = TokenizerFiles.of(config).build()
    run_on_all_ranks(lambda: check_vocabulary(config, tokenizer.vocab_size))
    start = find_start(config, layout, tokenizer, resources, report)
    run_on_rank_0(lambda: check_parts(config.model))
    data = run_on_rank_0(lambda: identify_data(config, start, report))
    planned = _num_samples(config, layout, TrainingState())
    datasets = _build_datasets(config, tokenizer, planned, report)
    report_trained_text(config, start, datasets, report)
    curves = None
    if config.training.extrapolation_lengths:
        curves = ExtrapolationCurves(config, layout, logger)

    # The model, its weights, and the state of the run.
    engine = build_engine(config, start.vocab_size, layout, report)
    outside = _count_parameters(engine, tokenizer.vocab_size, report)
    state = _load_state(engine, start, report)
    needed = _num_samples(config, layout, state)
    if any(map(operator.gt, needed, planned)):  # the checkpoint was saved with larger batches
        datasets = _build_datasets(config, tokenizer, needed, report)
    _follow_data_order(state, datasets, report)
    state.tokenizer = tokenizer.fingerprint
    state.code = code_digests(config.model)
    _record_data(config, state, data)
    state.run = run_on_rank_0(lambda: identify_run(config.checkpoint.save, state, report))

    # What the loop calls.
    validator = Validator(engine, logger, datasets.valid, datasets.test)
    checkpointer = None
    if config.checkpoint.save:
        checkpointer = Checkpointer(engine, config, report, start.lineage_of(state))
    schedule = _build_schedule(config, state, engine.schedule_step(state.iteration), report)
    logger.start_metrics(state)
    return Trainer(
        config, logger, engine, state, schedule, datasets, validator, curves, checkpointer, outside
    )


# -- steps of the setup ----------------------------------------------------------------------------


def _count_parameters(engine: Engine, vocab_size: int, report: Report) -> int:
    """Print the size of the model; returns the number of parameters outside the input embedding.

    vocab_size: of the tokenizer.
    """
    parameters = count_parameters(engine.layers(), engine.settings, engine.layout)
    report(
        f"model: {parameters['total']:,} parameters, {parameters['positional']:,} of them "
        f"positional ({engine.config.model.pos_emb}); vocabulary {vocab_size:,} padded to "
        f"{engine.settings.padded_vocab_size:,}; {engine.config.precision.dtype}"
    )
    return parameters["outside_embedding"]


def _load_state(engine: Engine, start: Start, report: Report) -> TrainingState:
    """Load the checkpoint. Raises UserError if the run would replace those of another run."""
    config, last_iteration = engine.config, engine.config.schedule.last_iteration
    state = load_checkpoint(engine, start.source, start.checkpoint, report)
    engine.project()

    def saves(iteration: int) -> bool:
        # Iteration 0 is saved only by a run that begins there, and no run ends there.
        if iteration == 0:
            return start.iteration == 0 and config.checkpoint.saves(0)
        if not start.iteration < iteration <= last_iteration:
            return False
        is_end = iteration == last_iteration or _is_due(iteration, config.training.exit_interval)
        return is_end or config.checkpoint.saves(iteration)

    # Before training: which checkpoints in `save` it will replace.
    folder = config.checkpoint.save
    if folder is not None and last_iteration > 0:
        lineage = start.lineage_of(state)
        replaced = run_on_rank_0(lambda: check_replaced(Path(folder), saves, lineage))
        later = [iteration for iteration in replaced if iteration > state.iteration]
        if later:
            report(
                f"notice: {folder} contains later checkpoints, which this run replaces when it "
                f"saves at the same iterations ({', '.join(map(str, later))}); to keep them, "
                "choose another save"
            )
    return state


def _num_samples(config: Config, layout: Layout, state: TrainingState) -> tuple[int, int, int]:
    """The numbers of training, validation and test samples to finish a run from this state,
    including those that it has read; no training samples if it has ended.
    """
    training, last_iteration = config.training, config.schedule.last_iteration
    _, _, global_batch = config.batch.resolve(layout.data_size)
    # Training: what was read, and a global batch for each iteration that remains.
    remaining = last_iteration - state.iteration
    training_samples = 0
    if remaining > 0:
        training_samples = state.consumed_samples + remaining * global_batch

    # A validation at each interval, and one at the end.
    interval, per_validation = training.eval_interval, training.eval_iters * global_batch
    validations = max(last_iteration // interval - state.evaluated_at // interval, 0) + 1
    validation_samples = state.consumed_valid_samples + validations * per_validation
    # The test reads as much as one validation.
    return training_samples, validation_samples, per_validation


def _build_datasets(
    config: Config,
    tokenizer: Tokenizer,
    num_samples: tuple[int, int, int],
    report: Report,
) -> Datasets:
    """Training, validation and test samples for the whole run. Raises UserError if there are no
    documents.
    """
    training = config.training
    datasets = build_datasets(
        config, tokenizer, config.model.seq_length, num_samples, training.seq_length_val
    )
    # Missing documents: an error for training, and for a run that only validates.
    if num_samples[0] and datasets.train is None:
        raise UserError("there are no training documents: check split, or set train-data-paths")
    if training.eval_iters and datasets.valid is None:
        place = "valid-data-paths is not set"
        if config.data.data_path is not None:
            place = (
                f"split {config.data.split} leaves none of the documents of data-path "
                f"{config.data.data_path}"
            )
        without_validation = f"there are no validation documents: {place}"
        if config.schedule.last_iteration == 0:
            raise UserError(f"train-iters is 0, and {without_validation}")
        report(f"no validation: {without_validation}")
    return datasets


def _follow_data_order(state: TrainingState, datasets: Datasets, report: Report) -> None:
    """Record the order of the training samples in the state; prints it, and whether it differs from
    the state's.
    """
    if datasets.train is None:
        return
    data_order = datasets.train.order
    # A resumed run counts on in the order that it finds.
    if state.data_order and state.consumed_samples and data_order != state.data_order:
        report(
            "the order of the training samples differs from the checkpoint's (data, split, seed or "
            f"seq-length changed): training resumes at sample {state.consumed_samples:,} of the "
            "new order, so some samples may be seen twice and others never"
        )
    state.data_order = data_order
    for line in datasets.train.describe():
        report(f"training data: {line}")


def _record_data(config: Config, state: TrainingState, data: Mapping[str, str]) -> None:
    """Add the datasets of the run (see `identify_data`), and the documents of its training data, to
    those that the weights were trained on.
    """
    for prefix, fingerprint in data.items():
        if state.data.get(prefix, fingerprint) != fingerprint:
            state.replaced_data.append(prefix)
    state.data |= data
    if not data:
        return
    for fingerprint, (first, end) in part_documents(config, "train").items():
        before = state.trained_documents.get(fingerprint, (first, end))
        state.trained_documents[fingerprint] = min(first, before[0]), max(end, before[1])


def _build_schedule(config: Config, state: TrainingState, step: int, report: Report) -> Schedule:
    """The learning rates of the run, which starts at `step` of them; prints them, and records the
    schedule in the state.
    """
    last_iteration = config.schedule.last_iteration
    # The name in the configuration replaces the checkpoint's.
    state.lr_schedule = config.schedule.lr_schedule or state.lr_schedule
    decay_iters = config.schedule.lr_decay_iters or last_iteration
    schedule = Schedule(
        config.optimizer.lr,
        config.schedule.lr_decay_style,
        decay_iters,
        config.schedule.warmup_steps(decay_iters),
        config.schedule.lowest_lr(config.optimizer.lr),
        state.lr_schedule,
    )
    # What the log says about the rest of the run.
    if 0 < last_iteration == state.iteration:
        report(
            f"nothing to train: the run has ended at train-iters {last_iteration:,}; it is "
            "evaluated"
        )
    if state.iteration < last_iteration:
        report(schedule.describe())
        if jump := schedule.jump(step, state.learning_rate):
            report(f"notice: {jump}")
    return schedule


# -- iterations ------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """A training run on this rank: data, engine, state, checkpoints and log. `build_trainer` builds
    it.

    Attributes:
        outside_embedding: the number of parameters outside the input embedding, for the MFU.
    """

    config: Config
    logger: Logger
    engine: Engine
    state: TrainingState
    schedule: Schedule
    datasets: Datasets
    validator: Validator
    curves: ExtrapolationCurves | None
    checkpointer: Checkpointer | None
    outside_embedding: int

    @property
    def last_iteration(self) -> int:
        return self.config.schedule.last_iteration

    def train(
        self, signals: distributed.DistributedSignalHandler, profiler_step: Callable[[], None]
    ) -> bool:
        """Train to the last iteration, and call `profiler_step` after every step.

        Returns False if a signal or `exit-interval` ended the run before it.
        """
        # Before the first step. The log begins to count time when it is built.
        state, length, is_first = self.state, 0, True
        self._save_or_evaluate_before_the_first_step()
        flops = partial(flops_per_token, self.outside_embedding, self.config.model)
        log = StepLog(self.config, self.engine, self.logger, flops, state)
        if self.datasets.train is not None and state.iteration < self.last_iteration:
            batches = self.engine.batches(self.datasets.train, state.consumed_samples)
        # The steps.
        while state.iteration < self.last_iteration:
            # The curriculum changes the length between steps.
            if length != self.engine.length_at(state.iteration):
                length = self.engine.length_at(state.iteration)
                if self.config.curriculum.enabled:
                    self.logger.info(
                        f"curriculum_learning: length {length:,} from iteration "
                        f"{state.iteration + 1:,}"
                    )
            # One step of the optimizer over a global batch. The loss stays on the device.
            learning_rate = self.schedule(self.engine.schedule_step(state.iteration))
            loss = self.engine.train_step(batches, learning_rate, state.iteration)
            profiler_step()

            # The progress, which checkpoints contain.
            state.iteration, state.learning_rate = state.iteration + 1, learning_rate
            state.consumed_samples += self.engine.global_batch
            state.tokens += self.engine.global_batch * length
            log.add(loss)
            # Everything that happens between two steps.
            if not self._finish_step(log, loss, signals, is_first=is_first):
                return False
            is_first = False
        return True

    def _finish_step(
        self,
        log: StepLog,
        loss: Tensor,
        signals: distributed.DistributedSignalHandler,
        *,
        is_first: bool,
    ) -> bool:
        """Log, validate and save if they are due. Returns False if the run ends before its last
        iteration.
        """
        # Whether the run ends after this step, and why.
        training, state = self.config.training, self.state
        is_last = state.iteration == self.last_iteration
        exit_reason = None
        if not is_last:
            exit_reason = self._exit_reason(signals)
        assert state.learning_rate is not None  # that of the step

        # Log, validate and save, in this order.
        if _is_due(state.iteration, training.log_interval) or is_last:
            log.write(state, state.learning_rate)
        elif is_first:  # the next line may be hours away
            self.logger.info(
                f"iteration {state.iteration:,}/{self.last_iteration:,} | lm loss {float(loss):.4f}"
            )
        # A run that ends early leaves its validation to the run that resumes it.
        if _is_due(state.iteration, training.eval_interval) and not exit_reason:
            with log.paused():
                self._evaluate()
        if self.config.checkpoint.saves(state.iteration) or is_last or exit_reason:
            self._save_if_finite(log)
        if exit_reason:
            saved = "no checkpoint saved (`save` is not set)"
            if self.checkpointer:
                saved = "checkpoint saved"
            self.logger.info(f"exiting after iteration {state.iteration}: {exit_reason}; {saved}")
        return exit_reason is None

    def _save_or_evaluate_before_the_first_step(self) -> None:
        """Save iteration 0, or evaluate as the run did not before it was stopped."""
        state, last_iteration = self.state, self.last_iteration
        if state.iteration == 0 and last_iteration > 0 and self.config.checkpoint.saves(0):
            self._save()
        was_stopped = 0 < state.iteration < last_iteration and state.evaluated_at != state.iteration
        if was_stopped and _is_due(state.iteration, self.config.training.eval_interval):
            self._evaluate()

    def _exit_reason(self, signals: distributed.DistributedSignalHandler) -> str | None:
        """Why the run ends before its last iteration; None if it continues."""
        # A signal or a lost worker of any rank ends the run on all ranks.
        if signals.received_by_any_rank(stop=self.engine.data_failure is not None):
            if self.engine.data_failure:
                return "a data worker was killed"
            if signals.received is not None:
                return "received a signal to stop"
            return "another rank lost a data worker, or received a signal to stop"
        interval = self.config.training.exit_interval
        if _is_due(self.state.iteration, interval):
            return f"exit-interval {interval}"
        return None

    def _save_if_finite(self, log: StepLog) -> None:
        """Save a checkpoint. Raises UserError if the loss is not finite, which must not replace a
        good checkpoint.
        """
        if self.checkpointer is None:
            return
        with log.paused():
            # The steps since the last line of the log, which checked those before it.
            log.check(self.state.iteration)
            # The loss of random tokens, with the weights after the last step.
            engine, training = self.engine, self.config.training
            generator = torch.Generator().manual_seed(training.seed)
            shape = (engine.micro_batch, (training.seq_length_val or engine.seq_length) + 1)
            tokens = torch.randint(engine.settings.padded_vocab_size, shape, generator=generator)
            batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
            if not math.isfinite(engine.validate(iter([batch]), 1)):
                raise non_finite_loss(self.config, f"after iteration {self.state.iteration}")
            self.state.unlogged_losses = log.unlogged()
            self._save()

    def check_data_workers(self) -> None:
        """Raises UserError if a data worker of this rank was killed."""
        failure = self.engine.data_failure
        if failure is not None:
            raise UserError(
                f"training stopped at iteration {self.state.iteration:,}: {failure}. The usual "
                "cause is that memory was full; free some, or lower num_workers, and run the same "
                "command again"
            )

    def _evaluate(self) -> None:
        """Validation and extrapolation curves at the current iteration."""
        if self.config.training.eval_iters:
            self.validator.validate(self.state)
        if self.curves is not None:
            self.curves.measure(self.engine, self.state.iteration)
        self.state.evaluated_at = self.state.iteration

    def _save(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.save(self.state)

    def evaluate_at_end(self) -> None:
        """Validation, extrapolation curves and test at the last iteration."""
        has_validation = self.config.training.eval_iters > 0
        if has_validation and self.validator.validated_at != self.state.iteration:
            # An earlier process may have measured it: repeat it on the same samples.
            if self.state.evaluated_at == self.state.iteration:
                samples = self.config.training.eval_iters * self.engine.global_batch
                first = self.state.consumed_valid_samples - samples
                self.state.consumed_valid_samples = max(first, 0)
            self.validator.validate(self.state)
        if self.curves is not None and self.curves.measured_at != self.state.iteration:
            self.curves.measure(self.engine, self.state.iteration)
        # `train-iters` 0 asks for the validation only.
        if has_validation and self.last_iteration > 0:
            self.validator.test(self.state)


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0
