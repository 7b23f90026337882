"""Reading `metrics.jsonl`, to which training appends a JSON object with metrics at each logged iteration."""

import statistics
from pathlib import Path

from pydantic import TypeAdapter
from typing_extensions import NotRequired, TypedDict

from megatron.utils.errors import UserError
from megatron.utils.files import read_lines
from megatron.utils.typed_json import Count, Float, check_json, load_json

MAX_LINE_BYTES = 1 << 20

# The keys of a line that progress and step times need. Lines of validation losses have only the first.
MetricsLine = TypedDict(
    "MetricsLine",
    {"iteration": Count, "train/tokens": NotRequired[Float], "train/tokens_per_second": NotRequired[Float]},
)
_METRICS_LINE = TypeAdapter(MetricsLine)


def parse_metrics(line: bytes, place: str) -> MetricsLine | None:
    """A line of metrics.jsonl; None if a killed run has left it incomplete. Raises UserError, starting with `place`, if
    a value has a wrong type.
    """
    try:
        value = load_json(line, place, allow_nan=True)  # of losses
    except UserError:
        return None
    return check_json(value, _METRICS_LINE, place)


def read_log(path: Path) -> tuple[float, float] | None:
    """(seconds per step, tokens per second) from a `metrics.jsonl`; None if it has no steps.

    Both are medians over the lines of the log. The first line includes warm-up and is skipped if there are others.
    Incomplete lines are skipped: the last one may be being written, and killed runs may have left others. Raises
    UserError if the file cannot be read or a value has a wrong type.
    """
    rates: list[float] = []
    tokens_per_step = 0.0
    for number, content in enumerate(read_lines(path, MAX_LINE_BYTES), start=1):
        line = parse_metrics(content, f"{path}, line {number}")
        if line and line["iteration"] and line.get("train/tokens") and line.get("train/tokens_per_second"):
            rates.append(line["train/tokens_per_second"])
            tokens_per_step = line["train/tokens"] / line["iteration"]
    if not rates:
        return None
    tokens_per_second = statistics.median(rates[1:] or rates)
    return tokens_per_step / tokens_per_second, tokens_per_second
