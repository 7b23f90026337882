"""The figures in docs/results, and the generated blocks of its pages and of the project's README,
from `records/`.

records/NAME/SEED/results.jsonl has the records of the sweep NAME. Those of the pilot are in
pilot.md, those of `modes` in modes.md, and those of `documents` in context.md. records/recall.json
is the `chomsky.json` of recall.md. long-context.md has the records in ../long_context.
"""

import itertools
import json
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from matplotlib.figure import Figure
from pandas import DataFrame

from experiments.analysis import (
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
    effective_length_plot,
    long_context_plot,
    position_plot,
    recall_plot,
    score_plot,
)
from megatron.evaluation.records import RESULTS, Record, read_results
from megatron.reporting.aggregate import AnyRecord, Method, method_of, setting_of
from megatron.reporting.differences import Key, PairedLosses
from megatron.reporting.formatting import NOT_MEASURED, format_length, format_number
from megatron.reporting.modes import mode_figures, mode_tables
from megatron.reporting.paper_tables import difference_tables, perplexity_tables, resolution_tables
from megatron.reporting.published import corpus_name, corpus_sort_key, display_name, load_published
from megatron.reporting.style import SCREEN, Style, render
from megatron.reporting.tables import Cell, Row, Section, Table, escape_markdown, markdown
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
    records = _read(*SWEEPS)
    scores = in_context_scores(records)
    (modes,) = mode_figures(_read(MODES))
    by_position = position_differences(records, LONGEST)
    drawings: dict[str, Callable[[Style], Figure]] = {
        "cost": partial(cost_plot, costs(records), TRAIN_LENGTH),
        "positions": partial(position_plot, by_position, TRAIN_LENGTH),
        "in-context": partial(score_plot, scores[scores["pos_emb"] != NO_LOSS]),
        "effective-lengths": partial(effective_length_plot, records),
        "modes": modes.draw,
        "recall": partial(recall_plot, _recall(), RECALL_TRAIN_LENGTH),
        "long-context": _draw_long_context,
    }

    # The heat maps are wider.
    styles = {"modes": replace(SCREEN, width=7.1, dpi=170)}
    pictures = {}
    for name, draw in drawings.items():
        path = root / "docs" / "results" / f"{name}.png"
        pictures[path] = render(draw, styles.get(name, SCREEN))
    return pictures


def _draw_long_context(style: Style) -> Figure:
    records = _read_long_context()
    logs = {}
    for path in LONG_CONTEXT.rglob("metrics.jsonl"):
        logs[path.parent.name, int(path.parts[-3])] = path
    return long_context_plot(
        costs(records),
        position_differences(records, LONG_CONTEXT_LONGEST),
        training_progress(logs, LONG_CONTEXT_TRAIN_LENGTH),
        LONG_CONTEXT_TRAIN_LENGTH,
        style,
    )


def blocks() -> dict[str, str]:
    """The content of each block by name."""
    # The records of both experiments.
    records, long_context = _read(*SWEEPS), _read_long_context()
    everything = [*_read(*SWEEPS, PILOT, MODES, DOCUMENTS), *long_context]
    full = [record for record in records if record["mode"] == "full"]
    found = costs(records)
    differences = []
    for table in difference_tables(full):
        corpus = table.title.split(", ")[1]
        differences.append(f"{corpus}:\n\n{_markdown(table)}")
    comparisons = comparison_table(long_context, LONG_CONTEXT_BASELINES)
    by_length = differences_by_length(long_context, LONG_CONTEXT_BASELINES)
    return {
        "answer": _markdown(answer(long_context)),
        "comparisons": _markdown(comparison_table(records)),
        "costs": _markdown(cost_table(found)),
        "context": context_facts(found, in_context_scores(records)),
        "documents": _markdown(documents_table(_read(DOCUMENTS))),
        "perplexities": _markdown(perplexity_tables(full)[0]),
        "differences": "\n\n".join(differences),
        "resolutions": _markdown(resolution_tables(full)[0]),
        "environments": "\n".join(environments(everything)),
        "pilot": _markdown(pilot_table(_read(PILOT))),
        "recall": _markdown(recall_table(_recall())),
        "modes": _markdown(grouped(mode_tables(_read(MODES))[0])),
        "long-context-losses": _markdown(loss_table(long_context)),
        "long-context-comparisons": _markdown(comparisons),
        "long-context-differences": _markdown(by_length),
    }


def cost_table(found: DataFrame) -> Table:
    """The mean cost of extrapolation over the seeds, with its standard deviation."""
    # A column per corpus and length.
    columns = found[["corpus", "length"]].drop_duplicates().itertuples(index=False)
    keys = sorted(map(tuple, columns), key=lambda key: (corpus_sort_key(key[0]), key[1]))
    values = found.groupby(["pos_emb", "corpus", "length"])["cost"].agg(["mean", "std"])
    lines = []
    for method in load_published("kerple-3").ordered(map(Method, found["pos_emb"].unique())):
        cells = []
        for corpus, length in keys:
            key, text = (method.pos_emb, corpus, length), NOT_MEASURED
            if key in values.index:
                text = "{:+.3f} ± {:.3f}".format(*values.loc[key])
            cells.append(Cell(text))
        lines.append(Row((display_name(method),), tuple(cells)))
    headers = tuple(f"{corpus_name(corpus)}, {length:,}" for corpus, length in keys)
    return Table("costs", "Cost of extrapolation", ("method",), headers, tuple(lines))


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


