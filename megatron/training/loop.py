"""The training run: set-up, steps, validation, checkpoints, and a clean end."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.checkpoint.loading import load_checkpoint, locate_checkpoint
from megatron.checkpoint.saving import Checkpointer
from megatron.checkpoint.state import TrainingState
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config, UserError, check_vocabulary
from megatron.data import build_datasets, build_loader, document_lengths
from megatron.tokenizer import build_tokenizer, padded_vocab_size
from megatron.training import distributed, metrics
from megatron.training.engine import Batch, Engine
from megatron.training.logging import Reporter, Trackers, readable_time
from megatron.training.schedule import Schedule
from megatron.training.signals import StopRequest


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
    flops_per_token: float
    train_batches: Iterator[Batch] | None
    valid_dataset: object | None
    test_dataset: object | None
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
            with StopRequest(layout.device) as stop:
                try:
                    _steps(run, stop)
                finally:
                    if run.checkpointer is not None:
                        run.checkpointer.finish()
            if stop.signal is None:
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
    engine = Engine(config, vocabulary, layout, report)
    counts = engine.count_parameters()
    report(f"attention: {engine.attention_choice()}")
    report(
        f"model: {counts['total']:,} parameters, {counts['positional']:,} of them positional ({config.model.pos_emb}); "
        f"vocabulary {tokenizer.vocab_size:,} padded to {vocabulary:,}; {config.precision.dtype}"
    )
    state = load_checkpoint(engine, config, checkpoint, report)
    datasets = _datasets(config, tokenizer, engine)
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
        flops_per_token=metrics.flops_per_token(counts["outside_embedding"], engine.settings, config.model.seq_length),
        train_batches=train_batches,
        valid_dataset=datasets.valid,
        test_dataset=datasets.test,
    )


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


def _datasets(config: Config, tokenizer, engine: Engine):
    iterations, validation = config.schedule.train_iters, config.training
    rounds = iterations // validation.eval_interval + 1 if validation.eval_iters else 0
    per_round = validation.eval_iters * engine.global_batch
    tested = per_round if _has_test_text(config) else 0
    wanted = (iterations * engine.global_batch, rounds * per_round, tested)
    return build_datasets(config, tokenizer, config.model.seq_length, wanted, validation.seq_length_val)


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
    )


# -- steps ------------------------------------------------------------------------------------------------------------


def _steps(run: Run, stop: StopRequest) -> None:
    config, state, engine = run.config, run.state, run.engine
    training = config.training
    interval = _Interval(run)
    saved_at = state.iteration
    while state.iteration < run.last_iteration:
        rate = run.schedule(state.iteration)
        loss = engine.train_step(run.train_batches, rate)
        state.iteration += 1
        state.consumed_samples += engine.global_batch
        state.tokens += engine.global_batch * config.model.seq_length
        interval.add(loss)

        last = state.iteration == run.last_iteration
        save_due = _due(state.iteration, config.checkpoint.save_interval)
        leave = stop.agreed() or _due(state.iteration, training.exit_interval)
        if _due(state.iteration, training.log_interval) or last or leave or save_due:
            interval.log(rate, to_console=_due(state.iteration, training.log_interval) or last or leave)
        if _due(state.iteration, training.eval_interval) and training.eval_iters and not leave:
            _validate(run)
            interval.restart_clock()
        if run.checkpointer is not None and (save_due or last or leave):
            run.checkpointer.save(state)
            saved_at = state.iteration
            interval.restart_clock()
        if leave:
            run.report(_why_leaving(stop, training.exit_interval, saved_at, state.iteration))
            return


def _due(iteration: int, every: int | None) -> bool:
    return every is not None and iteration % every == 0


def _why_leaving(stop: StopRequest, exit_interval: int | None, saved_at: int, iteration: int) -> str:
    why = "a signal asked to stop" if stop.signal is not None else f"exit-interval {exit_interval}"
    kept = "its checkpoint is saved" if saved_at == iteration else "nothing was saved (no `save` folder is set)"
    return f"leaving after iteration {iteration}: {why}; {kept}"


class _Interval:
    """What happened since the last line of the log. Losses stay on the device until then, so that no step waits for
    one.
    """

    def __init__(self, run: Run):
        self.run = run
        self._losses: list[torch.Tensor] = []
        self._started = time.perf_counter()
        self._seconds = 0.0
        self._steps = 0

    def add(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())
        self._steps += 1

    def restart_clock(self) -> None:
        """Leave validation and saving out of the rates."""
        self._started = time.perf_counter()

    def log(self, rate: float, *, to_console: bool) -> None:
        """Check the losses; print and track the interval's means. Raises UserError at a loss that is not finite."""
        run, state = self.run, self.run.state
        losses = torch.stack(self._losses).float().cpu() if self._losses else torch.empty(0)
        first = state.iteration - len(losses)
        self._check(losses, first)
        self._seconds += time.perf_counter() - self._started
        self.restart_clock()
        if not to_console:
            return
        per_second = self._steps * run.engine.global_batch * run.config.model.seq_length / max(self._seconds, 1e-9)
        loss = float(losses.mean())
        values = {
            "train/loss": loss,
            "train/learning_rate": rate,
            "train/tokens_per_second": per_second,
            "train/tokens": float(state.tokens),
            "train/memory_bytes": float(metrics.peak_memory(run.layout.device)),
        }
        texts = [f"iteration {state.iteration:,}/{run.last_iteration:,}", f"loss {loss:.4f}", f"lr {rate:.3e}"]
        norm, scale = run.engine.grad_norm, run.engine.loss_scale
        if norm is not None:
            values["train/grad_norm"] = norm
            texts.append(f"grad norm {norm:.3f}")
        if scale is not None:
            values["train/loss_scale"] = scale
            texts.append(f"loss scale {scale:g}")
        texts.append(f"{per_second:,.0f} tokens/s")
        peak = metrics.device_peak(run.layout.device)
        if peak is not None:
            values["train/mfu"] = per_second * run.flops_per_token / (peak * run.layout.world_size)
            texts.append(f"MFU {100 * values['train/mfu']:.1f} %")
        texts.append(f"{values['train/memory_bytes'] / 2**30:.2f} GiB")
        remaining = (run.last_iteration - state.iteration) * self._seconds / max(self._steps, 1)
        texts.append(f"{readable_time(remaining)} left")
        run.report(" | ".join(texts))
        for name, heads in metrics.kernel_statistics(run.engine.layers()).items():
            low, mean, high = heads.min().item(), heads.mean().item(), heads.max().item()
            values |= {f"kernel/{name}/min": low, f"kernel/{name}/mean": mean, f"kernel/{name}/max": high}
            run.report(f"  {name}: {mean:.4f} mean, {low:.4f} to {high:.4f} over {heads.numel()} heads")
        run.trackers.scalars(values, state.iteration)
        self._losses, self._steps, self._seconds = [], 0, 0.0

    def _check(self, losses: torch.Tensor, first: int) -> None:
        bad = ~torch.isfinite(losses)
        # In fp16 single steps overflow, are skipped, and lower the loss scale; that is not a failure.
        failed = bool(bad.all()) and len(losses) > 0 if self.run.engine.loss_scale is not None else bool(bad.any())
        if not failed:
            return
        where = first + 1 + int(bad.nonzero()[0])
        kept = self.run.config.checkpoint.save
        raise UserError(
            f"the loss is not finite (nan or inf) at iteration {where}; training stops and nothing is saved from it. "
            + (f"The last good checkpoint is in {kept}. " if kept else "")
            + "Lower the learning rate, clip the gradient (gradient_clipping), or use a wider number format"
        )


# -- validation -------------------------------------------------------------------------------------------------------


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
    """Validation and test at the end; all there is when `train-iters` is 0."""
    if not run.config.training.eval_iters:
        return
    if run.valid_dataset is None and run.config.schedule.train_iters == 0:
        raise UserError(
            "train-iters is 0 and there are no validation documents: nothing to do. Check data-path and split"
        )
    if run.validated_at != run.state.iteration:
        _validate(run)
    if run.config.schedule.train_iters > 0:
        _validate(run, "test")


__all__ = ["CheckpointError", "Run", "set_up", "train"]
