"""Tables of losses at the training length: the settings of the pilot, all runs on more tokens, differences of seeds."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron.reporting.aggregate import AnyRecord, Method, Setting, measurements, method_of, setting_of
from megatron.reporting.differences import PairedLosses
from megatron.reporting.formatting import NOT_MEASURED, format_mean, format_number
from megatron.reporting.published import corpus_name, corpus_rank, display_name, published
from megatron.reporting.tables import Cell, Row, Section, Table

LOG = Method("kerple_log")


def pilot_table(records: Sequence[AnyRecord]) -> Table | None:
    """The loss of each setting at its training length, and its difference from the setting of log with the shortest
    name at that length. None if there are no records at the training length.
    """
    keys = {(setting_of(record), method_of(record), record["length"]): record for record in records}
    trained = {key: keys[key] for key in keys if key[2] == keys[key]["train_length"] and keys[key]["loss"] is not None}
    if not trained:
        return None
    losses, shortest = PairedLosses(records), min(record["length"] for record in records)

    def cell(record: AnyRecord | None) -> str:
        if record is None or record["loss"] is None:
            return NOT_MEASURED
        return f"{record['loss']:.4f} ± {record['stderr'] or 0:.4f}"

    lines = []
    for key in sorted(trained, key=lambda key: (key[2], trained[key]["loss"])):
        setting, method, length = key
        pos_emb = method.pos_emb.partition(" (")[0]
        same = [other for other in trained if other[1].pos_emb.partition(" (")[0] == pos_emb and other[2] == length]
        logs = [other for other in trained if other[1].pos_emb.startswith(LOG.pos_emb) and other[2] == length]
        base = min(logs or same, key=lambda other: len(_run_name(trained[other])))
        texts = [cell(trained[key]), format_number(trained[key]["perplexity"])]
        texts.append("" if base == key else losses.text(key, base))
        texts.append(cell(keys.get((setting, method, shortest))))
        best = trained[key]["loss"] == min(trained[other]["loss"] for other in same)
        labels = _run_name(trained[key]), display_name(Method(pos_emb)), str(length)
        lines.append(Row(labels, (Cell(texts[0], best=best), *map(Cell, texts[1:]))))
    columns = ("loss", "perplexity", "loss minus that of log", f"loss at {shortest}")
    return Table("pilot", "Pilot", ("setting", "method", "trained at length"), columns, tuple(lines))


def at_training_length(records: Iterable[AnyRecord]) -> list[AnyRecord]:
    """The losses with full attention at the training length."""
    return [
        record
        for record in records
        if (record["kind"], record["mode"], record["length"]) == ("extrapolation", "full", record["train_length"])
        and record["loss"] is not None
    ]


def held_out_table(records: Sequence[AnyRecord]) -> Table | None:
    """The mean loss of each method on each corpus over the seeds, and its largest standard error over documents. None
    without records.
    """
    losses, errors = (measurements(records, "extrapolation", value) for value in ("loss", "stderr"))
    settings = sorted(losses.settings, key=lambda setting: corpus_rank(setting.corpus))
    lines = []
    for method in published("kerple-3").ordered(losses.methods):
        cells = []
        for setting in settings:
            length = setting.train_length or 0
            values, stderr = losses.values(setting, method, length), errors.values(setting, method, length)
            cells.append(NOT_MEASURED if values is None else format_mean(values))
            cells.append(NOT_MEASURED if stderr is None else f"{stderr.max():.3f}")
        lines.append(Row((display_name(method),), tuple(map(Cell, cells))))
    names = [corpus_name(setting.corpus) for setting in settings]
    columns = tuple(f"{name}, {text}" for name in names for text in ("loss", "standard error"))
    tokens = ", ".join(f"{count:,}" for count in sorted({record["tokens"] for record in records}))
    notes = (
        f"Mean ± standard deviation over the seeds, on {tokens} held-out tokens. The standard error is that over "
        "documents, the largest of all seeds.",
    )
    title = "Loss at the training length"
    return Table("training-length", title, ("method",), columns, tuple(lines), notes) if lines else None


def seed_table(records: Iterable[AnyRecord]) -> Table | None:
    """The standard deviation of the loss over the seeds in three parts of segments of the training length: the first
    sixteenth, up to the half, and the second half. None without methods that have two seeds.
    """
    losses: dict[Setting, dict[Method, dict[int | None, list[float]]]] = {}
    for record in records:
        length = record["train_length"]
        if record["kind"] != "positions" or record["mode"] != "full" or record["length"] != length:
            continue
        if record["losses"]:
            edges, values, counts = (np.array(record[key]) for key in ("edges", "losses", "counts"))
            parts = np.searchsorted([length // 16, length // 2], edges[:-1], side="right")
            if len(set(parts)) < 3:  # bins that are too wide
                continue
            means = [float(np.average(values[parts == part], weights=counts[parts == part])) for part in range(3)]
            losses.setdefault(setting_of(record), {}).setdefault(method_of(record), {})[record["seed"]] = means
    lines: list[Row | Section] = []
    for setting in sorted(losses, key=lambda setting: corpus_rank(setting.corpus)):
        several = [method for method, seeds in losses[setting].items() if len(seeds) > 1]
        lines += [Section(corpus_name(setting.corpus))] if several else []
        for method in published("kerple-3").ordered(several):
            seeds = list(losses[setting][method].values())
            cells = [str(len(seeds)), *(f"{statistics.stdev(part):.3f}" for part in zip(*seeds, strict=True))]
            lines.append(Row((display_name(method),), tuple(map(Cell, cells))))
    columns = ("seeds", "first 1/16", "up to 1/2", "second half")
    title = "Standard deviation of the loss over the seeds, by position in segments of the training length"
    return Table("seeds", title, ("method",), columns, tuple(lines)) if lines else None


def _run_name(record: AnyRecord) -> str:
    """The name of the run's folder, in which a sweep writes `checkpoints`."""
    return Path((record["checkpoint"] or {}).get("path") or "unknown/checkpoints").parent.name
