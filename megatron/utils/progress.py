"""Progress of long tasks: a line that changes in a terminal, periodic lines in a log, and the form
of texts and numbers in them.
"""

import re
import time

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

COLUMNS = 80  # of the console
_REFRESH_INTERVAL = 0.1  # seconds between two updates of the line in a terminal
_ERASE_LINE = Control((ControlType.ERASE_IN_LINE, 2))


class Progress:
    """Shows the progress of a task on standard error. Use it as a context manager.

    Percentage and time left are computed from `completed` and `total`. The rate can have another
    unit: for a corpus, progress is in bytes on disk and the rate in MB of text.

    Args:
        description: name of the task, shown first.
        total: the value of `completed` at the end, in any unit; None if unknown.
        unit: unit of the rate ("tokens" shows as "1,234 tokens/s"); empty for no rate.
        log_interval: seconds between two lines if the stream is not a terminal; None for no such
            lines.
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
        self._total, self._unit = total, unit
        self._console = console or Console(stderr=True)
        self._interval = _REFRESH_INTERVAL if self._console.is_terminal else log_interval
        self._enabled = enabled
        self._shown_at = time.monotonic()
        self.restart()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line from the terminal."""
        if self._enabled:
            self._console.control(_ERASE_LINE)

    def restart(self, completed: float = 0.0, amount: float = 0.0) -> None:
        """Measure the time left and the rate from here, as after resuming an earlier run."""
        self._completed = self._first_completed = completed
        self._amount = self._first_amount = amount
        self._started_at = time.monotonic()

    def update(self, completed: float, status: str = "", amount: float | None = None) -> None:
        """Update the display, at most once per refresh interval (in a terminal) or log interval.

        Args:
            completed: progress so far, in the unit of `total`.
            status: text shown beside the percentage.
            amount: progress so far, in the unit of the rate; `completed` by default.
        """
        self._completed = completed
        self._amount = completed if amount is None else amount
        now = time.monotonic()
        if not self._enabled or self._interval is None or now - self._shown_at < self._interval:
            return
        self._shown_at = now

        # A terminal shows the line in place of the last one.
        line = f"{self.description}: {self._status(status)}"
        if self._console.is_terminal:
            self._console.control(_ERASE_LINE)
            self._console.print(
                line, highlight=False, markup=False, no_wrap=True, overflow="ellipsis", end="\r"
            )
        else:
            self.print(line)

    def print(self, line: str) -> None:
        """Print a line, above that of the display."""
        if self._enabled:
            self._console.control(_ERASE_LINE)
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    @property
    def rate_text(self) -> str:
        """The rate since `restart`, as "1,234 tokens/s"; rates below 100 have one decimal."""
        rate = (self._amount - self._first_amount) / max(time.monotonic() - self._started_at, 1e-9)
        decimals = 0 if rate >= 100 else 1
        return f"{rate:,.{decimals}f} {self._unit}/s"

    def _status(self, status: str) -> str:
        # The time left is estimated from the pace since `restart`.
        parts, done = [status], self._completed - self._first_completed
        if self._total:
            parts.insert(0, f"{self._completed / self._total:.0%}")
        if self._unit:
            parts.append(self.rate_text)
        if self._total is not None and done > 0:
            elapsed, missing = time.monotonic() - self._started_at, self._total - self._completed
            parts.append(f"{readable_time(elapsed * max(missing, 0.0) / done)} left")
        return ", ".join(filter(None, parts))


def fitted(text: str) -> str:
    """The text in lines of at most `COLUMNS` characters, which break at ` | `, and where a part is
    too long by itself, between words. A word that is too long, such as a path, stays where it is.
    """
    lines = [""]
    for part in text.split(" | "):
        longer = f"{lines[-1]} | {part}"
        if not lines[-1]:
            lines[-1] = part
        elif len(longer) > COLUMNS:
            lines.append(f"  {part}")
        else:
            lines[-1] = longer

    short: list[str] = []
    for line in lines:
        first, *words = re.split(r"(?<=\S) ", line)
        short.append(first)
        for word in words:
            fits = len(short[-1]) + 1 + len(word) <= COLUMNS
            if fits or len(word) + 2 > COLUMNS:
                short[-1] += f" {word}"
            else:
                short.append(f"  {word}")
    return "\n".join(short)


def readable_size(size: float) -> str:
    """A number of bytes, for example 850 bytes, 6.1 kB, 2.3 MB."""
    if size < 1e3:
        return f"{size:.0f} bytes"
    if size < 1e6:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e6:,.1f} MB"


def readable_time(seconds: float) -> str:
    """For example 45s, 3m10s, 2h05m."""
    seconds = int(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
