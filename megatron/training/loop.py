"""The training run: set-up, steps, validation, checkpoints, and a clean end."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.checkpoint.directory import has_checkpoint
from megatron.checkpoint.loading import load_checkpoint, locate_checkpoint
from megatron.checkpoint.saving import Checkpointer
from megatron.checkpoint.state import TrainingState
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config, UserError, check_vocabulary
from megatron.data import build_datasets, build_loader, document_lengths
from megatron.tokenizer import build_tokenizer, padded_vocab_size
from megatron.training import distributed, metrics
from megatron.training.engine import Batch, Engine
from megatron.training.extrapolation import ExtrapolationCurves
from megatron.training.logging import Reporter, Trackers
from megatron.training.optimizer import Schedule
from megatron.training.signals import StopRequest
from megatron.training.step_log import StepLog, not_finite
from megatron.utils.progress import readable_time


@dataclass
class Run:
    """All that a run holds."""

    config: Config
    layout: distributed.Layout
    engine: Engine
    state: TrainingState
    schedule: Schedule
    report: Reporter
    trackers: Trackers
    checkpointer: Checkpointer | None
    curves: ExtrapolationCurves | None
    flops_per_token: float
    train_batches: Iterator[Batch] | None
    valid_dataset: object | None
    test_dataset: object | None
    probe: torch.Tensor
    validated_at: int | None = None

    @property
    def last_iteration(self) -> int:
        return self.config.schedule.train_iters


def train(config: Config) -> TrainingState:
    """Train as the configuration says; with `train-iters: 0`, only validate. Returns where the run ended.

    Raises UserError for input that cannot be used; nothing has been written then.
    """
    layout = distributed.initialize(config)
    report = Reporter(config, layout)
    try:
        run = set_up(config, layout, report)
        try:
            with StopRequest() as stop:
                try:
                    left_early = _steps(run, stop)
                finally:
                    if run.checkpointer is not None:
                        run.checkpointer.finish()
            if left_early is None:
                _final_evaluation(run)
            return run.state
        finally:
            run.trackers.close()
    finally:
        report.close()
        distributed.shutdown()


def set_up(config: Config, layout: distributed.Layout, report: Reporter) -> Run:
    """Tokenizer, model, optimizer, checkpoint and data of one rank."""
    if config.schedule.train_iters is None:
        raise UserError("train-iters is not set; it says how many steps to train (0: only evaluate)")
    report(layout.describe())
    distributed.seed_everything(config.training.seed, layout)
    tokenizer = build_tokenizer(
        config.tokenizer.tokenizer_type, config.tokenizer.vocab_file, config.tokenizer.merge_file
    )
    check_vocabulary(config, tokenizer.vocab_size)
    vocabulary = config.model.padded_vocab_size or padded_vocab_size(
        tokenizer.vocab_size, config.model.make_vocab_size_divisible_by, layout.tensor_size
    )
    checkpoint = locate_checkpoint(config, layout, vocabulary, report)
    if checkpoint is None and config.schedule.train_iters == 0:
        where = f"load: {config.checkpoint.load}: holds no checkpoint" if config.checkpoint.load else "load is not set"
        raise UserError(f"{where}; train-iters is 0, which evaluates a trained model")
    _note_save_folder(config, report)
    datasets = _datasets(config, tokenizer, layout, report)
    curves = ExtrapolationCurves(config, layout, report) if config.training.extrapolation_lengths else None
    engine = Engine(config, vocabulary, layout, report)
    counts = engine.count_parameters()
    report(f"attention: {engine.attention_choice()}")
    report(
        f"model: {counts['total']:,} parameters, {counts['positional']:,} of them positional ({config.model.pos_emb}); "
        f"vocabulary {tokenizer.vocab_size:,} padded to {vocabulary:,}; {config.precision.dtype}"
    )
    state = load_checkpoint(engine, config, checkpoint, report)
    _note_data_order(state, datasets.train, report)
    train_batches = None
    if config.schedule.train_iters > state.iteration:
        train_batches = iter(_loader(config, engine, datasets.train, state.consumed_samples))
    return Run(
        config=config,
        layout=layout,
        engine=engine,
        state=state,
        schedule=_schedule(config),
        report=report,
        trackers=Trackers(config, layout),
        checkpointer=Checkpointer(engine, config, report) if config.checkpoint.save else None,
        curves=curves,
        flops_per_token=metrics.flops_per_token(counts["outside_embedding"], engine.settings, config.model.seq_length),
        train_batches=train_batches,
        valid_dataset=datasets.valid,
        test_dataset=datasets.test,
        probe=_probe(config, layout, tokenizer.vocab_size),
    )


def _probe(config: Config, layout: distributed.Layout, vocab_size: int) -> torch.Tensor:
    """A micro-batch of random tokens, int64 `[b, s + 1]`, on which the weights are tried before they are saved."""
    micro, _, _ = config.batch.resolve(layout.data_size)
    generator = torch.Generator().manual_seed(config.training.seed)
    return torch.randint(vocab_size, (micro, config.model.seq_length + 1), generator=generator)


def _note_data_order(state: TrainingState, dataset, report: Reporter) -> None:
    """A position in the data means the same samples only while their order is the same."""
    order = dataset.order if dataset is not None else state.data_order
    if state.data_order and state.consumed_samples and order != state.data_order:
        report(
            "the order of the training samples is not that of the checkpoint (data, split, seed or seq-length differ): "
            f"training goes on at sample {state.consumed_samples:,} of the new order, so some "
            "samples may be seen twice and others not at all"
        )
    state.data_order = order


def _schedule(config: Config) -> Schedule:
    settings = config.schedule
    decay = settings.lr_decay_iters or settings.train_iters
    return Schedule(config.optimizer.lr, settings.lr_decay_style, decay, settings.warmup * decay, settings.min_lr)


def _note_save_folder(config: Config, report: Reporter) -> None:
    """Say so when the run saves among checkpoints that it did not start from."""
    folder = config.checkpoint.save
    if folder is not None and folder != config.checkpoint.load and has_checkpoint(folder):
        report(f"save: {folder} holds checkpoints already, which `load` does not name; this run's go beside them")


def _datasets(config: Config, tokenizer, layout: distributed.Layout, report: Reporter):
    iterations, validation = config.schedule.train_iters, config.training
    _, _, global_batch = config.batch.resolve(layout.data_size)
    rounds = iterations // validation.eval_interval + 1 if validation.eval_iters else 0
    per_round = validation.eval_iters * global_batch
    tested = per_round if _has_test_text(config) else 0
    wanted = (iterations * global_batch, rounds * per_round, tested)
    datasets = build_datasets(config, tokenizer, config.model.seq_length, wanted, validation.seq_length_val)
    if iterations and datasets.train is None:
        raise UserError("there are no training documents: check split, or name train-data-paths")
    if validation.eval_iters and datasets.valid is None:
        report("no validation documents (see split and valid-data-paths): the run is not validated")
    return datasets


def _has_test_text(config: Config) -> bool:
    """Test data of its own, or a test part of `split` that holds a sample: often it is too small to."""
    data = config.data
    if data.data_path is None:
        return bool(data.test_data_paths)
    try:
        lengths = document_lengths(data.data_path, data.split, "test")
    except UserError:
        return False
    return int(lengths.sum()) > (config.training.seq_length_val or config.model.seq_length)


def _loader(config: Config, engine: Engine, dataset, consumed: int):
    layout = engine.layout
    micro, _, _ = config.batch.resolve(layout.data_size)
    return build_loader(
        dataset,
        micro_batch_size=micro,
        data_parallel_rank=layout.data_rank,
        data_parallel_size=layout.data_size,
        consumed_samples=consumed,
        num_workers=config.data.num_workers,
        pin_memory=layout.device.type == "cuda",
    )


# -- steps ------------------------------------------------------------------------------------------------------------


def _steps(run: Run, stop: StopRequest) -> str | None:
    """Train to the last iteration (None), or until all ranks agree to leave before it (why)."""
    config, state, engine = run.config, run.state, run.engine
    training = config.training
    log = StepLog(run)
    while state.iteration < run.last_iteration:
        rate = run.schedule(state.iteration)
        loss = engine.train_step(run.train_batches, rate, state.iteration)
        state.iteration += 1
        state.consumed_samples += engine.global_batch
        state.tokens += engine.global_batch * config.model.seq_length
        log.add(loss)

        last = state.iteration == run.last_iteration
        leave = _reason_to_leave(stop, training.exit_interval, state.iteration) if not last else None
        if _due(state.iteration, training.log_interval) or last or leave:
            log.write(rate)
        if _due(state.iteration, training.eval_interval) and not leave:
            with log.paused():
                _evaluate(run)
        if run.checkpointer is not None and (_due(state.iteration, config.checkpoint.save_interval) or last or leave):
            with log.paused():
                log.check()
                _check_weights(run)
                run.checkpointer.save(state)
        if leave:
            kept = "its checkpoint is saved" if run.checkpointer else "nothing is saved (no `save` folder is set)"
            run.report(f"leaving after iteration {state.iteration}: {leave}; {kept}")
            return leave
    return None


def _reason_to_leave(stop: StopRequest, exit_interval: int | None, iteration: int) -> str | None:
    if stop.agreed():
        return "a signal asked to stop"
    return f"exit-interval {exit_interval}" if _due(iteration, exit_interval) else None


def _check_weights(run: Run) -> None:
    """Raise UserError if the weights give no finite loss: such a checkpoint must not replace a good one."""
    batch = {"tokens": run.probe[:, :-1], "labels": run.probe[:, 1:]}
    if not math.isfinite(run.engine.validate(iter([batch]), 1)):
        raise UserError(not_finite(run, f"after iteration {run.state.iteration}"))


def _due(iteration: int, every: int | None) -> bool:
    return every is not None and iteration % every == 0


# -- validation -------------------------------------------------------------------------------------------------------


def _evaluate(run: Run) -> None:
    """What is due every `eval-interval`: a validation, and the curves of extrapolation."""
    if run.config.training.eval_iters:
        _validate(run)
    if run.curves is not None:
        run.curves.measure(run)


def _validate(run: Run, dataset: str = "valid") -> float | None:
    """Mean loss over the next `eval-iters` batches of the validation samples, printed and tracked."""
    source = run.valid_dataset if dataset == "valid" else run.test_dataset
    if source is None:
        return None
    iterations, state = run.config.training.eval_iters, run.state
    consumed = state.consumed_valid_samples if dataset == "valid" else 0
    batches = iter(_loader(run.config, run.engine, source, consumed))
    started = time.perf_counter()
    loss = run.engine.validate(batches, iterations * run.engine.accumulation)
    if dataset == "valid":
        state.consumed_valid_samples += iterations * run.engine.global_batch
        run.validated_at = state.iteration
    length = run.config.training.seq_length_val or run.config.model.seq_length
    name = "validation" if dataset == "valid" else dataset
    perplexity = math.exp(min(loss, 700.0))
    run.report(
        f"{name} at iteration {state.iteration:,} | length {length:,} | loss {loss:.4f} | "
        f"perplexity {perplexity:.3f} | {readable_time(time.perf_counter() - started)}"
    )
    run.trackers.scalars({f"{name}/loss": loss, f"{name}/perplexity": perplexity}, state.iteration)
    return loss


def _final_evaluation(run: Run) -> None:
    """Validation, curves and test at the end; all there is when `train-iters` is 0."""
    validated, trained = run.config.training.eval_iters > 0, run.config.schedule.train_iters > 0
    if validated and run.valid_dataset is None and not trained:
        raise UserError(
            "train-iters is 0 and there are no validation documents: nothing to do. Check data-path and split"
        )
    if validated and run.validated_at != run.state.iteration:
        _validate(run)
    if run.curves is not None and run.curves.measured_at != run.state.iteration:
        run.curves.measure(run)
    if validated and trained:
        _validate(run, "test")


__all__ = ["CheckpointError", "Run", "set_up", "train"]
