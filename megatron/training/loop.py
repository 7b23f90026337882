"""The training loop: setup, iterations, validation, checkpoints, and a clean end."""

import contextlib
import math
import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from megatron.checkpoint.directory import check_not_replaced, iteration_of
from megatron.checkpoint.loading import (
    check_model,
    check_save_folder,
    checkpoint_vocab_size,
    load_checkpoint,
    locate_checkpoint,
    resumable_config,
)
from megatron.checkpoint.saving import Checkpointer
from megatron.checkpoint.state_dict import TrainingState
from megatron.config import Config, UserError, check_vocabulary
from megatron.data import build_datasets
from megatron.data.datasets import Datasets
from megatron.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size
from megatron.training import distributed
from megatron.training.engine import Engine
from megatron.training.flops import count_parameters, flops_per_token
from megatron.training.logging import Logger, StepLog, non_finite_loss
from megatron.training.machine import check_machine, check_number_of_samples
from megatron.training.optimizer import Schedule
from megatron.training.profiler import profiled_steps
from megatron.training.startup import check_log_folders, check_space, lock_log_folders, lock_save_folder
from megatron.training.validation import ExtrapolationCurves, Validator
from megatron.utils.locks import Lock
from megatron.utils.ranks import run_on_rank_0


def train(config: Config, *, force: bool = False) -> TrainingState:
    """Train as configured, or only validate if `train-iters` is 0. Returns the state at the end of the run.

    force: train even if more memory is needed than is free.

    Raises UserError for an invalid configuration, invalid data or an unusable checkpoint, before anything is written.
    """
    layout = distributed.initialize(config)
    try:
        check_log_folders(config)
        with contextlib.ExitStack() as resources:
            lock_log_folders(config, resources)
            logger = resources.enter_context(contextlib.closing(Logger(config, layout)))
            trainer = Trainer(config, layout, logger, resources, force=force)
            iteration = trainer.state.iteration
            with (
                distributed.DistributedSignalHandler() as signals,
                profiled_steps(config, layout, iteration, logger.info) as profiler_step,
            ):
                try:
                    finished = trainer.train(signals, profiler_step)
                finally:
                    if trainer.checkpointer is not None:
                        trainer.checkpointer.finish()
            if finished:
                trainer.evaluate_at_end()
            else:
                trainer.check_data_workers()
            return trainer.state
    finally:
        distributed.shutdown()


