"""Progress of a long pass over a corpus: a bar on a terminal, a line now and then elsewhere."""

import sys
import time

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class CorpusProgress:
    """Shows documents, tokens, MB of text per second, time left. A context manager.

    Args:
        total_bytes: of input; what the bar and the time left are reckoned by. None: not known.
        total_documents: number of documents, where known; shown beside the count.
        log_interval: documents between two updates.
    """

    def __init__(
        self, description: str, total_bytes: int | None, total_documents: int | None = None, log_interval: int = 100
    ):
        self._description = description
        self._total_bytes = None if total_bytes is None else max(total_bytes, 1)
        self._of = "" if total_documents is None else f"/{total_documents:,}"
        self._log_interval = log_interval
        self._shown_documents = 0
        self._bar = None
        self.start()
        if sys.stderr.isatty():
            from rich.console import Console

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f}% {task.fields[counts]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(description, total=self._total_bytes, counts="")

    def __enter__(self) -> "CorpusProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self.stop()

    def stop(self) -> None:
        """Give the terminal back; nothing more is to be shown."""
        if self._bar is not None:
            self._bar.stop()

    def start(self, bytes_read: int = 0, text_bytes: int = 0) -> None:
        """Begin to reckon rates here: an earlier run came so far."""
        self._bytes_before, self._text_before = bytes_read, text_bytes
        self._shown_at = self._begun_at = time.monotonic()

    def update(self, bytes_read: int, documents: int, tokens: int | None, text_bytes: int) -> None:
        """Show the totals reached, if the last time was long enough ago.

        Args:
            bytes_read: of `total_bytes`; compressed input counts as it is on disk.
            tokens: None where there are none yet.
            text_bytes: UTF-8 bytes of the documents, for the rate.
        """
        at_end = self._total_bytes is not None and bytes_read >= self._total_bytes
        if documents - self._shown_documents < self._log_interval and not at_end:
            return
        self._shown_documents = documents
        now = time.monotonic()
        elapsed = max(now - self._begun_at, 1e-9)
        rate = (text_bytes - self._text_before) / elapsed / 1e6
        counted = "" if tokens is None else f"{tokens:,} tokens, "
        counts = f"{documents:,}{self._of} documents, {counted}{rate:.1f} MB/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=bytes_read, counts=counts)
        elif now - self._shown_at >= _SECONDS_BETWEEN_LINES:
            self._shown_at = now
            print(self._line(bytes_read, elapsed, counts), file=sys.stderr, flush=True)

    def _line(self, bytes_read: int, elapsed: float, counts: str) -> str:
        if self._total_bytes is None:
            return f"{self._description}: {counts}"
        left = elapsed * (self._total_bytes - bytes_read) / max(bytes_read - self._bytes_before, 1)
        return f"{self._description}: {bytes_read / self._total_bytes:.0%}, {counts}, {left:.0f} s left"
