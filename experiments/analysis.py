"""What the experiments compare: losses of methods on the same text, run by run. The words `agrees`,
`disagrees` and `too imprecise` are defined in experiments/long_context/README.md.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame
from scipy.stats import t as t_distribution

from megatron.evaluation.statistics import standard_error
from megatron.reporting.aggregate import AnyRecord, Method, measurements
from megatron.reporting.formatting import NOT_MEASURED, format_length
from megatron.reporting.published import corpus_name, corpus_sort_key, display_name, load_published
from megatron.reporting.tables import Cell, Row, Table
from megatron.utils.errors import UserError

LOG = "kerple_log"
BASELINES = ("alibi", "rpe", "kerple_power_ap_", "rotary", "sinusoidal")
BEYOND = (4, 8, 16, 32)  # multiples of the training length: those of the paper, without 2
MARGIN = 0.02  # nats per token
PAPER_CORPORA = {
    "debian_c": "github",
    "debian_prose": "openwebtext2",
    "debian_latex": "arxiv",
}
# The positions with little context, see megatron.training.validation.in_context_score.
IN_CONTEXT = (8, 32)
Records = Sequence[AnyRecord]
# Method and seed -> multiple of the training length -> the record.
Runs = dict[tuple[str, int], dict[int, AnyRecord]]


@dataclass(frozen=True)
class Comparison:
    """The loss of log minus that of a baseline on one corpus, in nats per token.

    Attributes:
        by_seed: the difference of each pair of runs with the same seed.
        documents: the squared standard error of the mean over documents.
        paper: the paper's difference on the corpus that this one replaces; NaN if it has none.
    """

    by_seed: tuple[float, ...]
    documents: float
    paper: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed)

    @property
    def stderr(self) -> float:
        """The standard error of the mean. Its variance is the sum of those over seeds and over
        documents, as in Clark's min F' (1973); with one seed, that over documents.
        """
        variance = self.documents
        seeds = len(self.by_seed)
        if seeds > 1:
            variance += statistics.variance(self.by_seed) / seeds
        return math.sqrt(variance)

    @property
    def interval(self) -> tuple[float, float]:
        """Student's 95 % interval, with the degrees of freedom of the seeds; at least two are
        needed.
        """
        quantile = float(t_distribution.ppf(0.975, len(self.by_seed) - 1))
        width = quantile * self.stderr
        return self.mean - width, self.mean + width

    @property
    def word(self) -> str:
        """Whether the paper's result is seen here: agrees, disagrees or too imprecise."""
        low, high = self.interval
        within = low >= -MARGIN and high <= MARGIN

        # If the paper's difference is small, ours must be too. If not, ours must be on the same
        # side of 0, and not small.
        if abs(self.paper) < MARGIN:
            agrees = within
            disagrees = low > MARGIN or high < -MARGIN
        else:
            if self.paper < 0:
                low, high = -high, -low
            agrees = low > 0 and abs(self.mean) >= MARGIN
            disagrees = high < 0 or within
        if agrees:
            return "agrees"
        if disagrees:
            return "disagrees"
        return "too imprecise"


def compare(
    records: Records, corpus: str, baseline: str, multiples: Sequence[int]
) -> Comparison | None:
    """Log minus the baseline with full attention, the mean over lengths that are these multiples of
    the training length. None without a seed that both methods have at every length.

    Raises UserError if two runs have the same method and seed, if a run has no loss, or if the runs
    have other tokens, models or numbers of steps than each other.
    """
    # Pairs of runs with the same seed.
    runs = _complete_runs(records, corpus, (LOG, baseline), multiples)
    seeds = sorted(seed for method, seed in runs if method == LOG and (baseline, seed) in runs)
    if not seeds:
        return None

    # The difference of each pair of runs, and its mean over pairs and lengths for each document.
    by_seed, by_document = [], []
    first = runs[LOG, seeds[0]][multiples[0]]
    for seed in seeds:
        logs, others = runs[LOG, seed], runs[baseline, seed]
        differences = []
        for multiple in multiples:
            log, other = logs[multiple], others[multiple]
            _check_conditions(log, first)
            _check_conditions(other, first)
            differences.append(log["loss"] - other["loss"])
            by_document.append(np.subtract(log["groups"]["losses"], other["groups"]["losses"]))
        by_seed.append(statistics.fmean(differences))
    tokens = np.array(first["groups"]["tokens"])
    of_documents = np.mean(by_document, axis=0) * tokens
    error = standard_error(of_documents, tokens) or 0.0
    return Comparison(tuple(by_seed), error**2, paper_difference(corpus, baseline, multiples))