def context_facts(found: DataFrame, scores: DataFrame) -> str:
    """How many runs use far text, and how in-context scores and losses vary together on C."""
    found = found[found["pos_emb"] != NO_LOSS]
    used = found[found["cost"] < -USED]
    names = []
    for row in used.itertuples():
        name, corpus = display_name(Method(row.pos_emb)), corpus_name(row.corpus)
        names.append(f"{name} at {row.length:,} on {corpus}")

    # The variation of runs of one method.
    own = scores[(scores["corpus"] == "debian_c") & (scores["pos_emb"] != NO_LOSS)]
    within = own[["score", "loss"]] - own.groupby("pos_emb")[["score", "loss"]].transform("mean")
    return (
        f"- All keys lower the loss by more than {USED:g} nats in {len(used)} of {len(found)} "
        f"pairs of run and length (sinusoidal left out): {', '.join(names)}.\n"
        "- On C, the correlation of score and loss among the runs of one method is "
        f"{within.corr().iloc[0, 1]:.3f}."
    )


def pilot_table(records: Iterable[AnyRecord]) -> Table:
    """The loss of each setting, and its difference from that of log with factor 1."""
    records = [record for record in records if record["kind"] == "extrapolation"]
    losses = PairedLosses(records)
    (base,) = [record for record in records if record["pos_emb"] == "kerple_log (log)"]
    lines = []
    for record in sorted(records, key=lambda record: record["loss"]):
        loss = f"{record['loss']:.4f} ± {record['stderr']:.4f}"
        difference = ""
        if record is not base:
            difference = losses.text(_key(record), _key(base))
        texts = loss, format_number(record["perplexity"]), difference
        name = Path(record["checkpoint"]["path"]).parent.name
        lines.append(Row((name,), tuple(map(Cell, texts))))
    columns = ("loss", "perplexity", "minus `log`")
    return Table("pilot", "Pilot", ("setting",), columns, tuple(lines))


def _key(record: AnyRecord) -> Key:
    """The cell of `PairedLosses` that a record is in."""
    return setting_of(record), method_of(record), record["length"]


def documents_table(records: Iterable[AnyRecord]) -> Table:
    """The losses with and without document masks by mode and length, and their differences."""
    # The records of all seeds, by method, mode and length.
    records = [record for record in records if record["kind"] == "extrapolation"]
    losses = PairedLosses(records)
    by_key: dict[tuple[str, str, int], list[AnyRecord]] = {}
    for record in records:
        by_key.setdefault((record["pos_emb"], record["mode"], record["length"]), []).append(record)

    # Three rows per method and mode.
    lengths = sorted({record["length"] for record in records})
    lines: list[Row | Section] = []
    modes = ("full", f"window@{TRAIN_LENGTH}")
    for pos_emb, mode in itertools.product(("kerple_log", "alibi"), modes):
        masked, unmasked, differences = [], [], []
        for length in lengths:
            documents = by_key[f"{pos_emb} (documents)", mode, length]
            rows = by_key[f"{pos_emb} (rows)", mode, length]
            masked.append(_mean_loss(documents))
            unmasked.append(_mean_loss(rows))
            differences.append(Cell(losses.text(_key(documents[0]), _key(rows[0]))))
        lines.append(Section(display_name(Method(pos_emb, mode))))
        lines.append(Row(("masks",), tuple(masked)))
        lines.append(Row(("no masks",), tuple(unmasked)))
        lines.append(Row(("difference",), tuple(differences)))
    columns = tuple(map(format_length, lengths))
    return Table("documents", "Document masks", ("training",), columns, tuple(lines))


def _mean_loss(records: Iterable[AnyRecord]) -> Cell:
    mean = statistics.fmean(record["loss"] for record in records)
    return Cell(f"{mean:.3f}")


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


def grouped(table: Table) -> Table:
    """The table with each first label as a heading above its rows, instead of in every row."""
    lines: list[Row | Section] = []
    label = None
    for line in table.lines:
        assert isinstance(line, Row)
        if line.labels[0] != label:
            label = line.labels[0]
            lines.append(Section(label))
        lines.append(replace(line, labels=line.labels[1:]))
    return replace(table, label_columns=table.label_columns[1:], lines=tuple(lines))


def environments(records: Iterable[AnyRecord]) -> list[str]:
    """The machines and versions that measured the records, each with its commits."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        if entry := record["environment"]:
            commit, dash, suffix = entry["commit"].partition("-")
            place = f"{entry['machine']}, {entry['versions']}"
            found.setdefault(place, {})[commit[:8] + dash + suffix] = None
    lines = []
    for place, commits in found.items():
        lines.append(escape_markdown(f"- {place}: {', '.join(commits)}"))
    return lines


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
