"""Progress display for long tasks: a bar in a terminal, periodic lines in a log; both with rate and time left."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

_REFRESH_INTERVAL = 0.1  # seconds between two refreshes of the bar


class Progress:
    """Shows the progress of a task on standard error. Use it as a context manager.

    Percentage and time left are computed from `completed` and `total`. The rate can have another unit: for a corpus,
    progress is in bytes on disk and the rate in MB of text.

    The bar has no refresh thread, so the process may fork while it is shown.

    Args:
        description: name of the task, shown first.
        total: the value of `completed` at the end, in any unit; None if unknown.
        unit: unit of the rate ("tokens" shows as "1,234 tokens/s"); empty for no rate.
        log_interval: seconds between two lines if the stream is not a terminal; None for no such lines.
        console: where to write; by default, standard error.
        enabled: False shows nothing at all, for example on ranks other than 0.
    """

    def __init__(
        self,
        description: str,
        total: float | None,
        *,
        unit: str = "",
        log_interval: float | None = 10.0,
        console: Console | None = None,
        enabled: bool = True,
    ):
        self.description = description
        self.console = console or Console(stderr=True)
        self.enabled = enabled
        self._total = total
        self._unit = unit
        self._log_interval = log_interval
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            console=self.console,
            disable=not (enabled and self.console.is_terminal),
            transient=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task(description, total=total, status="")
        self._completed = self._amount = 0.0
        self._shown_at = time.monotonic()
        self.restart()

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar from the terminal."""
        self._bar.stop()

    def restart(self, completed: float = 0.0, amount: float = 0.0) -> None:
        """Measure the time left and the rate from here, for example after resuming an earlier run."""
        self._completed = self._first_completed = completed
        self._started_at = time.monotonic()
        self.restart_rate(amount)

    def restart_rate(self, amount: float = 0.0) -> None:
        """Measure the rate from here; the time left is not affected."""
        self._amount = self._first_amount = amount
        self._rate_started_at = time.monotonic()

    def update(self, completed: float, status: str = "", amount: float | None = None) -> None:
        """Update the display, at most once per refresh interval (in a terminal) or log interval.

        Args:
            completed: progress so far, in the unit of `total`.
            status: text shown beside the percentage.
            amount: progress so far, in the unit of the rate; `completed` by default.
        """
        self._completed = completed
        self._amount = completed if amount is None else amount
        if not self.enabled:
            return
        now = time.monotonic()
        at_end = self._total is not None and completed >= self._total
        if self.console.is_terminal:
            if at_end or now - self._shown_at >= _REFRESH_INTERVAL:
                self._shown_at = now
                self._bar.update(
                    self._task,
                    description=self.description,
                    completed=completed,
                    status=self._status(status),
                    refresh=True,
                )
        elif self._log_interval is not None and now - self._shown_at >= self._log_interval:
            self._shown_at = now
            self.print(f"{self.description}: {self._status(status)}")

    def print(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.enabled:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    @property
    def rate(self) -> float:
        """Amount per second since `restart` or `restart_rate`."""
        return (self._amount - self._first_amount) / max(time.monotonic() - self._rate_started_at, 1e-9)

    @property
    def rate_text(self) -> str:
        """For example "1,234 tokens/s"; rates below 100 have one decimal."""
        rate = self.rate
        return f"{rate:,.0f} {self._unit}/s" if rate >= 100 else f"{rate:.1f} {self._unit}/s"

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the pace since `restart`; None before anything is completed and without a total."""
        done = self._completed - self._first_completed
        if self._total is None or done <= 0:
            return None
        return (time.monotonic() - self._started_at) * max(self._total - self._completed, 0.0) / done

    def _status(self, status: str) -> str:
        seconds_left = self.seconds_left
        parts = [
            f"{self._completed / self._total:.0%}" if self._total else "",
            status,
            self.rate_text if self._unit else "",
            f"{readable_time(seconds_left)} left" if seconds_left is not None else "",
        ]
        return ", ".join(part for part in parts if part)


def readable_size(size: float) -> str:
    """A number of bytes, for example 850 bytes, 6.1 kB, 2.3 MB."""
    if size < 1e3:
        return f"{size:.0f} bytes"
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"


def readable_time(seconds: float) -> str:
    """For example 45s, 3m10s, 2h05m."""
    seconds = int(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
