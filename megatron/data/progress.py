"""Progress of a long pass over a corpus: a bar on a terminal, a line now and then elsewhere."""

import sys
import time

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class CorpusProgress:
    """Shows documents, tokens, MB of text per second, time left. A context manager.

    Args:
        total_bytes: of input; what the bar and the time left are reckoned by.
        total_documents: number of documents, where known; shown beside the count.
        log_interval: documents between two updates.
    """

    def __init__(self, description: str, total_bytes: int, total_documents: int | None = None, log_interval: int = 100):
        self._description = description
        self._total_bytes = max(total_bytes, 1)
        self._of = "" if total_documents is None else f"/{total_documents:,}"
        self._log_interval = log_interval
        self._shown_documents = 0
        self._shown_at = self._begun_at = time.monotonic()
        self._bar = None
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
        if self._bar is not None:
            self._bar.stop()

    def update(self, bytes_read: int, documents: int, tokens: int, text_bytes: int) -> None:
        """Show the totals reached, if the last time was long enough ago.

        Args:
            bytes_read: of `total_bytes`; compressed input counts as it is on disk.
            text_bytes: UTF-8 bytes of the documents, for the rate.
        """
        if documents - self._shown_documents < self._log_interval and bytes_read < self._total_bytes:
            return
        self._shown_documents = documents
        now = time.monotonic()
        elapsed = max(now - self._begun_at, 1e-9)
        counts = f"{documents:,}{self._of} documents, {tokens:,} tokens, {text_bytes / elapsed / 1e6:.1f} MB/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=bytes_read, counts=counts)
        elif now - self._shown_at >= _SECONDS_BETWEEN_LINES:
            self._shown_at = now
            share = bytes_read / self._total_bytes
            left = elapsed * (1 - share) / max(share, 1e-9)
            print(f"{self._description}: {share:.0%}, {counts}, {left:.0f} s left", file=sys.stderr, flush=True)