class Trainer:
    """A training run on this rank: data, engine, state, checkpoints and log."""

    def __init__(
        self,
        config: Config,
        layout: distributed.Layout,
        logger: Logger,
        resources: contextlib.ExitStack,
        *,
        force: bool = False,
    ):
        """Build the tokenizer, the datasets and the model, and load the checkpoint. `resources` releases the lock on
        `save`. `force`: see `train`.

        Raises UserError for an invalid configuration, invalid data, an unusable checkpoint, or a folder that is locked,
        not writable or too small; if possible before the model is built.
        """
        if config.schedule.train_iters is None:
            raise UserError("train-iters is not set; set it to the number of iterations (0: only evaluate)")
        self.config, self.layout, self.logger = config, layout, logger
        self.last_iteration = config.schedule.train_iters
        logger.info(layout.describe())
        distributed.seed_everything(config.training.seed, layout)

        tokenizer = build_tokenizer(
            config.tokenizer.tokenizer_type, config.tokenizer.vocab_file, config.tokenizer.merge_file
        )
        check_vocabulary(config, tokenizer.vocab_size)
        vocab_size = config.model.padded_vocab_size or padded_vocab_size(
            tokenizer.vocab_size, config.model.make_vocab_size_divisible_by, layout.tensor_size
        )
        logger.info(str(config.batch.resolve(layout.data_size)))
        check_machine(config, layout, vocab_size, logger.info, force=force)
        load, save = config.checkpoint.load, config.checkpoint.save
        self.lock: Lock | None = None
        resumed: Config | None = None
        if save is not None and self.last_iteration > 0:
            self.lock = lock_save_folder(save, resources)
            check_save_folder(config)
            resumed = resumable_config(config)
        if resumed is not None:
            logger.info(
                f"save: {save} already contains checkpoints of this run, which resumes from them; to start again from "
                f"{f'load: {load}' if load else 'scratch'}, choose another folder"
            )
        source = resumed or config  # of the weights
        checkpoint = locate_checkpoint(source, layout, logger.info)
        if checkpoint is not None:
            vocab_size = checkpoint_vocab_size(
                checkpoint, config, tokenizer.vocab_size, layout.tensor_size, logger.info
            )
            check_model(checkpoint, source, vocab_size, logger.info)
        if checkpoint is None and self.last_iteration == 0:
            problem = f"load: {load} contains no checkpoint" if load else "load is not set"
            raise UserError(f"{problem}; train-iters: 0 evaluates a trained model, so load must name a checkpoint")
        start = 0 if checkpoint is None or source.checkpoint.finetune else iteration_of(checkpoint)
        if 0 < self.last_iteration < start:
            raise UserError(
                f"train-iters: {self.last_iteration:,} is below the {start:,} iterations of {checkpoint}; raise "
                "train-iters to continue it, or set train-iters: 0 to evaluate it"
            )
        if self.lock is not None:
            check_space(config, vocab_size, start, logger.info)
        planned = self._num_samples(TrainingState())
        datasets = self._build_datasets(tokenizer, planned)
        self.curves = ExtrapolationCurves(config, layout, logger) if config.training.extrapolation_lengths else None

        self.engine = Engine(config, vocab_size, layout, logger.info)
        parameters = count_parameters(self.engine.layers(), self.engine.settings, layout)
        logger.info(f"attention: {self.engine.attention_choice()}")
        logger.info(
            f"model: {parameters['total']:,} parameters, {parameters['positional']:,} of them positional "
            f"({config.model.pos_emb}); vocabulary {tokenizer.vocab_size:,} padded to {vocab_size:,}; "
            f"{config.precision.dtype}"
        )
        self.state = load_checkpoint(self.engine, source, checkpoint, logger.info)
        self.engine.project()
        lineage = None if source.checkpoint.finetune else self.state.lineage
        if self.lock is not None:

            def saves(iteration: int) -> bool:
                is_ahead = start < iteration <= self.last_iteration or iteration == start == 0
                is_planned = config.checkpoint.saves(iteration) or _is_due(iteration, config.training.exit_interval)
                return is_ahead and (is_planned or iteration == self.last_iteration)

            run_on_rank_0(lambda: check_not_replaced(Path(save or ""), saves, lineage))
        needed = self._num_samples(self.state)
        if any(map(operator.gt, needed, planned)):  # the checkpoint was saved with larger batches
            datasets = self._build_datasets(tokenizer, needed)

        data_order = self.state.data_order if datasets.train is None else datasets.train.order
        if self.state.data_order and self.state.consumed_samples and data_order != self.state.data_order:
            logger.info(
                "the order of the training samples differs from the checkpoint's (data, split, seed or seq-length "
                f"changed): training resumes at sample {self.state.consumed_samples:,} of the new order, so some "
                "samples may be seen twice and others never"
            )
        self.state.data_order = data_order
        for line in [] if datasets.train is None else datasets.train.describe():
            logger.info(f"training data: {line}")
        if datasets.train is not None and self.state.iteration < self.last_iteration:
            self.train_batches = self.engine.batches(datasets.train, self.state.consumed_samples)
        self.validator = Validator(self.engine, logger, datasets.valid, datasets.test)
        self.checkpointer = Checkpointer(self.engine, config, logger.info, lineage) if save else None
        self.state.lr_schedule = config.schedule.lr_schedule or self.state.lr_schedule
        decay_iters = config.schedule.lr_decay_iters or self.last_iteration
        self.schedule = Schedule(
            config.optimizer.lr,
            config.schedule.lr_decay_style,
            decay_iters,
            config.schedule.warmup_steps(decay_iters),
            config.schedule.lowest_lr(config.optimizer.lr),
            self.state.lr_schedule,
        )
        if 0 < self.last_iteration == self.state.iteration:
            logger.info(f"nothing to train: the run has ended at train-iters {self.last_iteration:,}; it is evaluated")
        if self.state.iteration < self.last_iteration:
            logger.info(self.schedule.describe())
            for notice in self.schedule.notices(self.state.iteration, self.last_iteration, self.state.learning_rate):
                logger.info(f"notice: {notice}")
        self.outside_embedding = parameters["outside_embedding"]
        # Random tokens int64 [micro-batch, s + 1], on which the weights are checked before they are saved.
        self.finite_check_batch = torch.randint(
            tokenizer.vocab_size,
            (self.engine.micro_batch, self.engine.seq_length + 1),
            generator=torch.Generator().manual_seed(config.training.seed),
        )
        logger.start_metrics(self.state.iteration)

    def _num_samples(self, state: TrainingState) -> tuple[int, int, int]:
        """The training, validation and test samples that a run needs which continues from this state, with those that
        it has read; no training samples if it has ended.
        """
        training, remaining = self.config.training, self.last_iteration - state.iteration
        _, _, global_batch = self.config.batch.resolve(self.layout.data_size)
        samples_per_validation = training.eval_iters * global_batch
        validations = self.last_iteration // training.eval_interval - state.evaluated_at // training.eval_interval
        return (
            state.consumed_samples + remaining * global_batch if remaining > 0 else 0,
            state.consumed_valid_samples + (max(validations, 0) + 1) * samples_per_validation,
            samples_per_validation,
        )

    def _build_datasets(self, tokenizer: Tokenizer, num_samples: tuple[int, int, int]) -> Datasets:
        """Training, validation and test samples for the whole run. Raises UserError if there are no documents."""
        config, training = self.config, self.config.training
        check_number_of_samples(sum(num_samples))
        datasets = build_datasets(config, tokenizer, config.model.seq_length, num_samples, training.seq_length_val)
        if num_samples[0] and datasets.train is None:
            raise UserError("there are no training documents: check split, or set train-data-paths")
        if training.eval_iters and datasets.valid is None:
            place = "valid-data-paths is not set"
            if config.data.data_path is not None:
                place = f"split {config.data.split} leaves none of the documents of data-path {config.data.data_path}"
            without_validation = f"there are no validation documents: {place}"
            if self.last_iteration == 0:
                raise UserError(f"train-iters is 0, and {without_validation}")
            self.logger.info(f"no validation: {without_validation}")
        return datasets

    def train(self, signals: distributed.DistributedSignalHandler, profiler_step: Callable[[], None]) -> bool:
        """Train to the last iteration, and call `profiler_step` after every step.

        Returns False if a signal or `exit-interval` ended the run before it.
        """
        training, saves = self.config.training, self.config.checkpoint.saves
        state, length, has_trained = self.state, 0, False
        flops = partial(flops_per_token, self.outside_embedding, self.config.model)
        log = StepLog(self.config, self.engine, self.logger, flops, state)
        if self.checkpointer is not None and state.iteration == 0 and self.last_iteration > 0 and saves(0):
            self._save()
        stopped_before = 0 < state.iteration < self.last_iteration and state.evaluated_at != state.iteration
        if stopped_before and _is_due(state.iteration, training.eval_interval):
            with log.paused():
                self._evaluate()
        while state.iteration < self.last_iteration:
            learning_rate = self.schedule(state.iteration)
            if length != self.engine.length_at(state.iteration):
                length = self.engine.length_at(state.iteration)
                if self.config.curriculum.enabled:
                    self.logger.info(f"curriculum_learning: length {length:,} from iteration {state.iteration + 1:,}")
            loss = self.engine.train_step(self.train_batches, learning_rate, state.iteration)
            profiler_step()
            state.iteration, state.learning_rate = state.iteration + 1, learning_rate
            state.consumed_samples += self.engine.global_batch
            state.tokens += self.engine.global_batch * length
            log.add(loss)

            is_last = state.iteration == self.last_iteration
            exit_reason = None
            if not is_last:
                if signals.received_by_any_rank(stop=self.engine.data_failure is not None):
                    exit_reason = (
                        "a data worker was killed" if self.engine.data_failure else "received a signal to stop"
                    )
                elif _is_due(state.iteration, training.exit_interval):
                    exit_reason = f"exit-interval {training.exit_interval}"
            if _is_due(state.iteration, training.log_interval) or is_last:
                log.write(state, learning_rate)
            elif not has_trained:  # the next line may be hours away
                self.logger.info(f"iteration {state.iteration:,}/{self.last_iteration:,} | lm loss {float(loss):.4f}")
            has_trained = True
            if _is_due(state.iteration, training.eval_interval) and not exit_reason:
                with log.paused():
                    self._evaluate()
            if self.checkpointer is not None and (saves(state.iteration) or is_last or exit_reason):
                with log.paused():
                    log.check(state.iteration)
                    # Weights whose loss is not finite must not replace a good checkpoint.
                    batch = {"tokens": self.finite_check_batch[:, :-1], "labels": self.finite_check_batch[:, 1:]}
                    if not math.isfinite(self.engine.validate(iter([batch]), 1)):
                        raise non_finite_loss(self.config, f"after iteration {state.iteration}")
                    state.unlogged_losses = log.unlogged()
                    self._save()
            if exit_reason:
                saved = "checkpoint saved" if self.checkpointer else "no checkpoint saved (`save` is not set)"
                self.logger.info(f"exiting after iteration {state.iteration}: {exit_reason}; {saved}")
                return False
        return True

    def check_data_workers(self) -> None:
        """Raises UserError if a data worker of this rank was killed."""
        failure = self.engine.data_failure
        if failure is not None:
            raise UserError(
                f"training stopped at iteration {self.state.iteration:,}: {failure}. The usual cause is that memory "
                "was full; free some, or lower num_workers, and run the same command again"
            )

    def _evaluate(self) -> None:
        """Validation and extrapolation curves at the current iteration."""
        if self.config.training.eval_iters:
            self.validator.validate(self.state)
        if self.curves is not None:
            self.curves.measure(self.engine, self.state.iteration)
        self.state.evaluated_at = self.state.iteration

    def _save(self) -> None:
        """Save a checkpoint. Raises UserError if the lock file in `save` was removed."""
        if self.checkpointer is not None:
            if self.lock is not None:
                run_on_rank_0(self.lock.check)
            self.checkpointer.save(self.state)

    def evaluate_at_end(self) -> None:
        """Validation, extrapolation curves and test at the last iteration."""
        has_validation = self.config.training.eval_iters > 0
        if has_validation and self.validator.validated_at != self.state.iteration:
            if self.state.evaluated_at == self.state.iteration:  # in an earlier process: repeat it on the same samples
                samples = self.config.training.eval_iters * self.engine.global_batch
                self.state.consumed_valid_samples = max(self.state.consumed_valid_samples - samples, 0)
            self.validator.validate(self.state)
        if self.curves is not None and self.curves.measured_at != self.state.iteration:
            self.curves.measure(self.engine, self.state.iteration)
        if has_validation and self.last_iteration > 0:
            self.validator.test(self.state)


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0
