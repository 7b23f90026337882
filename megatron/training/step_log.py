"""The log of the training steps: losses, rates, the kernels' parameters; and the check that the losses are numbers."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from megatron.config import UserError
from megatron.training import metrics
from megatron.utils.progress import readable_time

# In fp16 a step that overflows is skipped and lowers the loss scale; so many in a row are no longer that.
MOST_OVERFLOWS = 32


def not_finite(run: Any, when: str) -> str:
    """What to tell the user when the loss is nan or inf."""
    kept = run.config.checkpoint.save
    return (
        f"the loss is not finite (nan or inf) {when}; training stops and nothing is saved from it. "
        + (f"The last good checkpoint is in {kept}. " if kept else "")
        + "Lower the learning rate, clip the gradient (gradient_clipping), or use a wider number format"
    )


class StepLog:
    """What happened since the last line of the log. Losses stay on the device until then, so that no step waits for
    one. `run` is `megatron.training.loop.Run`.
    """

    def __init__(self, run: Any):
        self.run = run
        self._losses: list[torch.Tensor] = []
        self._checked = 0
        self._overflows = 0
        self.seconds = 0.0  # of training since the last line
        self._started = time.perf_counter()

    def add(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The clock stands still within it, so that validation and saving are not counted as training."""
        self.seconds += time.perf_counter() - self._started
        try:
            yield
        finally:
            self._started = time.perf_counter()

    def check(self) -> None:
        """Raise UserError if a loss since the last check is not finite."""
        new = self._losses[self._checked :]
        if not new:
            return
        bad = ~torch.isfinite(torch.stack(new).float()).cpu()
        first = self.run.state.iteration - len(new) + 1
        self._checked = len(self._losses)
        allowed = MOST_OVERFLOWS if self.run.engine.loss_scale is not None else 0
        for offset, is_bad in enumerate(bad.tolist()):
            self._overflows = self._overflows + 1 if is_bad else 0
            if self._overflows > allowed:
                raise UserError(not_finite(self.run, f"at iteration {first + offset}"))

    def write(self, rate: float) -> None:
        """Check the losses; print and track the means since the last line. `rate`: the last step's learning rate."""
        self.check()
        with self.paused():
            self._write(rate)
        self._losses, self._checked, self.seconds = [], 0, 0.0

    def _write(self, rate: float) -> None:
        run, state, engine = self.run, self.run.state, self.run.engine
        steps = len(self._losses)
        per_second = steps * engine.global_batch * run.config.model.seq_length / max(self.seconds, 1e-9)
        finite = torch.stack(self._losses).float().cpu()
        loss = float(finite[torch.isfinite(finite)].mean())
        values = {
            "train/loss": loss,
            "train/learning_rate": rate,
            "train/tokens_per_second": per_second,
            "train/tokens": float(state.tokens),
            "train/memory_bytes": float(metrics.peak_memory(run.layout.device)),
        }
        texts = [f"iteration {state.iteration:,}/{run.last_iteration:,}", f"loss {loss:.4f}", f"lr {rate:.3e}"]
        norm, scale = engine.grad_norm, engine.loss_scale
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
        remaining = (run.last_iteration - state.iteration) * self.seconds / max(steps, 1)
        texts.append(f"{readable_time(remaining)} left")
        run.report(" | ".join(texts))
        for name, heads in engine.kernel_statistics().items():
            low, mean, high = heads.min().item(), heads.mean().item(), heads.max().item()
            values |= {f"kernel/{name}/min": low, f"kernel/{name}/mean": mean, f"kernel/{name}/max": high}
            run.report(f"  {name}: {mean:.4f} mean, {low:.4f} to {high:.4f} over {heads.numel()} heads")
        run.trackers.scalars(values, state.iteration)
