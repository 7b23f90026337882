"""The training log: text on the console and in a file, metrics (JSON lines, TensorBoard, Weights &
Biases), and profiles of training steps by torch.profiler.
"""

import contextlib
import errno
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch.profiler import profile, schedule, tensorboard_trace_handler

from megatron.checkpoint.directory import has_checkpoint
from megatron.checkpoint.state_dict import TrainingState
from megatron.config import Config, UserError
from megatron.model.settings import Layout
from megatron.model.trial import not_finite, trial_step
from megatron.reporting.training_log import last_metrics
from megatron.training.flops import peak_flops
from megatron.utils.errors import first_line, import_package
from megatron.utils.files import METRICS
from megatron.utils.progress import fitted, readable_time
from megatron.utils.ranks import Report
from megatron.utils.secrets import without_secrets

if TYPE_CHECKING:
    from megatron.training.engine import Engine

# A step whose gradients are not finite is skipped. In fp16 that is normal while it lowers the loss
# scale. More consecutive skipped steps than this, without a change of the loss scale, are an error.
MAX_CONSECUTIVE_SKIPS = 32
_ADVICE = (
    "Lower the learning rate, clip gradients (gradient_clipping), or use a dtype with a larger "
    "range"
)

# Metrics that TensorBoard and Weights & Biases also get under GPT-NeoX's name.
NEOX_NAMES = {
    "train/loss": "train/lm_loss",
    "validation/loss": "validation/lm_loss",
    "validation/perplexity": "validation/lm_loss_ppl",
    "test/loss": "test/lm_loss",
    "test/perplexity": "test/lm_loss_ppl",
    "train/samples_per_second": "runtime/samples_per_sec",
    "train/seconds_per_step": "runtime/iteration_time",
    "train/flops_per_second": "runtime/flops_per_sec_per_gpu",
}


