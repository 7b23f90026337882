"""Reading `metrics.jsonl`, to which training appends a JSON object with metrics at each logged
iteration.
"""

import contextlib
import math
import os
import statistics
from pathlib import Path

from pydantic import TypeAdapter
from typing_extensions import NotRequired, TypedDict

from megatron.utils.errors import UserError
from megatron.utils.files import read_lines
from megatron.utils.typed_json import Count, Float, Name, check_json, load_json

MAX_LINE_BYTES = 1 << 20

# The keys of a line that progress and step times need. Lines of validation losses have only the
# first ones.
MetricsLine = TypedDict(
    "MetricsLine",
    {
        "run": NotRequired[Name],  # missing in logs of earlier versions
        "iteration": Count,
        "train/seconds_per_step": NotRequired[Float],
        "train/tokens_per_second": NotRequired[Float],
    },
)
_METRICS_LINE = TypeAdapter(MetricsLine)


def parse_metrics(line: bytes, place: str) -> MetricsLine | None:
    """A line of metrics.jsonl; None if a killed run has left it incomplete. Raises UserError,
    starting with `place`, if a value has a wrong type.
    """
    try:
        value = load_json(line, place, allow_nan=True)  # of losses
    except UserError:
        return None
    return check_json(value, _METRICS_LINE, place)


def last_metrics(path: Path) -> MetricsLine | None:
    """The last valid line of a metrics.jsonl; None if there is none."""
    if not path.is_file():
        return None
    with open(path, "rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - MAX_LINE_BYTES))
        lines = stream.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(UserError):
            if values := parse_metrics(line, str(path)):
                return values
    return None


def seconds_per_step(path: Path, run: str = "") -> float | None:
    """The median time of a step of a run from a `metrics.jsonl`; None if it has no steps.

    run: `TrainingState.run`; empty for lines of earlier versions, which have none. The median is
    over the lines of the run with the median number of tokens per step, because its batches may
    have changed. Its first line includes warm-up and is skipped if there are others.
    Incomplete lines are skipped: the last one may be being written, and killed runs may have left
    others. Raises UserError if the file cannot be read or a value has a wrong type.
    """
    steps: list[tuple[float, float]] = []  # seconds, tokens
    for number, content in enumerate(read_lines(path, MAX_LINE_BYTES), start=1):
        line = parse_metrics(content, f"{path}, line {number}")
        if not line or line.get("run", "") != run:
            continue
        seconds, rate = line.get("train/seconds_per_step"), line.get("train/tokens_per_second")
        if seconds and rate:
            steps.append((seconds, seconds * rate))
    steps = steps[1:] or steps
    if not steps:
        return None

    # Tokens per step are products of rounded numbers.
    usual = statistics.median_low(tokens for _, tokens in steps)
    chosen = []
    for seconds, tokens in steps:
        if math.isclose(tokens, usual, rel_tol=0.02):
            chosen.append(seconds)
    return statistics.median(chosen)
