"""How far a sweep has come: a bar on a terminal, a line per event elsewhere."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from megatron.sweep.planning import Run, State
from megatron.sweep.runner import Failure, Job, Listener
from megatron.utils.progress import readable_time

# Without a terminal, so many seconds between two lines that only say how far it is.
SECONDS_BETWEEN_LINES = 60.0
SECONDS_BETWEEN_LOOKS = 2.0


class SweepProgress:
    """Use as a context manager; `listener` is what a Runner tells.

    The time left is that of the training steps at the pace of this sweep so far; evaluations are in that pace, as the
    time that they took.
    """

    def __init__(self, runs: Sequence[Run], console: Console):
        self._console = console
        self._states = {run.name: run.state() for run in runs}
        self._total = len(runs)
        self._finished = sum(state is State.FINISHED for state in self._states.values())
        self._failed = 0
        self._left = {run.name: run.steps_left() for run in runs if self._states[run.name] is not State.FINISHED}
        self._steps = sum(self._left.values())
        self._done: dict[str, int] = dict.fromkeys(self._left, 0)
        self._started = self._looked = self._spoke = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            auto_refresh=False,  # no thread: processes are forked beside it
        )
        self._task = self._bar.add_task("sweep", total=max(1, self._steps), state="")

    def __enter__(self) -> "SweepProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def listener(self) -> Listener:
        return Listener(self.say, self._on_finished, self._on_failed, self._on_tick)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _on_finished(self, run: Run, seconds: float) -> None:
        self._finished += 1
        self._done[run.name] = self._left[run.name]
        self.say(f"[{self._count()}] {run.name}: finished in {readable_time(seconds)}{self._time_left()}")

    def _on_failed(self, failure: Failure) -> None:
        self._failed += 1
        self._done[failure.run.name] = self._left[failure.run.name]
        self.say(
            f"[{self._count()}] {failure.run.name}: FAILED at {failure.work} (exit status {failure.status}); the "
            f"others go on. The end of {failure.log}:"
        )
        for line in failure.lines:
            self.say(f"    {line}")

    def _on_tick(self, jobs: Sequence[Job]) -> None:
        now = time.monotonic()
        if now - self._looked < SECONDS_BETWEEN_LOOKS:
            return
        self._looked = now
        for job in jobs:
            left = self._left[job.run.name]
            begun = job.run.steps - left
            if job.work == "training":
                self._done[job.run.name] = min(left, max(0, job.run.steps_logged() - begun))
            elif job.work == "evaluating":
                self._done[job.run.name] = left
        going_on = ", ".join(f"{job.run.name} {job.work}{_step(job)}" for job in jobs)
        state = f"{self._count()} runs{self._time_left()} | {going_on}"
        self._bar.update(self._task, completed=sum(self._done.values()), state=state, refresh=True)
        if not self._console.is_terminal and now - self._spoke >= SECONDS_BETWEEN_LINES:
            self._spoke = now
            self.say(state)

    def _count(self) -> str:
        return f"{self._finished}/{self._total}" + (f", {self._failed} failed" if self._failed else "")

    def _time_left(self) -> str:
        done = sum(self._done.values())
        if not done or done >= self._steps:
            return ""
        seconds = (time.monotonic() - self._started) * (self._steps - done) / done
        return f", about {readable_time(seconds)} left"


def _step(job: Job) -> str:
    return f" ({job.run.steps_logged():,}/{job.run.steps:,})" if job.work == "training" else ""
