"""The figures in docs/results, and the generated blocks of its pages and of the project's README,
from `records/`.

records/NAME/SEED/results.jsonl has the records of the sweep NAME. records/recall.json is the
`chomsky.json` of recall.md. long-context.md has the records in ../long_context, and
retrofit.md those in ../retrofit.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from matplotlib.figure import Figure
from pandas import DataFrame

from experiments.analysis import (
    compare,
    comparison_table,
    costs,
    differences_by_length,
    in_context_scores,
    loss_frame,
    position_differences,
    recall_by_distance,
    training_progress,
)
from experiments.figures import (
    METHODS,
    RECALL_METHODS,
    cost_plot,
    long_context_plot,
    recall_plot,
)
from experiments.retrofit.results import (
    TITLES,
    read_models,
    retrofit_differences,
    retrofit_plot,
    retrofit_table,
)
from megatron.evaluation.records import RESULTS, Record, read_results
from megatron.reporting.aggregate import AnyRecord, Method, method_of, setting_of
from megatron.reporting.differences import Key, PairedLosses
from megatron.reporting.formatting import format_length
from megatron.reporting.published import corpus_name, corpus_sort_key, display_name
from megatron.reporting.style import SCREEN, Style, render
from megatron.reporting.tables import Cell, Row, Section, Table, markdown
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

RECORDS = Path(__file__).with_name("records")
SWEEPS, PILOT, MODES, DOCUMENTS = (
    ("c", "c-factor1", "prose", "latex"),
    "pilot",
    "modes",
    "documents",
)
TRAIN_LENGTH, LONGEST = 128, 8192
# SEED/POS_EMB/, with the logs of training.
LONG_CONTEXT = RECORDS.parents[1] / "long_context" / "records" / "main"
LONG_CONTEXT_BASELINES = "alibi", "rpe", "kerple_power_ap_", "rotary"
LONG_CONTEXT_TRAIN_LENGTH, LONG_CONTEXT_LONGEST = 512, 16384
RECALL_TRAIN_LENGTH = 64
NO_LOSS = "sinusoidal"  # its losses beyond the training length are meaningless
USED = 0.02  # nats: smaller gains from far text do not count
BLOCK = re.compile(r"(<!-- block (\S+): \S+ -->\n).*?(<!-- end -->)", re.DOTALL)


def add_results(folder: Path, records: Path = RECORDS) -> None:
    """Copy the records in a sweep's folder (or any other) to NAME/SEED/results.jsonl in `records`,
    where NAME is the name of the folder, with losses by document and position rounded to 5 digits.
    Raises UserError if there are none.
    """
    contents: dict[Path, bytes] = {}
    for record in read_results(folder):
        path = records / folder.resolve().name / str(record["seed"]) / RESULTS
        line = json.dumps(_compact(record), separators=(",", ":"))
        contents[path] = contents.get(path, b"") + f"{line}\n".encode()
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def _compact(record: Record) -> dict[str, object]:
    values = cast(dict[str, Any], {**record})
    if values.get("groups"):
        values["groups"] = {**values["groups"], "losses": _rounded(values["groups"]["losses"])}
    if values["kind"] == "positions":
        values["losses"] = _rounded(values["losses"])
    path = (values["checkpoint"] or {}).get("path")
    if path and Path(path).is_absolute():
        values["checkpoint"] = {**values["checkpoint"], "path": os.path.relpath(path)}
    return values


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def write_pages(root: Path) -> list[Path]:
    """Write the pages and figures, and return their paths. Raises UserError."""
    contents = {path: text.encode() for path, text in texts(root).items()} | figures(root)
    for path, content in contents.items():
        write_atomically(path, content)
    return list(contents)


def texts(root: Path) -> dict[Path, str]:
    """README.md and the pages in docs/results that have blocks, by path, with them filled in."""
    found = {}
    contents = blocks()

    def filled(match: re.Match[str]) -> str:
        return f"{match[1]}\n{contents[match[2]]}\n\n{match[3]}"

    # A page that names an unknown block is out of date.
    for path in [root / "README.md", *sorted((root / "docs" / "results").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        names = [match[2] for match in BLOCK.finditer(text)]
        if unknown := names - contents.keys():
            raise UserError(
                f"{path}: there is no block {', '.join(sorted(unknown))}; use {', '.join(contents)}"
            )
        if names:
            found[path] = BLOCK.sub(filled, text)
    return found


def figures(root: Path) -> dict[Path, bytes]:
    """The PNG files by path."""
    drawings: dict[str, Callable[[Style], Figure]] = {
        "cost": partial(cost_plot, costs([*_read(*SWEEPS), *_read_long_context()])),
        "recall": partial(recall_plot, _recall(), RECALL_TRAIN_LENGTH),
        "long-context": _draw_long_context,
        "retrofit": _draw_retrofit,
    }
    pictures = {}
    for name, draw in drawings.items():
        pictures[root / "docs" / "results" / f"{name}.png"] = render(draw, SCREEN)
    return pictures


def _draw_retrofit(style: Style) -> Figure:
    models = {TITLES[name]: losses for name, losses in read_models().items()}
    return retrofit_plot(models, style)


def _draw_long_context(style: Style) -> Figure:
    logs = {}
    for path in LONG_CONTEXT.rglob("metrics.jsonl"):
        logs[path.parent.name, int(path.parts[-3])] = path
    return long_context_plot(
        position_differences(_read_long_context(), LONG_CONTEXT_LONGEST),
        training_progress(logs, LONG_CONTEXT_TRAIN_LENGTH),
        LONG_CONTEXT_TRAIN_LENGTH,
        style,
    )


def blocks() -> dict[str, str]:
    """The content of each block by name."""
    records, long_context = _read(*SWEEPS), _read_long_context()
    comparisons = comparison_table(long_context, LONG_CONTEXT_BASELINES)
    by_length = differences_by_length(long_context, LONG_CONTEXT_BASELINES)
    found, scores = costs(records), in_context_scores(records)
    facts = [
        order_of_log_and_alibi(records),
        cost_of_far_text(found),
        use_of_far_text(found),
        score_and_loss(scores),
        best_of_pilot(_read(PILOT)),
        effect_of_masks(_read(DOCUMENTS)),
        best_modes(_read(MODES)),
    ]
    retrofit = {}
    for name, losses in read_models().items():
        retrofit[f"retrofit-{name}"] = retrofit_table(losses)
        retrofit[f"retrofit-{name}-differences"] = retrofit_differences(losses)
    return {
        **retrofit,
        "answer": _markdown(answer(long_context)),
        "comparisons": _markdown(comparison_table(records)),
        "facts": "\n".join(f"- {fact}" for fact in facts),
        "recall": _markdown(recall_table(_recall())),
        "long-context-losses": _markdown(loss_table(long_context)),
        "long-context-comparisons": _markdown(comparisons),
        "long-context-differences": _markdown(by_length),
    }


def answer(long_context: Sequence[AnyRecord]) -> Table:
    """The second experiment in four rows: the loss at the shortest and the longest length, and what
    far keys change.
    """
    losses = loss_frame(long_context)
    full = losses[losses["mode"] == "full"].groupby(["pos_emb", "length"])["value"].mean()
    changes = costs(long_context).groupby(["pos_emb", "length"])["cost"].mean()
    lines = []
    for pos_emb in ("kerple_log", "alibi", "rpe", "rotary"):
        near, far = full[pos_emb, LONG_CONTEXT_TRAIN_LENGTH], full[pos_emb, LONG_CONTEXT_LONGEST]
        change = changes[pos_emb, LONG_CONTEXT_LONGEST]
        cells = Cell(f"{near:.2f}"), Cell(f"{far:.2f}"), Cell(f"{change:+.2f}")
        lines.append(Row((display_name(Method(pos_emb)),), cells))
    lengths = map(format_length, (LONG_CONTEXT_TRAIN_LENGTH, LONG_CONTEXT_LONGEST))
    columns = (*lengths, "change by keys beyond 512")
    return Table("answer", "Answer", ("trained at 512 tokens, loss at",), columns, tuple(lines))


def order_of_log_and_alibi(records: Sequence[AnyRecord]) -> str:
    """In how many pairs of runs log is above ALiBi at the training length, by corpus."""
    counts = []
    for corpus in sorted({record["corpus"] for record in records}, key=corpus_sort_key):
        comparison = compare(records, corpus, "alibi", (1,))
        if comparison is not None:
            above = sum(difference > 0 for difference in comparison.by_seed)
            counts.append(f"{above} of {len(comparison.by_seed)} on {corpus_name(corpus)}")
    return f"Pairs of runs with log's loss above ALiBi's at 128 tokens: {', '.join(counts)}."


def cost_of_far_text(found: DataFrame) -> str:
    """The lowest and the highest cost of extrapolation of each method at the longest length."""
    by_method = found[found["length"] == LONGEST].groupby("pos_emb")["cost"]
    ranges = []
    for row in by_method.agg(["min", "max"]).sort_values("max").itertuples():
        ranges.append(f"{display_name(Method(row.Index))} {row.min:+.2f} to {row.max:+.2f}")
    return f"Cost of extrapolation at 8,192, all corpora and seeds: {', '.join(ranges)}."


def use_of_far_text(found: DataFrame) -> str:
    """Which runs use text beyond the training length."""
    found = found[found["pos_emb"] != NO_LOSS]
    used = found[found["cost"] < -USED]
    names = []
    for row in used.itertuples():
        name, corpus = display_name(Method(row.pos_emb)), corpus_name(row.corpus)
        names.append(f"{name} at {row.length:,} on {corpus}")
    return (
        f"The cost is below -{USED:g} in {len(used)} of {len(found)} pairs of run and length "
        f"(sinusoidal left out): {', '.join(names)}."
    )


def score_and_loss(scores: DataFrame) -> str:
    """How the in-context scores and losses of runs of one method vary together on C."""
    own = scores[(scores["corpus"] == "debian_c") & (scores["pos_emb"] != NO_LOSS)]
    within = own[["score", "loss"]] - own.groupby("pos_emb")[["score", "loss"]].transform("mean")
    return (
        "Correlation of in-context score and loss among the runs of one method on C: "
        f"{within.corr().iloc[0, 1]:.3f}."
    )


def best_of_pilot(records: Iterable[AnyRecord]) -> str:
    """The losses that speak against the selected settings, and the effect of the precision."""
    losses = {}
    for record in records:
        if record["kind"] == "extrapolation":
            losses[Path(record["checkpoint"]["path"]).parent.name] = record["loss"]
    of_log = {name: loss for name, loss in losses.items() if name.startswith("log")}
    best = min(of_log, key=of_log.__getitem__)
    return (
        f"Loss at 128 tokens in the pilot: {of_log[best]:.3f} with the best of {len(of_log)} "
        f"settings of log ({best}), {losses['alibi']:.3f} with ALiBi, "
        f"{losses['alibi-8heads']:.3f} with ALiBi and 8 heads. float32 instead of bfloat16 changes "
        f"log's by {losses['log-fp32'] - losses['log']:+.3f}, ALiBi's by "
        f"{losses['alibi-fp32'] - losses['alibi']:+.3f}."
    )


def effect_of_masks(records: Iterable[AnyRecord]) -> str:
    """The loss with document masks, and minus that without them, at the shortest and the longest
    length.
    """
    records = [record for record in records if record.get("groups") and record["mode"] == "full"]
    losses = PairedLosses(records)
    found = {(record["pos_emb"], record["length"]): record for record in records}

    # Training with masks is named "documents", without them "rows".
    effects = []
    for pos_emb, length in itertools.product(("kerple_log", "alibi"), (TRAIN_LENGTH, LONGEST)):
        masked, unmasked = (
            found[f"{pos_emb} (documents)", length],
            found[f"{pos_emb} (rows)", length],
        )
        difference = losses.text(_key(masked), _key(unmasked))
        name = display_name(Method(pos_emb))
        effects.append(f"{name} {masked['loss']:.3f} ({difference}) at {length:,}")
    return f"Loss with document masks (minus loss without them): {', '.join(effects)}."


def _key(record: AnyRecord) -> Key:
    """The cell of `PairedLosses` that a record is in."""
    return setting_of(record), method_of(record), record["length"]


def best_modes(records: Iterable[AnyRecord]) -> str:
    """Where an inference mode lowers the loss at the longest length, by how much the best one."""
    losses: dict[str, dict[str, float]] = {}
    for record in records:
        if record["length"] == LONGEST and record.get("loss") is not None:
            losses.setdefault(record["pos_emb"], {})[record["mode"]] = record["loss"]
    gains = []
    for pos_emb, by_mode in losses.items():
        best = min(by_mode, key=by_mode.__getitem__)
        change = by_mode[best] - by_mode["full"]
        if change < -USED:
            gains.append(f"{display_name(Method(pos_emb))} {change:+.2f} (`{best}`)")
    names = ", ".join(gains)
    return f"Loss with the best inference mode minus that with all keys, at 8,192: {names}."


def loss_table(records: Iterable[AnyRecord]) -> Table:
    """The mean loss over the seeds by method, mode and length."""
    frame = loss_frame(records)
    lengths = sorted(frame["length"].unique())
    lines = []
    for pos_emb, mode in itertools.product(METHODS, ("full", "window")):
        runs = frame[(frame["pos_emb"] == pos_emb) & (frame["mode"] == mode)]
        if runs.empty:
            continue
        means = runs.groupby("length")["value"].mean()
        keys = {"full": "all"}.get(mode, mode)
        labels = display_name(Method(pos_emb)), str(runs["seed"].nunique()), keys
        lines.append(Row(labels, tuple(Cell(f"{means[length]:.3f}") for length in lengths)))
    columns = tuple(map(format_length, lengths))
    return Table("losses", "Losses", ("method", "seeds", "keys"), columns, tuple(lines))


def recall_table(frame: DataFrame) -> Table:
    """The recall of each method by distance in percent: mean, lowest and highest of the seeds."""
    distances = sorted(frame[frame["distance"] >= RECALL_TRAIN_LENGTH // 2]["distance"].unique())
    lines = []
    for pos_emb in RECALL_METHODS:
        runs = frame[frame["pos_emb"] == pos_emb]
        if runs.empty:
            continue

        # The accuracy at the training length, then the recall by distance.
        columns = [runs.groupby("seed")["trained"].first()]
        columns += [runs[runs["distance"] == distance]["recall"] for distance in distances]
        cells = []
        for column in columns:
            percent = 100 * column
            cells.append(Cell(f"{percent.mean():.1f} ({percent.min():.0f}–{percent.max():.0f})"))
        labels = display_name(Method(pos_emb)), str(runs["seed"].nunique())
        lines.append(Row(labels, tuple(cells)))
    headers = ("accuracy at 64", *(f"{distance:,}–{2 * distance - 1:,}" for distance in distances))
    return Table("recall", "Recall by distance", ("method", "seeds"), headers, tuple(lines))


def _markdown(table: Table) -> str:
    """The table without heading, notes, and marks of the best and of significant values."""
    lines: list[Row | Section] = []
    for line in table.lines:
        if isinstance(line, Row):
            line = replace(line, cells=tuple(Cell(cell.text) for cell in line.cells))
        lines.append(line)
    _, _, text = markdown(replace(table, lines=tuple(lines), notes=())).partition("\n\n")
    return text.rstrip()


def _recall() -> DataFrame:
    return recall_by_distance(json.loads((RECORDS / "recall.json").read_text(encoding="utf-8")))


def _read(*names: str) -> list[AnyRecord]:
    return [*read_results([RECORDS / name for name in names])]


def _read_long_context() -> list[AnyRecord]:
    """The records of the second experiment, with the corpus named as in the first one, which had no
    test split.
    """
    return [{**record, "corpus": "debian_c"} for record in read_results(LONG_CONTEXT)]
