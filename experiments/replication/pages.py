"""The figures in docs/results, and the generated blocks of its pages and of the project's README,
from `records/`.

records/NAME/SEED/results.jsonl has the records of the sweep NAME. records/recall.json is the
`chomsky.json` of recall.md. long-context.md has the records in ../long_context, bytes.md those in
../bytes, and retrofit.md those in ../retrofit.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame

from experiments.analysis import (
    BEYOND,
    Records,
    compare,
    comparison_table,
    costs,
    differences_by_length,
    in_context_scores,
    loss_frame,
    method_name,
    position_differences,
    recall_by_distance,
    text_row,
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
    retrofit_steps,
    retrofit_table,
)
from megatron.evaluation.records import RESULTS, Record, read_results
from megatron.reporting.aggregate import AnyRecord, method_of, setting_of
from megatron.reporting.differences import Key, PairedLosses
from megatron.reporting.formatting import format_length
from megatron.reporting.published import corpus_name, corpus_sort_key
from megatron.reporting.style import SCREEN, Style, render
from megatron.reporting.tables import Table, markdown
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

RECORDS = Path(__file__).with_name("records")
SWEEPS = ("c", "c-factor1", "prose", "latex")
TRAIN_LENGTH, LONGEST = 128, 8192
PLANNED_BASELINES = "alibi", "rpe", "kerple_power_ap_", "rotary"
OTHERS = "kerple_log_steep", "dape_kerple", "fire", "none"  # of the experiment on bytes
RANGES = "alibi", "kerple_log", "kerple_log_steep"
RECALL_TRAIN_LENGTH = 64
NO_LOSS = "sinusoidal"  # its losses beyond the training length are meaningless
USED = 0.02  # nats: smaller gains from far text do not count
BLOCK = re.compile(r"(<!-- block (\S+): \S+ -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Experiment:
    """One of those that were planned before their first run: log and PLANNED_BASELINES on C.

    Attributes:
        folder: with SEED/POS_EMB/, the records of evaluation and training.
        train_length, longest: the shortest and the longest tested length.
    """

    folder: Path
    train_length: int
    longest: int

    def records(self) -> Records:
        """The corpus is named as in the first experiment, which had no test split and no bytes."""
        return [{**record, "corpus": "debian_c"} for record in read_results(self.folder)]

    def draw(self, style: Style) -> Figure:
        """The figure of its page."""
        logs = {}
        for path in self.folder.rglob("metrics.jsonl"):
            seed, pos_emb = path.parts[-3:-1]
            logs[pos_emb, int(seed)] = path
        differences = position_differences(self.records(), self.longest)
        progress = training_progress(logs, self.train_length)
        return long_context_plot(differences, progress, self.train_length, style)


EXPERIMENTS = RECORDS.parents[1]
LONG_CONTEXT = Experiment(EXPERIMENTS / "long_context" / "records" / "main", 512, 16384)
BYTES = Experiment(EXPERIMENTS / "bytes" / "records" / "main", 256, 8192)
# How its models are trained -> those models, log and ALiBi only except in the first line.
LONGER_AND_WIDER = {
    "3,000 steps, width 96": BYTES,
    "12,000 steps": Experiment(EXPERIMENTS / "bytes" / "records" / "longer", 256, 8192),
    "width 192": Experiment(EXPERIMENTS / "bytes" / "records" / "wider", 256, 8192),
}
# By the names of their pages.
PLANNED = {"long-context": LONG_CONTEXT, "bytes": BYTES}


def add_results(folder: Path, records: Path = RECORDS) -> None:
    """Copy the records in a sweep's folder (or any other) to NAME/SEED/results.jsonl in `records`,
    where NAME is the name of the folder, with losses by document and position rounded to 5 digits.
    Raises UserError if there are none.
    """
    # A file per seed.
    contents: dict[Path, bytes] = {}
    target = records / folder.resolve().name
    for record in read_results(folder):
        path = target / str(record["seed"]) / RESULTS
        line = json.dumps(_compact(record), separators=(",", ":"))
        contents[path] = contents.get(path, b"") + f"{line}\n".encode()
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def _compact(record: Record) -> dict[str, object]:
    """The record with rounded losses, and with a relative path of its checkpoint."""
    values: dict[str, Any] = {**record}
    groups, checkpoint = values.get("groups"), values["checkpoint"]
    if groups:
        values["groups"] = {**groups, "losses": _rounded(groups["losses"])}
    if values["kind"] == "positions":
        values["losses"] = _rounded(values["losses"])
    path = (checkpoint or {}).get("path")
    if path and Path(path).is_absolute():
        values["checkpoint"] = {**checkpoint, "path": os.path.relpath(path)}
    return values


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def write_pages(root: Path) -> list[Path]:
    """Write the pages and figures, and return their paths. Raises UserError."""
    contents = {path: text.encode() for path, text in texts(root).items()}
    contents |= figures(root)
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
    pages = sorted((root / "docs" / "results").glob("*.md"))
    for path in [root / "README.md", *pages]:
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
    every_record = [*_read(*SWEEPS), *LONG_CONTEXT.records()]
    retrofits = read_models()
    models = {title: retrofits[name] for name, title in TITLES.items()}
    drawings: dict[str, Callable[[Style], Figure]] = {
        "cost": partial(cost_plot, costs(every_record)),
        "recall": partial(recall_plot, _recall(), RECALL_TRAIN_LENGTH),
        "retrofit": partial(retrofit_plot, models),
    }
    for name, experiment in PLANNED.items():
        drawings[name] = experiment.draw
    folder = root / "docs" / "results"
    pictures = {}
    for name, draw in drawings.items():
        pictures[folder / f"{name}.png"] = render(draw, SCREEN)
    return pictures


def blocks() -> dict[str, str]:
    """The content of each block by name."""
    records = _read(*SWEEPS)
    found, scores = costs(records), in_context_scores(records)
    facts = [
        order_of_log_and_alibi(records),
        cost_of_far_text(found),
        use_of_far_text(found),
        score_and_loss(scores),
        best_of_pilot(_read("pilot")),
        effect_of_masks(_read("documents")),
        best_modes(_read("modes")),
    ]
    tables = {
        "answer": answer(LONG_CONTEXT),
        "comparisons": comparison_table(records),
        "recall": recall_table(_recall()),
        "bytes-ranges": range_table(BYTES.records()),
        "bytes-order": order_table(LONGER_AND_WIDER),
    }
    for name, experiment in PLANNED.items():
        planned = experiment.records()
        measured = {record["pos_emb"] for record in planned}
        others = [pos_emb for pos_emb in OTHERS if pos_emb in measured]
        baselines = [*PLANNED_BASELINES, *others]
        tables[f"{name}-losses"] = loss_table(planned)
        tables[f"{name}-comparisons"] = comparison_table(planned, PLANNED_BASELINES)
        tables[f"{name}-differences"] = differences_by_length(planned, baselines)
    contents = {name: _markdown(table) for name, table in tables.items()}
    contents["facts"] = "\n".join(f"- {fact}" for fact in facts)

    # The retrofit, which has losses only.
    for name, losses in read_models().items():
        contents[f"retrofit-{name}"] = retrofit_table(losses)
        contents[f"retrofit-{name}-steps"] = retrofit_steps(losses)
        contents[f"retrofit-{name}-differences"] = retrofit_differences(losses)
    return contents


def answer(experiment: Experiment) -> Table:
    """An experiment in four rows: the loss at the shortest and the longest length, and what far
    keys change.
    """
    # The means over the seeds.
    records = experiment.records()
    losses = loss_frame(records)
    full = losses[losses["mode"] == "full"].groupby(["pos_emb", "length"])["value"].mean()
    changes = costs(records).groupby(["pos_emb", "length"])["cost"].mean()
    shortest, longest = experiment.train_length, experiment.longest
    lines = []
    for pos_emb in ("kerple_log", "alibi", "rpe", "rotary"):
        near, far = full[pos_emb, shortest], full[pos_emb, longest]
        change = changes[pos_emb, longest]
        cells = f"{near:.2f}", f"{far:.2f}", f"{change:+.2f}"
        lines.append(text_row((method_name(pos_emb),), cells))
    columns = (
        format_length(shortest),
        format_length(longest),
        f"change by keys beyond {shortest:,}",
    )
    labels = (f"trained at {shortest:,} tokens, loss at",)
    return Table("answer", "Answer", labels, columns, tuple(lines))


def order_table(experiments: Mapping[str, Experiment]) -> Table:
    """Log minus ALiBi at the training length and beyond it, with its interval from two seeds on, a
    row per experiment that has runs of both.
    """
    lines = []
    for title, experiment in experiments.items():
        if not experiment.folder.exists():
            continue
        records = experiment.records()
        near = compare(records, "debian_c", "alibi", (1,))
        far = compare(records, "debian_c", "alibi", BEYOND)
        if near is None or far is None:
            continue
        cells = []
        for comparison in (near, far):
            text = f"{comparison.mean:+.3f}"
            if len(comparison.by_seed) > 1:
                low, high = comparison.interval
                text += f" [{low:+.3f}, {high:+.3f}]"
            cells.append(text)
        lines.append(text_row((title, str(len(far.by_seed))), cells))
    columns = ("1×", "4-32×")
    return Table("order", "Log minus ALiBi", ("training", "seeds"), columns, tuple(lines))


def order_of_log_and_alibi(records: Records) -> str:
    """In how many pairs of runs log is above ALiBi at the training length, by corpus."""
    corpora = {record["corpus"] for record in records}
    counts = []
    for corpus in sorted(corpora, key=corpus_sort_key):
        comparison = compare(records, corpus, "alibi", (1,))
        if comparison is not None:
            pairs = comparison.by_seed
            above = sum(difference > 0 for difference in pairs)
            counts.append(f"{above} of {len(pairs)} on {corpus_name(corpus)}")
    return f"Pairs of runs with log's loss above ALiBi's at 128 tokens: {', '.join(counts)}."


def cost_of_far_text(found: DataFrame) -> str:
    """The lowest and the highest cost of extrapolation of each method at the longest length."""
    by_method = found[found["length"] == LONGEST].groupby("pos_emb")["cost"]
    extremes = by_method.agg(["min", "max"]).sort_values("max")
    ranges = []
    for row in extremes.itertuples():
        ranges.append(f"{method_name(row.Index)} {row.min:+.2f} to {row.max:+.2f}")
    return f"Cost of extrapolation at 8,192, all corpora and seeds: {', '.join(ranges)}."


def use_of_far_text(found: DataFrame) -> str:
    """Which runs use text beyond the training length."""
    found = found[found["pos_emb"] != NO_LOSS]
    used = found[found["cost"] < -USED]
    names = []
    for row in used.itertuples():
        name, corpus = method_name(row.pos_emb), corpus_name(row.corpus)
        names.append(f"{name} at {row.length:,} on {corpus}")
    return (
        f"The cost is below -{USED:g} in {len(used)} of {len(found)} pairs of run and length "
        f"(sinusoidal left out): {', '.join(names)}."
    )


def score_and_loss(scores: DataFrame) -> str:
    """How the in-context scores and losses of runs of one method vary together on C."""
    on_c, has_loss = scores["corpus"] == "debian_c", scores["pos_emb"] != NO_LOSS
    own = scores[on_c & has_loss]

    # What is left of a run without the mean of its method.
    columns = ["score", "loss"]
    means = own.groupby("pos_emb")[columns].transform("mean")
    correlations = (own[columns] - means).corr()
    return (
        "Correlation of in-context score and loss among the runs of one method on C: "
        f"{correlations.loc['score', 'loss']:.3f}."
    )


def best_of_pilot(records: Records) -> str:
    """The losses that speak against the selected settings, and the effect of the precision."""
    losses = {}
    for record in records:
        if record["kind"] == "extrapolation":
            path = Path(record["checkpoint"]["path"])
            losses[path.parent.name] = record["loss"]
    of_log = [name for name in losses if name.startswith("log")]
    best = min(of_log, key=losses.__getitem__)
    return (
        f"Loss at 128 tokens in the pilot: {losses[best]:.3f} with the best of {len(of_log)} "
        f"settings of log ({best}), {losses['alibi']:.3f} with ALiBi, "
        f"{losses['alibi-8heads']:.3f} with ALiBi and 8 heads. float32 instead of bfloat16 changes "
        f"log's by {losses['log-fp32'] - losses['log']:+.3f}, ALiBi's by "
        f"{losses['alibi-fp32'] - losses['alibi']:+.3f}."
    )


def effect_of_masks(records: Records) -> str:
    """The loss with document masks, and minus that without them, at the shortest and the longest
    length.
    """
    records = [record for record in records if record.get("groups") and record["mode"] == "full"]
    losses = PairedLosses(records)
    found = {(record["pos_emb"], record["length"]): record for record in records}

    # Training with masks is named "documents", without them "rows".
    effects = []
    for pos_emb, length in itertools.product(("kerple_log", "alibi"), (TRAIN_LENGTH, LONGEST)):
        masked = found[f"{pos_emb} (documents)", length]
        unmasked = found[f"{pos_emb} (rows)", length]
        difference = losses.text(_key(masked), _key(unmasked))
        name = method_name(pos_emb)
        effects.append(f"{name} {masked['loss']:.3f} ({difference}) at {length:,}")
    return f"Loss with document masks (minus loss without them): {', '.join(effects)}."


def _key(record: AnyRecord) -> Key:
    """The cell of `PairedLosses` that a record is in."""
    return setting_of(record), method_of(record), record["length"]


def best_modes(records: Records) -> str:
    """Where an inference mode lowers the loss at the longest length, by how much the best one."""
    # Method -> mode -> loss.
    losses: dict[str, dict[str, float]] = {}
    for record in records:
        if record["length"] == LONGEST and record.get("loss") is not None:
            by_mode = losses.setdefault(record["pos_emb"], {})
            by_mode[record["mode"]] = record["loss"]
    gains = []
    for pos_emb, by_mode in losses.items():
        best = min(by_mode, key=by_mode.__getitem__)
        change = by_mode[best] - by_mode["full"]
        if change < -USED:
            gains.append(f"{method_name(pos_emb)} {change:+.2f} (`{best}`)")
    names = ", ".join(gains)
    return f"Loss with the best inference mode minus that with all keys, at 8,192: {names}."


def loss_table(records: Records) -> Table:
    """The mean loss over the seeds by method, mode and length."""
    frame = loss_frame(records)
    lengths = sorted(frame["length"].unique())
    lines = []
    for pos_emb, mode in itertools.product((*METHODS, *OTHERS), ("full", "window")):
        # Some methods have no records.
        runs = frame[frame["pos_emb"] == pos_emb]
        runs = runs[runs["mode"] == mode]
        if runs.empty:
            continue
        keys = mode
        if mode == "full":
            keys = "all"
        means = runs.groupby("length")["value"].mean()
        cells = [f"{means[length]:.3f}" for length in lengths]
        lines.append(text_row((*_labels(pos_emb, runs), keys), cells))
    columns = tuple(map(format_length, lengths))
    return Table("losses", "Losses", ("method", "seeds", "keys"), columns, tuple(lines))


def range_table(records: Records) -> Table:
    """How far each head of each run sees, in order: the smallest distance with a bias below -2
    (KERPLE, Figure 6). ALiBi's are those of every seed.
    """
    ranges: dict[tuple[str, ...], Sequence[int]] = {}
    for record in records:
        if record["kind"] != "effective_length" or record["pos_emb"] not in RANGES:
            continue
        seed = str(record["seed"])
        if record["pos_emb"] == "alibi":
            seed = "all"
        (by_head,) = record["effective_lengths"]
        ranges[method_name(record["pos_emb"]), seed] = sorted(by_head)
    lines = []
    for labels in sorted(ranges):
        cells = [format_length(length) for length in ranges[labels]]
        lines.append(text_row(labels, cells))
    heads = max(map(len, ranges.values()))
    columns = tuple(f"head {number + 1}" for number in range(heads))
    return Table("ranges", "Ranges", ("method", "seed"), columns, tuple(lines))


def _labels(pos_emb: str, runs: DataFrame) -> tuple[str, str]:
    """The name of a method, and the number of its seeds."""
    return method_name(pos_emb), str(runs["seed"].nunique())


def recall_table(frame: DataFrame) -> Table:
    """The recall of each method by distance in percent: mean, lowest and highest of the seeds."""
    far = frame[frame["distance"] >= RECALL_TRAIN_LENGTH // 2]
    distances = sorted(far["distance"].unique())
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
            cells.append(f"{percent.mean():.1f} ({percent.min():.0f}–{percent.max():.0f})")
        lines.append(text_row(_labels(pos_emb, runs), cells))

    # The distances of a bin, which ends before the next power of 2.
    headers = ["accuracy at 64"]
    for distance in distances:
        headers.append(f"{distance:,}–{2 * distance - 1:,}")
    labels = ("method", "seeds")
    return Table("recall", "Recall by distance", labels, tuple(headers), tuple(lines))


def _markdown(table: Table) -> str:
    """The table without its heading, which is the first paragraph."""
    _, _, text = markdown(table).partition("\n\n")
    return text.rstrip()


def _recall() -> DataFrame:
    text = (RECORDS / "recall.json").read_text(encoding="utf-8")
    return recall_by_distance(json.loads(text))


def _read(*names: str) -> Records:
    folders = [RECORDS / name for name in names]
    return [*read_results(folders)]
