"""Seconds per training step, KERPLE's Table 4: from the logs of training runs, or from the benchmark's numbers."""

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.directory import find_step
from megatron.config import Config, UserError
from megatron.reporting.layout import NOT_MEASURED, Cell, PaperTable, Row, Section, written
from megatron.reporting.published import Published, published
from megatron.reporting.results import NO_NAME, in_order
from megatron.reporting.tables import CORPORA

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Speed:
    """Of one training run: the median over the lines of its log, in seconds per optimizer step."""

    corpus: str
    pos_emb: str
    seed: int | None
    seconds: float
    tokens_per_second: float
    config: Config


def speeds(records: Iterable[Mapping[str, Any]]) -> list[Speed]:
    """Of every checkpoint that the records name and whose training log is still there."""
    found = []
    origins = {}
    for record in records:
        origin = (record.get("checkpoint") or {}).get("path")
        if origin is not None and record["kind"] == "extrapolation":
            origins.setdefault(origin, record)
    for origin, record in origins.items():
        folder = Path(origin)
        log = training_log(folder)
        timed = log and read_log(log)
        if timed:
            config = checkpoint_config(find_step(folder))
            corpus = record.get("corpus") or NO_NAME
            found.append(Speed(corpus, config.model.pos_emb, config.training.seed, *timed, config))
    return found


def training_log(checkpoints: Path) -> Path | None:
    """The metrics of the run that wrote a folder of checkpoints: in the `log-dir` of its configuration, or in `logs`
    beside the folder; None where there is none.
    """
    try:
        named = checkpoint_config(find_step(checkpoints)).logging.log_dir
    except UserError:
        return None
    places = [Path(named)] if named else []
    places.append(checkpoints.parent / "logs")
    return next((place / METRICS for place in places if (place / METRICS).is_file()), None)


def read_log(path: Path) -> tuple[float, float] | None:
    """(seconds per step, tokens per second): medians over the lines of a log, the first one, which holds the warm-up of
    the machine, left out if there are others; None for a log without steps.
    """
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the last line of a run that was killed
        if line.get("train/tokens_per_second") and line.get("train/tokens") and line.get("iteration"):
            lines.append(line)
    if not lines:
        return None
    steady = lines[1:] or lines
    rate = statistics.median(line["train/tokens_per_second"] for line in steady)
    return lines[-1]["train/tokens"] / lines[-1]["iteration"] / rate, rate


def speed_tables(found: Iterable[Speed]) -> list[PaperTable]:
    """Table 4, one for each size of model, beside the published numbers for a model of that size."""
    by_model: dict[tuple[int, int, int], list[Speed]] = {}
    for speed in found:
        model = speed.config.model
        by_model.setdefault((model.num_layers, model.hidden_size, model.seq_length), []).append(speed)
    return [_table(sizes, group) for sizes, group in by_model.items()]


def benchmark_tables(path: str | Path) -> list[PaperTable]:
    """The step times that `benchmarks/train_step.py --json` wrote: alternatives that took turns in one process.

    Raises UserError where the file is no such thing.
    """
    try:
        content = json.loads(Path(path).read_bytes())
        machine, tables = content["hardware"]["processor"], content["tables"].items()
        rows = {title: [(row["name"], row["median"], row["ratio"]) for row in timings] for title, timings in tables}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: does not hold the numbers of benchmarks/train_step.py --json ({error!r})") from error
    name = published("kerple-4").name
    return [
        PaperTable(
            name=f"{Path(path).stem}-{index}",
            title=title.capitalize(),
            corner="",
            columns=tuple(name((method, "full")) for method, _, _ in timings),
            lines=(
                Row("sec/step", tuple(Cell(written([median])) for _, median, _ in timings)),
                Row(f"ratio to {timings[0][0]}", tuple(Cell(f"{ratio:.3f}") for _, _, ratio in timings)),
            ),
            notes=(f"Medians of alternatives that took turns in one process, on {machine}.",),
        )
        for index, (title, timings) in enumerate(rows.items(), start=1)
        if timings
    ]


def _table(sizes: tuple[int, int, int], group: list[Speed]) -> PaperTable:
    layers, hidden, length = sizes
    paper = next((one for one in map(published, ("kerple-4", "dape-speed")) if _same_model(one, sizes)), None)
    known = (paper or published("kerple-4")).methods
    methods = in_order([(pos_emb, "full") for pos_emb in dict.fromkeys(one.pos_emb for one in group)], known)
    lines: list[Row | Section] = []
    for corpus in dict.fromkeys(one.corpus for one in group):
        cells = []
        for pos_emb, _ in methods:
            seconds = [one.seconds for one in group if (one.corpus, one.pos_emb) == (corpus, pos_emb)]
            cells.append(Cell(written(seconds) if seconds else NOT_MEASURED))
        lines += [Section(CORPORA.get(corpus.lower(), corpus)), Row("sec/step", tuple(cells))]
        texts = [paper.value(corpus, method, None) for method in methods] if paper else []
        if any(texts):
            unit = "ms/step" if paper.measure.startswith("milli") else "sec/step"
            lines.append(Row(f"{unit}, paper", tuple(Cell(text or "") for text in texts), published=True))
    notes = [
        "In the layout of KERPLE (arXiv 2205.09921), Table 4. Medians over the runs' logs, on whatever they ran on; "
        "they compare where these were alike and did nothing else."
    ]
    if any(row.published for row in lines if isinstance(row, Row)):
        notes.append(f"Rows marked paper: {paper.source}.")
    names = (paper or published("kerple-4")).name
    return PaperTable(
        name=f"kerple-4-{layers}x{hidden}-{length}",
        title=f"Training time, {layers} layers of {hidden}, length {length}",
        corner="",
        columns=tuple(names(method) for method in methods),
        lines=tuple(lines),
        notes=tuple(notes),
    )


def _same_model(paper: Published, sizes: tuple[int, int, int]) -> bool:
    return (*paper.model, paper.train_length) == sizes
