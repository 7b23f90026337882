"""Learning-rate schedules of the KERPLE release (GPT-NeoX of 2022)."""

import math
from dataclasses import dataclass

STYLES = ("cosine", "linear", "exponential", "constant")


@dataclass(frozen=True)
class Schedule:
    """Learning rate at optimizer step t (the first step has t = 0).

    With W warmup steps and T decay steps, and t clipped to T - W: linear warmup lr * t / W up to t = W, then with u =
    t - W cosine lr/2 (1 + cos(pi u / T)), linear lr (T - u) / T, exponential lr e^(-0.693 u / T), or constant lr;
    never below min_lr. The period is T, not T - W: so the release has it.
    """

    peak: float
    style: str
    decay_steps: int
    warmup_steps: float
    minimum: float = 0.0

    def __post_init__(self):
        if self.style not in STYLES:
            raise ValueError(f"lr-decay-style {self.style!r} is not known; choose one of {', '.join(STYLES)}")

    def __call__(self, step: int) -> float:
        clipped = min(step, self.decay_steps - self.warmup_steps)
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.peak * clipped / self.warmup_steps
        elapsed = (clipped - self.warmup_steps) / self.decay_steps if self.decay_steps else 0.0
        if self.style == "cosine":
            rate = self.peak / 2 * (1 + math.cos(math.pi * elapsed))
        elif self.style == "linear":
            rate = self.peak * (1 - elapsed)
        elif self.style == "exponential":
            rate = self.peak * math.exp(-0.693 * elapsed)
        else:
            rate = self.peak
        return max(rate, self.minimum)