def _complete_runs(
    records: Records, corpus: str, methods: Sequence[str], multiples: Sequence[int]
) -> Runs:
    """The runs of these methods that have all multiples. Raises UserError as `compare`."""
    runs: Runs = {}
    for record in records:
        # Losses of these methods with full attention, at these lengths.
        kind = record["kind"], record["mode"], record["corpus"]
        if kind != ("extrapolation", "full", corpus) or record["pos_emb"] not in methods:
            continue
        multiple, rest = divmod(record["length"], record["train_length"])
        if rest or multiple not in multiples:
            continue
        if record["loss"] is None:
            raise UserError(
                f"{_name(record)}, has no loss at length {record['length']:,} "
                f"({record['note']}); a comparison without this run would favor its method"
            )
        run = runs.setdefault((record["pos_emb"], record["seed"]), {})
        if multiple in run:
            raise UserError(
                f"{_name(record)}, has two losses at length {record['length']:,}; keep the records "
                "of one evaluation"
            )
        run[multiple] = record
    return {key: run for key, run in runs.items() if len(run) == len(multiples)}


def _name(record: AnyRecord) -> str:
    """The run of a record, for messages."""
    return f"{record['corpus']}: {record['pos_emb']}, seed {record['seed']}"


def _check_conditions(record: AnyRecord, first: AnyRecord) -> None:
    """Raise UserError if two records cannot be compared."""
    if _conditions(record) != _conditions(first):
        raise UserError(
            f"{_name(record)}, length {record['length']:,}, has other tokens, another model or "
            f"another number of steps than {LOG}, seed {first['seed']}; keep comparable records"
        )


def _conditions(record: AnyRecord) -> tuple[object, ...]:
    """What two records must share to be compared."""
    checkpoint = record["checkpoint"]
    return (
        record["train_length"],
        record["targets"],
        record["groups"]["tokens"],
        checkpoint["layers"],
        checkpoint["hidden_size"],
        checkpoint["iteration"],
    )


def paper_difference(corpus: str, baseline: str, multiples: Sequence[int]) -> float:
    """The loss of log minus that of the baseline in KERPLE's Table 3, the mean over lengths; NaN if
    the table does not have the baseline.
    """
    table = load_published("kerple-3")
    paper_corpus = PAPER_CORPORA[corpus]
    differences = []
    for multiple in multiples:
        # Perplexities, with their standard errors.
        losses = []
        for method in (LOG, baseline):
            text = table.value(paper_corpus, Method(method), multiple * table.train_length)
            if text is None:
                return math.nan
            mean, _, _ = text.partition(" ")
            losses.append(math.log(float(mean)))
        of_log, of_baseline = losses
        differences.append(of_log - of_baseline)
    return statistics.fmean(differences)


def method_name(pos_emb: str) -> str:
    """The name of a method in text and figures."""
    return display_name(Method(pos_emb))


def text_row(labels: tuple[str, ...], cells: Sequence[str]) -> Row:
    """A row of a table without marks."""
    return Row(labels, tuple(map(Cell, cells)))


def comparison_table(records: Records, baselines: Sequence[str] = BASELINES) -> Table:
    """A row per baseline and length, two columns per corpus: ours and the paper's."""
    corpora = sorted({record["corpus"] for record in records}, key=corpus_sort_key)
    lines = []
    for baseline in baselines:
        # At the training length, and beyond it.
        for where, multiples in (("1×", (1,)), ("4-32×", BEYOND)):
            cells = []
            for corpus in corpora:
                found = compare(records, corpus, baseline, multiples)
                if found is None or len(found.by_seed) < 2:
                    cells += [NOT_MEASURED, NOT_MEASURED]
                    continue
                low, high = found.interval
                cells.append(f"{found.word}<br>{found.mean:+.3f} [{low:+.3f}, {high:+.3f}]")
                cells.append(f"{found.paper:+.3f}")
            lines.append(text_row((method_name(baseline), where), cells))

    # Each corpus has a column of the paper.
    columns: list[str] = []
    for corpus in corpora:
        columns += [corpus_name(corpus), f"paper, {corpus_name(PAPER_CORPORA[corpus])}"]
    labels = ("log minus", "at")
    return Table("comparisons", "Primary comparisons", labels, tuple(columns), tuple(lines))


