"""Training time per step, KERPLE's Table 4, from the logs of training runs."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.reporting.aggregate import AnyRecord, Method, method_of
from megatron.reporting.formatting import format_mean
from megatron.reporting.published import Published, corpus_name, load_published
from megatron.reporting.tables import Cell, Row, Section, Table
from megatron.reporting.training_log import seconds_per_step
from megatron.utils.errors import UserError
from megatron.utils.files import METRICS

if TYPE_CHECKING:
    from megatron.config import Config


@dataclass(frozen=True)
class StepTime:
    """The seconds per optimizer step of one training run. corpus: of the training. pos_emb: as in
    its records, with options and label. model: (layers, hidden size, sequence length).
    """

    corpus: str | None
    pos_emb: str
    seconds: float
    model: tuple[int, int, int]


def step_times(records: Iterable[AnyRecord], notes: list[str]) -> list[StepTime]:
    """The step times of all checkpoints named in extrapolation records whose training log still
    exists.

    The log is in the `log-dir` of the checkpoint's configuration, or in `logs` next to the
    checkpoint folder; only the lines of the run that saved the checkpoint are read.

    notes: gets a line for each folder that now has the checkpoint of another training, whose time
        is left out.
    """
    from megatron.checkpoint.configuration import checkpoint_config  # imports the model
    from megatron.checkpoint.directory import find_step, read_state_file
    from megatron.data.streams import evaluation_corpora
    from megatron.evaluation.text import corpus_name as name_of_corpora

    measured: dict[str, AnyRecord] = {}
    for record in records:
        path = (record.get("checkpoint") or {}).get("path")
        if path is not None and record["kind"] == "extrapolation":
            measured.setdefault(path, record)
    times = []
    for path, record in measured.items():
        try:
            step = find_step(path)
            config = checkpoint_config(step)
            run = read_state_file(step).get("training", {}).get("run", "")
            log = Path(path).parent / "logs" / METRICS
            if config.logging.log_dir:
                configured = Path(config.logging.log_dir) / METRICS
                if configured.is_file():
                    log = configured
            if not log.is_file():
                continue
        except (UserError, OSError):  # OSError: the path is too long
            continue
        # The folder may have been trained anew since the evaluation.
        if not _is_same_run(record, step, config):
            notes.append(
                f"No training time is shown for {path}: it was trained further or anew after the "
                "evaluation; evaluate it again."
            )
            continue
        seconds = seconds_per_step(log, run)
        if seconds is not None:
            model = (config.model.num_layers, config.model.hidden_size, config.model.seq_length)
            pos_emb = method_of(record).pos_emb
            # Of the training, which the evaluated text need not be.
            corpus = None
            with suppress(UserError):
                prefixes, _ = evaluation_corpora(config, "train")
                corpus = name_of_corpora(prefixes)
            times.append(StepTime(corpus, pos_emb, seconds, model))
    return times


def _is_same_run(record: AnyRecord, step: Path, config: "Config") -> bool:
    """Whether the checkpoint that was evaluated is of the same run as a later one: it is still
    there, or the seed and recipe are the same. True if the record does not tell.
    """
    from megatron.checkpoint.directory import find_step
    from megatron.checkpoint.manifest import weights_fingerprint
    from megatron.checkpoint.recipe import training_recipe

    checkpoint = record["checkpoint"]
    if checkpoint.get("fingerprint") is None:
        return True
    with suppress(UserError):
        evaluated = find_step(checkpoint["path"], checkpoint["iteration"])
        return weights_fingerprint(evaluated) == checkpoint["fingerprint"]
    if checkpoint.get("recipe") is None:
        return True
    recipe = training_recipe(step, config)
    return (record["seed"], checkpoint["recipe"]) == (config.training.seed, recipe)


def step_time_tables(times: Iterable[StepTime]) -> list[Table]:
    """A table per model size and length, with the published step times of the same size."""
    # Our times and the published ones, by model size and sequence length.
    by_model: dict[tuple[int, int, int], list[StepTime]] = {}
    for time in times:
        by_model.setdefault(time.model, []).append(time)
    papers: dict[tuple[int, ...], Published] = {}
    for published in (load_published("kerple-4"), load_published("dape-speed")):
        papers.setdefault((*published.model, published.train_length), published)

    # The paper also gives the order and the names of the methods.
    tables = []
    for (layers, hidden_size, length), group in by_model.items():
        paper = papers.get((layers, hidden_size, length))
        layout = paper or load_published("kerple-4")
        methods = layout.ordered(dict.fromkeys(Method(time.pos_emb) for time in group))
        lines: list[Row | Section] = []

        # A section per corpus: our times, then the published ones in their own unit.
        for corpus in dict.fromkeys(time.corpus for time in group):
            cells = []
            of_corpus = [time for time in group if time.corpus == corpus]
            for method in methods:
                ours = [time.seconds for time in of_corpus if time.pos_emb == method.pos_emb]
                cells.append(Cell(format_mean(ours or None)))
            lines += [Section(corpus_name(corpus)), Row(("sec/step",), tuple(cells))]
            if paper:
                texts = [paper.value(corpus, method, None) or "" for method in methods]
                unit = "sec/step"
                if paper.measure.startswith("milli"):
                    unit = "ms/step"
                if any(texts):
                    published_cells = tuple(map(Cell, texts))
                    lines.append(Row((f"{unit}, paper",), published_cells, published=True))

        # Say which rows are published.
        notes = [
            "Layout: KERPLE (arXiv 2205.09921), Table 4. Medians over the training logs. They are "
            "comparable only if the runs used the same hardware without other load."
        ]
        if paper and any(isinstance(line, Row) and line.published for line in lines):
            notes.append(f'Rows labeled "paper": {paper.source}.')
        table = Table(
            name=f"kerple-4-{layers}x{hidden_size}-{length}",
            title=f"Training time, {layers} layers of {hidden_size}, length {length}",
            label_columns=("",),
            columns=tuple(map(layout.name, methods)),
            lines=tuple(lines),
            notes=tuple(notes),
        )
        tables.append(table)
    return tables