class Logger:
    """Writes text and metrics of a run, on rank 0 only.

    Text goes to the console and, if configured, to `LOG_DIR/train.log`. Metrics go to those of
    `LOG_DIR/metrics.jsonl`, TensorBoard and Weights & Biases that are configured.
    """

    def __init__(self, config: Config, layout: Layout):
        """Raises UserError if `log-dir` cannot be written."""
        self._config = config
        self._is_main = layout.is_main
        self._text: TextIO | None = None
        self._metrics: TextIO | None = None
        self._run = ""
        self._tensorboard: Any = None
        self._wandb: Any = None
        if self._is_main and config.logging.log_dir:
            self._text = self._open("train.log")

    def _open(self, name: str) -> TextIO:
        path = Path(self._config.logging.log_dir or "", name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A killed run may have left its last line without an end.
            with open(path, "a+b") as stream:
                stream.seek(max(0, stream.tell() - 1))
                if stream.read(1) not in (b"", b"\n"):
                    stream.write(b"\n")
            return open(path, "a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise UserError(f"log-dir: cannot write to {path}: {error.strerror}") from error

    def start_metrics(self, state: TrainingState) -> None:
        """Open the metrics file, TensorBoard and Weights & Biases, for a run that starts from this
        state. Says so if they contain another run.

        Raises UserError if one of them is not available.
        """
        # Rank 0 writes all metrics.
        settings, trains = self._config.logging, self._config.schedule.last_iteration > 0
        if not self._is_main:
            return
        self._run = state.run
        if settings.log_dir:
            self._metrics = self._open(METRICS)
            path = Path(settings.log_dir) / METRICS
            last = last_metrics(path)
            if last is not None and last.get("run", "") != self._run:
                self.info(
                    f"notice: log-dir: {path} contains other runs; the lines of this one have run "
                    f"{self._run}"
                )

        # The libraries are optional, and slow to import.
        if settings.tensorboard_dir:
            import_package("tensorboard", "tracking", "tensorboard-dir")
        if settings.use_wandb:
            wandb = import_package("wandb", "tracking", "use_wandb")

        # TensorBoard, with the configuration as text.
        if settings.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            # Training drops the steps after the checkpoint, which a killed run has logged too.
            purge_step = None
            if state.iteration and trains:
                purge_step = state.iteration + 1
            if not state.iteration and any(Path(settings.tensorboard_dir).glob("*tfevents*")):
                self.info(
                    f"notice: tensorboard-dir: {settings.tensorboard_dir} contains other runs, "
                    "whose curves mix"
                )
            self._tensorboard = SummaryWriter(settings.tensorboard_dir, purge_step=purge_step)
            text = json.dumps(without_secrets(self._config.to_flat()), indent=2, default=str)
            self._tensorboard.add_text("configuration", f"```json\n{text}\n```")

        # Weights & Biases. The environment has precedence over the configuration.
        if not settings.use_wandb:
            return
        if settings.wandb_host:
            os.environ.setdefault("WANDB_BASE_URL", settings.wandb_host)
        run_id = None
        if trains:
            run_id = self._run
        try:
            self._wandb = wandb.init(
                project=settings.wandb_project,
                group=settings.wandb_group,
                entity=settings.wandb_team,
                name=settings.wandb_run_name,
                id=run_id,
                resume="allow",
                config=without_secrets(self._config.to_flat()),
            )
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            raise UserError(
                f"use_wandb: {first_line(error)}; set WANDB_API_KEY, or WANDB_MODE=offline to log "
                "to disk"
            ) from error

    def info(self, text: str) -> None:
        """Write a line, on the console in several lines if it is long."""
        if not self._is_main:
            return
        _print(fitted(text))
        if self._text is not None:
            self._write(self._text, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def metrics(self, values: dict[str, float], iteration: int) -> None:
        """Record metrics by name."""
        if self._metrics is not None:
            last_iteration = self._config.schedule.last_iteration
            keys = {"run": self._run, "iteration": iteration, "last_iteration": last_iteration}
            self._write(self._metrics, json.dumps({**keys, **values}) + "\n")
        values = dict(values)
        for name, neox in NEOX_NAMES.items():
            if name in values:
                values[neox] = values[name]
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(values, step=iteration)

    def _write(self, stream: TextIO, line: str) -> None:
        """Raises UserError if the line cannot be written, for example because the disk is full."""
        try:
            stream.write(line)
        except OSError as error:
            raise UserError(f"log-dir: cannot write {stream.name}: {error.strerror}") from error

    def close(self) -> None:
        for stream in (self._text, self._metrics):
            if stream is not None:
                with contextlib.suppress(OSError):  # closing repeats a write that has failed
                    stream.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _print(text: str) -> None:
    """Print a line. If the terminal was closed or the reader of the output has ended, stop like
    after SIGHUP, which saves a checkpoint, and print nothing more.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
        signal.raise_signal(signal.SIGHUP)


class StepLog:
    """Writes a log line every `log-interval` steps. Checks that losses are finite and that steps
    change the weights.

    Losses stay on the device until the next line or check, so that no step waits for one.
    """

    def __init__(
        self,
        config: Config,
        engine: "Engine",
        logger: Logger,
        flops_per_token: Callable[[int], float],
        state: TrainingState,
    ):
        """flops_per_token: of a sequence length. state: that of the run before the first step."""
        self._config, self._engine, self._logger = config, engine, logger
        self._flops_per_token, self._tokens = flops_per_token, state.tokens
        self._losses: list[torch.Tensor] = []
        for loss in state.unlogged_losses:
            self._losses.append(torch.tensor(loss, device=engine.layout.device))
        self._resumed_steps = len(self._losses)  # of these, in an earlier process
        # For each step that is not checked yet: the gradient norm, and the loss scale after the
        # step.
        self._norms: list[torch.Tensor | float] = []
        self._scales: list[float | None] = []
        self._consecutive_skips = 0  # at the same loss scale
        self._scale: float | None = None
        self.skipped_steps = int(engine.deepspeed.skipped_steps)  # since iteration 0
        self.seconds = 0.0  # training time since the last line, up to the last pause
        self._started_at = time.perf_counter()

    def add(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())
        norm = self._engine.grad_norm
        if norm is None:
            norm = 0.0
        self._norms.append(norm)
        self._scales.append(self._engine.loss_scale)

    def unlogged(self) -> list[float]:
        """The losses since the last line."""
        if not self._losses:
            return []
        return torch.stack(self._losses).tolist()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time spent in validation or saving as training."""
        self.seconds += time.perf_counter() - self._started_at
        try:
            yield
        finally:
            self._started_at = time.perf_counter()

    def check(self, iteration: int) -> None:
        """Check the steps since the last check. `iteration` is that of the latest one.

        Raises UserError if a loss is not finite, if too many consecutive steps were skipped, or if
        the training ends and all its steps were skipped. In fp16, a loss that is not finite only
        skips the step.
        """
        steps, precision = len(self._norms), self._config.precision
        if not steps:
            return
        losses = torch.stack(self._losses[-steps:]).float()
        norms = torch.stack([torch.as_tensor(norm, device=losses.device) for norm in self._norms])
        limit = max(MAX_CONSECUTIVE_SKIPS, precision.hysteresis)

        # In fp16, steps may be skipped until the loss scale fits.
        for number, loss_is_finite, norm_is_finite, scale in zip(
            range(iteration - steps + 1, iteration + 1),
            losses.isfinite().tolist(),
            norms.isfinite().tolist(),
            self._scales,
            strict=True,
        ):
            is_skipped = not (loss_is_finite and norm_is_finite)
            if is_skipped and scale == self._scale:
                self._consecutive_skips += 1
            else:
                self._consecutive_skips = 0
            self.skipped_steps += is_skipped
            self._scale = scale
            may_skip = precision.dtype == "fp16" and self._consecutive_skips <= limit
            if not loss_is_finite and not may_skip:
                raise non_finite_loss(self._config, f"at iteration {number}")
            if self._consecutive_skips > limit:
                raise skipped_steps(
                    self._config,
                    f"the last {self._consecutive_skips} steps up to {number:,}",
                    scale,
                )
        self._norms, self._scales = [], []
        # DeepSpeed does not count skipped bf16 steps.
        self._engine.deepspeed.skipped_steps = self.skipped_steps
        if self.skipped_steps == iteration == self._config.schedule.last_iteration:
            raise skipped_steps(self._config, f"all {iteration:,} steps", self._scale)

    def write(self, state: TrainingState, learning_rate: float) -> None:
        """Check the losses, then write their mean since the last line, the learning rate, speed and
        memory.
        """
        self.check(state.iteration)
        with self.paused():
            # Means over the steps since the last line. Skipped steps may have no finite loss.
            engine, layout = self._engine, self._engine.layout
            steps = len(self._losses) - self._resumed_steps
            last_iteration = self._config.schedule.last_iteration
            losses = torch.stack(self._losses).float().cpu()
            loss = float(losses[torch.isfinite(losses)].mean())
            sequences = steps * engine.global_batch
            samples_per_second = sequences / max(self.seconds, 1e-9)
            length = (state.tokens - self._tokens) / sequences  # mean over the steps
            tokens_per_second = samples_per_second * length
            memory = peak_memory(layout.device)

            # Metrics for the files, and the same in a short form for the terminal.
            values = {
                "train/loss": loss,
                "train/learning_rate": learning_rate,
                "train/skipped_steps": float(self.skipped_steps),
                "train/tokens_per_second": tokens_per_second,
                "train/samples_per_second": samples_per_second,
                "train/seconds_per_step": self.seconds / max(steps, 1),
                "train/flops_per_second": tokens_per_second
                * self._flops_per_token(round(length))
                / layout.world_size,
                "train/tokens": float(state.tokens),
                "train/memory_bytes": float(memory),
            }
            texts = [
                f"iteration {state.iteration:,}/{last_iteration:,}",
                f"lm loss {loss:.4f}",
                f"lr {learning_rate:.3e}",
            ]

            # Values that only some runs have.
            grad_norm, loss_scale = engine.grad_norm, engine.loss_scale
            tflops = self._config.logging.peak_theoretical_tflops
            device_peak = peak_flops(layout.device)
            if tflops is not None:
                device_peak = tflops * 1e12
            if grad_norm is not None:
                values["train/grad_norm"] = float(grad_norm)
                texts.append(f"grad norm {grad_norm:.3f}")
            if loss_scale is not None:
                values["train/loss_scale"] = loss_scale
                texts.append(f"loss scale {loss_scale:g}")
            if loss_scale is not None or self.skipped_steps:
                texts.append(f"skipped steps {self.skipped_steps:,}")
            texts += [f"{samples_per_second:,.1f} samples/s", f"{tokens_per_second:,.0f} tokens/s"]
            if device_peak is not None:
                values["train/mfu"] = values["train/flops_per_second"] / device_peak
                texts.append(f"MFU {100 * values['train/mfu']:.1f} %")

            # The rest of the line.
            seconds_left = (last_iteration - state.iteration) * self.seconds / max(steps, 1)
            texts += [f"{memory / 2**30:.2f} GiB", f"{readable_time(seconds_left)} left"]
            self._logger.info(" | ".join(texts))

            # Statistics of the kernels of positional methods, over the heads.
            for name, heads in engine.kernel_statistics().items():
                low, mean, high = heads.min().item(), heads.mean().item(), heads.max().item()
                values |= {
                    f"kernel/{name}/min": low,
                    f"kernel/{name}/mean": mean,
                    f"kernel/{name}/max": high,
                }
                self._logger.info(
                    f"  {name}: mean {mean:.4f}, {low:.4f} to {high:.4f} over {heads.numel()} heads"
                )
            self._logger.metrics(values, state.iteration)

        # The next line starts from here.
        self._losses, self._resumed_steps, self.seconds, self._tokens = [], 0, 0.0, state.tokens


def non_finite_loss(config: Config, when: str) -> UserError:
    """The error for a loss that is nan or inf."""
    return UserError(
        f"the loss is not finite (nan or inf) {when}; {_stops_without_saving(config)}. "
        f"{_advice(config)}"
    )


def skipped_steps(config: Config, steps: str, scale: float | None) -> UserError:
    """The error for `steps` that were skipped at this loss scale, although the loss is finite."""
    fp16, advice = config.precision, _advice(config)
    if scale is not None:
        advice = (
            f"The loss scale is {scale:g} (fp16.min_loss_scale {fp16.min_loss_scale:g}): lower "
            f"fp16.loss_scale or fp16.initial_scale_power ({fp16.initial_scale_power}), use bf16, "
            "or lower the learning rate"
        )
    return UserError(
        f"the gradients are not finite, so {steps} were skipped and did not change the weights; "
        f"{_stops_without_saving(config)}. {advice}"
    )


def _advice(config: Config) -> str:
    """Names positional parameters whose gradient is not finite even at the initial parameters."""
    broken = trial_step(config.model, torch.float32)
    if not broken:
        return _ADVICE
    return f"The cause: {not_finite(config.model.pos_emb, broken)}"


def _stops_without_saving(config: Config) -> str:
    folder = config.checkpoint.save
    if folder is None or not has_checkpoint(folder):
        return "training stops without saving"
    return f"training stops without saving; the last checkpoint is in {folder}"


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: allocated on the GPU, or resident set size of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def profiled_steps(
    config: Config, layout: Layout, iteration: int, report: Report
) -> Iterator[Callable[[], None]]:
    """If `profile` is true, profile the steps with `profile_step_start` to `profile_step_stop` - 1
    earlier steps.

    Yields a function to call after every training step, the first of which follows `iteration`
    earlier steps. The step before the profiled ones is a warm-up, if there is one.

    Every rank writes its trace to `tensorboard_dir` (or `log_dir`), rank_N.TIME.pt.trace.json.
    """
    # There may be nothing to profile.
    settings = config.logging
    first, last = max(settings.profile_step_start, iteration), settings.profile_step_stop
    if not settings.profile:
        yield lambda: None
        return
    if first >= last:
        report(
            "profile: no step is profiled, because training resumes after profile_step_stop "
            f"{last:,}"
        )
        yield lambda: None
        return

    # One trace per rank.
    folder = Path(settings.tensorboard_dir or settings.log_dir or ".")
    write_trace = tensorboard_trace_handler(str(folder), worker_name=f"rank_{layout.rank}")

    # After the last step.
    def write(profiler: Any) -> None:
        write_trace(profiler)
        end = iteration + profiler.step_num
        report(f"profile: iterations {first + 1:,} to {end:,}; traces are in {folder}")

    # A resumed run may start right at the first profiled step, without a warm-up.
    warmup = min(first - iteration, 1)
    plan = schedule(wait=first - iteration - warmup, warmup=warmup, active=last - first, repeat=1)
    with profile(
        schedule=plan,
        on_trace_ready=write,
        record_shapes=True,
        profile_memory=True,
        with_flops=True,
    ) as profiler:
        yield profiler.step
