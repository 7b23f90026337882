"""What the experiments compare: losses of methods on the same text, run by run. The words `agrees`,
`disagrees` and `too imprecise` are defined in experiments/long_context/README.md.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
PAPER_CORPORA = {"debian_c": "github", "debian_prose": "openwebtext2", "debian_latex": "arxiv"}
# The positions with little context, see megatron.training.validation.in_context_score.
IN_CONTEXT = (8, 32)


@dataclass(frozen=True)
class Comparison:
    """The loss of log minus that of a baseline on one corpus, in nats per token.

    Attributes:
        by_seed: the difference of each pair of runs with the same seed.
        documents: the squared standard error of the mean over documents.
        paper: the paper's difference on the corpus that this one replaces.
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
        seeds, of_seeds = len(self.by_seed), 0.0
        if seeds > 1:
            of_seeds = statistics.variance(self.by_seed) / seeds
        return math.sqrt(of_seeds + self.documents)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval, with the degrees of freedom of the seeds; at least two are needed."""
        width = float(t_distribution.ppf(0.975, len(self.by_seed) - 1)) * self.stderr
        return self.mean - width, self.mean + width

    @property
    def word(self) -> str:
        """Whether the paper's result is seen here: agrees, disagrees or too imprecise."""
        low, high = self.interval
        within = low >= -MARGIN and high <= MARGIN

        # The paper's difference is small: ours must be too.
        if abs(self.paper) < MARGIN:
            agrees, disagrees = within, low > MARGIN or high < -MARGIN
        else:
            # It is not: ours must be on the same side of 0, and not small.
            same_side, other_side = low > 0, high < 0
            if self.paper < 0:
                same_side, other_side = other_side, same_side
            agrees = same_side and abs(self.mean) >= MARGIN
            disagrees = other_side or within
        if agrees:
            return "agrees"
        if disagrees:
            return "disagrees"
        return "too imprecise"


def compare(
    records: Iterable[AnyRecord], corpus: str, baseline: str, multiples: Sequence[int]
) -> Comparison | None:
    """Log minus the baseline with full attention, the mean over lengths that are these multiples of
    the training length. None without a seed that both methods have at every length.

    Raises UserError if two runs have the same method and seed, if a run has no loss, or if the runs
    have other tokens, models or numbers of steps than each other.
    """
    # The records of both methods at these lengths, by method and seed.
    runs: dict[tuple[str, int], dict[int, AnyRecord]] = {}
    for record in records:
        if (record["kind"], record["mode"], record["corpus"]) != ("extrapolation", "full", corpus):
            continue
        multiple, rest = divmod(record["length"], record["train_length"])
        if record["pos_emb"] not in (LOG, baseline) or rest or multiple not in multiples:
            continue
        if record["loss"] is None:
            raise UserError(
                f"{corpus}: {record['pos_emb']}, seed {record['seed']}, has no loss at length "
                f"{record['length']:,} ({record['note']}); a comparison without this run would "
                "favor its method"
            )
        run = runs.setdefault((record["pos_emb"], record["seed"]), {})
        if multiple in run:
            raise UserError(
                f"{corpus}: {record['pos_emb']}, seed {record['seed']}, has two losses at length "
                f"{record['length']:,}; keep the records of one evaluation"
            )
        run[multiple] = record

    # Pairs of runs with the same seed.
    complete = {key: run for key, run in runs.items() if len(run) == len(multiples)}
    of_log, of_baseline = ({s for method, s in complete if method == m} for m in (LOG, baseline))
    seeds = sorted(of_log & of_baseline)
    if not seeds:
        return None

    # The difference of each pair of runs, and its mean over pairs and lengths for each document.
    by_seed, by_document = [], []
    first = complete[LOG, seeds[0]][multiples[0]]
    for seed in seeds:
        logs, others = complete[LOG, seed], complete[baseline, seed]
        for record in (*logs.values(), *others.values()):
            if _conditions(record) != _conditions(first):
                raise UserError(
                    f"{corpus}: {record['pos_emb']}, seed {seed}, length {record['length']:,}, has "
                    f"other tokens, another model or another number of steps than {LOG}, seed "
                    f"{seeds[0]}; keep comparable records"
                )
        differences = []
        for multiple in multiples:
            log, other = logs[multiple], others[multiple]
            differences.append(log["loss"] - other["loss"])
            by_document.append(np.subtract(log["groups"]["losses"], other["groups"]["losses"]))
        by_seed.append(statistics.fmean(differences))
    tokens = np.array(first["groups"]["tokens"])
    error = standard_error(np.mean(by_document, axis=0) * tokens, tokens) or 0.0
    return Comparison(tuple(by_seed), error**2, paper_difference(corpus, baseline, multiples))


def _conditions(record: AnyRecord) -> tuple[object, ...]:
    """What two records must share to be compared."""
    checkpoint = record["checkpoint"]
    model = checkpoint["layers"], checkpoint["hidden_size"], checkpoint["iteration"]
    return record["train_length"], record["targets"], record["groups"]["tokens"], *model