def differences_by_length(records: Records, baselines: Sequence[str]) -> Table:
    """Log minus each baseline at each length, ± one standard error, for records of one corpus."""
    ((corpus, train_length),) = {(record["corpus"], record["train_length"]) for record in records}
    lengths = sorted({record["length"] for record in records if record["kind"] == "extrapolation"})
    lines = []
    for baseline in baselines:
        # The most seeds of a cell are in the label.
        seeds, cells = [0], []
        for length in lengths:
            comparison = compare(records, corpus, baseline, (length // train_length,))
            if comparison is None:
                cells.append(NOT_MEASURED)
            else:
                seeds.append(len(comparison.by_seed))
                cells.append(f"{comparison.mean:+.3f} ± {comparison.stderr:.3f}")
        labels = method_name(baseline), str(max(seeds))
        lines.append(text_row(labels, cells))
    columns = tuple(map(format_length, lengths))
    return Table("differences", "Differences", ("log minus", "seeds"), columns, tuple(lines))


def loss_frame(records: Records) -> DataFrame:
    """The losses of all runs.

    Columns: corpus, train_length, pos_emb, mode (its kind), seed, length, value ...
    """
    frame = measurements(records, "extrapolation", "loss").frame
    settings, methods = frame["setting"], frame["method"]
    return frame.assign(
        corpus=settings.map(attrgetter("corpus")),
        train_length=settings.map(attrgetter("train_length")),
        pos_emb=methods.map(attrgetter("pos_emb")),
        mode=methods.map(attrgetter("kind.mode")),
    )


def costs(records: Records) -> DataFrame:
    """The cost of extrapolation of each run: the loss with all keys minus that with a window of the
    training length.

    Columns: corpus, train_length, pos_emb, seed, length, cost.
    """
    frame = loss_frame(records)
    frame = frame.set_index(["corpus", "train_length", "pos_emb", "seed", "length"])
    full = frame[frame["mode"] == "full"]["value"]
    window = frame[frame["mode"] == "window"]["value"]
    return (full - window).dropna().rename("cost").reset_index()


def _by_position(records: Records) -> Iterator[AnyRecord]:
    """The records of losses by position with full attention, of which some have no losses."""
    for record in records:
        if record["kind"] == "positions" and record["mode"] == "full" and record["losses"]:
            yield record


def in_context_scores(records: Records) -> DataFrame:
    """The in-context score and the loss of each run at its training length, from the losses by
    position.

    Columns: corpus, pos_emb, seed, score, loss. A record whose bins do not have the needed edges
    has no row.
    """
    rows = []
    for record in _by_position(records):
        length, edges = record["train_length"], record["edges"]
        needed = [*IN_CONTEXT, length * 3 // 4]
        if record["length"] != length or not set(needed) <= set(edges):
            continue

        # The loss of the last quarter minus that of the first positions.
        losses = record["losses"]
        first, end, last = map(edges.index, needed)
        score = statistics.fmean(losses[last:]) - statistics.fmean(losses[first:end])
        loss = float(np.average(losses, weights=record["counts"]))
        rows.append((record["corpus"], record["pos_emb"], record["seed"], score, loss))
    return DataFrame(rows, columns=["corpus", "pos_emb", "seed", "score", "loss"])


def training_progress(logs: Mapping[tuple[str, int], Path], length: int) -> DataFrame:
    """The in-context score on the validation split during training.

    Args:
        logs: the `metrics.jsonl` of each run, by method and seed. Of several runs in one file, the
            last is read.
        length: one of the run's `extrapolation-lengths`.

    Columns: pos_emb, seed, step, score.
    """
    rows = []
    for (pos_emb, seed), path in logs.items():
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        for values in lines:
            score = values.get(f"extrapolation/in_context_score/{length}")
            if score is not None and values.get("run") == lines[-1].get("run"):
                rows.append((pos_emb, seed, values["iteration"], score))
    return DataFrame(rows, columns=["pos_emb", "seed", "step", "score"])


def position_differences(records: Records, length: int) -> DataFrame:
    """The loss by position with full attention minus that of ALiBi with the same seed, at this
    length. Each row is the mean over positions from a power of 2 to the next, at their geometric
    mean.

    Columns: corpus, pos_emb, seed, position, difference.
    """
    found = {}
    for record in _by_position(records):
        if record["length"] == length:
            found[record["corpus"], record["pos_emb"], record["seed"]] = record

    # Differences on the same tokens only.
    rows = []
    for (corpus, pos_emb, seed), record in found.items():
        base = found.get((corpus, "alibi", seed))
        if pos_emb == "alibi" or base is None or base["targets"] != record["targets"]:
            continue
        edges = np.array(record["edges"])
        difference = np.subtract(record["losses"], base["losses"])
        # The first bin starts at 0, which has no logarithm.
        starts = np.maximum(edges[:-1], edges[1] / 2)
        octaves = np.floor(np.log2(starts))
        for octave in np.unique(octaves):
            mean = float(difference[octaves == octave].mean())
            rows.append((corpus, pos_emb, seed, 2 ** (octave + 0.5), mean))
    return DataFrame(rows, columns=["corpus", "pos_emb", "seed", "position", "difference"])


def recall_by_distance(content: Mapping[str, Any]) -> DataFrame:
    """Associative recall of each run in a `chomsky.json` of decoders, at the longest length by the
    distance between a key and its query, relative to the run's accuracy at the training length.

    Columns: pos_emb, seed, trained (the accuracy at the training length), distance (the first one
    of a bin), recall.
    """
    settings = content["settings"]
    trained_length, longest = str(settings["train_longest"]), str(settings["test_longest"])
    rows = []
    for result in content["results"]:
        trained = result["accuracies"][trained_length]
        for distance, (correct, targets) in result["distances"][longest].items():
            recall = correct / targets / trained
            rows.append((result["pos_emb"], result["seed"], trained, int(distance), recall))
    return DataFrame(rows, columns=["pos_emb", "seed", "trained", "distance", "recall"])
