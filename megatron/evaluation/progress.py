"""How far an evaluation has come: a bar with tokens/s and time left on a terminal, one line per result elsewhere."""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from megatron.evaluation.modes import Mode
from megatron.evaluation.protocols import Segments
from megatron.evaluation.records import Record

# A token costs about 1 + keys / KEYS_PER_UNIT: attention over so many keys costs as much as the rest of a small model.
# It weighs the bar, so that the time left does not assume long texts to be as cheap as short ones; nothing else depends
# on it.
KEYS_PER_UNIT = 4096


class Progress:
    """Shows the work list of (mode, segments) pairs being done, on the standard error stream.

    Use as a context manager: `start` a pair, `advance` by its tokens, `finish` it with its record. Of several ranks one
    shows its own share, which is done when all are; `ranks` makes its tokens/s those of all.
    """

    def __init__(self, name: str, work: Sequence[tuple[Mode, Segments]], *, enabled: bool = True, ranks: int = 1):
        self._name = name
        self._ranks = ranks
        self._done = 0.0
        console = Console(stderr=True, quiet=not enabled)
        self._console = console
        self._bar = RichProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (enabled and console.is_terminal),
            transient=True,
        )
        total = sum(self._cost(mode, segments) * segments.targets for mode, segments in work)
        self._task = self._bar.add_task(name, total=total, rate="")

    @staticmethod
    def _cost(mode: Mode, segments: Segments) -> float:
        return 1 + mode.keys(segments.length) / KEYS_PER_UNIT

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def start(self, mode: Mode, segments: Segments) -> None:
        self._unit = self._cost(mode, segments)
        self._end = self._done + self._unit * segments.targets
        self._tokens = 0
        self._begun = time.perf_counter()
        self._bar.update(self._task, description=f"{self._name} {mode.name} {segments.length:,}", rate="")

    def advance(self, tokens: int) -> None:
        self._tokens += tokens
        self._done += self._unit * tokens
        self._bar.update(self._task, completed=self._done, rate=f"{self._rate():,.0f} tokens/s")

    def finish(self, record: Record) -> None:
        """A result is known: move to the end of its share of the work and print its line."""
        self._done = self._end
        self._bar.update(self._task, completed=self._done)
        if record["note"] is not None:
            result = f"n/a: {record['note']}"
        else:
            value, details = _value(record)
            result = f"{value} ({details}, {self._rate():,.0f} tokens/s)"
        self._console.print(
            f"{self._name} {record['mode']} {record['protocol']} at {record['length']:,}: {result}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def _rate(self) -> float:
        return self._ranks * self._tokens / max(time.perf_counter() - self._begun, 1e-9)


def _value(record: Record) -> tuple[str, str]:
    """What was measured, and details of it."""
    if record["kind"] == "resolution":
        return f"resolution {record['resolution']:.3f}", f"{record['texts']} texts"
    if record["kind"] == "passkey":
        found = f"{record['correct']} of {record['trials']} pass keys"
        return f"{found} at depth {record['depth']:g}", f"accuracy {record['accuracy']:.0%}"
    value = "overflow" if record["perplexity"] is None else f"{record['perplexity']:.4g}"
    return f"perplexity {value}", f"loss {record['loss']:.4f}, {record['tokens']:,} tokens"