def paper_difference(corpus: str, baseline: str, multiples: Sequence[int]) -> float:
    """The loss of log minus that of the baseline in KERPLE's Table 3, the mean over lengths."""
    table = load_published("kerple-3")

    def loss(method: str, multiple: int) -> float:
        text = table.value(PAPER_CORPORA[corpus], Method(method), multiple * table.train_length)
        mean, _, _ = (text or "").partition(" ")
        return math.log(float(mean))

    return statistics.fmean(loss(LOG, each) - loss(baseline, each) for each in multiples)


def comparison_table(records: Sequence[AnyRecord], baselines: Sequence[str] = BASELINES) -> Table:
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
                    cells += [Cell(NOT_MEASURED)] * 2
                    continue
                low, high = found.interval
                cells.append(Cell(f"{found.word}<br>{found.mean:+.3f} [{low:+.3f}, {high:+.3f}]"))
                cells.append(Cell(f"{found.paper:+.3f}"))
            lines.append(Row((display_name(Method(baseline)), where), tuple(cells)))

    # Each corpus has a column of the paper.
    columns: list[str] = []
    for corpus in corpora:
        columns += [corpus_name(corpus), f"paper, {corpus_name(PAPER_CORPORA[corpus])}"]
    labels = ("log minus", "at")
    return Table("comparisons", "Primary comparisons", labels, tuple(columns), tuple(lines))


def differences_by_length(records: Sequence[AnyRecord], baselines: Sequence[str]) -> Table:
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
                cells.append(Cell(NOT_MEASURED))
            else:
                seeds.append(len(comparison.by_seed))
                cells.append(Cell(f"{comparison.mean:+.3f} ± {comparison.stderr:.3f}"))
        lines.append(Row((display_name(Method(baseline)), str(max(seeds))), tuple(cells)))
    columns = tuple(map(format_length, lengths))
    return Table("differences", "Differences", ("log minus", "seeds"), columns, tuple(lines))


def loss_frame(records: Iterable[AnyRecord]) -> DataFrame:
    """The losses of all runs.

    Columns: corpus, train_length, pos_emb, mode (its kind), seed, length, value ...
    """
    frame = measurements(records, "extrapolation", "loss").frame
    frame["corpus"] = [setting.corpus for setting in frame["setting"]]
    frame["train_length"] = [setting.train_length for setting in frame["setting"]]
    frame["pos_emb"] = [method.pos_emb for method in frame["method"]]
    frame["mode"] = [method.kind.mode for method in frame["method"]]
    return frame


def costs(records: Iterable[AnyRecord]) -> DataFrame:
    """The cost of extrapolation of each run: the loss with all keys minus that with a window of the
    training length.

    Columns: corpus, train_length, pos_emb, seed, length, cost.
    """
    frame = loss_frame(records)
    keys = ["corpus", "train_length", "pos_emb", "seed", "length"]
    frame = frame.set_index(keys)
    full = frame[frame["mode"] == "full"]["value"]
    window = frame[frame["mode"] == "window"]["value"]
    return (full - window).dropna().rename("cost").reset_index()


def in_context_scores(records: Iterable[AnyRecord]) -> DataFrame:
    """The in-context score and the loss of each run at its training length, from the losses by
    position.

    Columns: corpus, pos_emb, seed, score, loss. A record whose bins do not have the needed edges
        has no row.
    """
    rows = []
    for record in records:
        length = record["train_length"]
        if (record["kind"], record["mode"], record["length"]) != ("positions", "full", length):
            continue
        edges, losses = record["edges"], record["losses"]
        if losses and {*IN_CONTEXT, length * 3 // 4} <= set(edges):
            # The loss of the last quarter minus that of the first positions.
            first, end, last = map(edges.index, (*IN_CONTEXT, length * 3 // 4))
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
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for values in lines:
            if values.get("run") != lines[-1].get("run"):
                continue
            if (score := values.get(f"extrapolation/in_context_score/{length}")) is not None:
                rows.append((pos_emb, seed, values["iteration"], score))
    return DataFrame(rows, columns=["pos_emb", "seed", "step", "score"])


def position_differences(records: Iterable[AnyRecord], length: int) -> DataFrame:
    """The loss by position with full attention minus that of ALiBi with the same seed, at this
    length. Each row is the mean over positions from a power of 2 to the next, at their geometric
    mean.

    Columns: corpus, pos_emb, seed, position, difference.
    """
    found = {}
    for record in records:
        kind = record["kind"], record["mode"], record["length"]
        if kind == ("positions", "full", length) and record["losses"]:
            found[record["corpus"], record["pos_emb"], record["seed"]] = record

    # Differences on the same tokens only.
    rows = []
    for (corpus, pos_emb, seed), record in found.items():
        base = found.get((corpus, "alibi", seed))
        if pos_emb == "alibi" or base is None or base["targets"] != record["targets"]:
            continue
        edges = np.array(record["edges"])
        difference = np.subtract(record["losses"], base["losses"])
        starts = np.maximum(edges[:-1], edges[1] / 2)  # the first bin starts at 0
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
    trained_length = str(content["settings"]["train_longest"])
    longest = str(content["settings"]["test_longest"])
    rows = []
    for result in content["results"]:
        trained = result["accuracies"][trained_length]
        for distance, (correct, targets) in result["distances"][longest].items():
            recall = correct / targets / trained
            rows.append((result["pos_emb"], result["seed"], trained, int(distance), recall))
    return DataFrame(rows, columns=["pos_emb", "seed", "trained", "distance", "recall"])
