"""Claims of the papers, tested on evaluation results: `claims.yml` lists them.

A claim says that one value is less or greater than another. Both values come from the same tokens and, run by run, from
trainings with the same seed, so the unit of the pairing is a pair of runs and, for losses, a pair of documents. The
squared standard error of the mean difference is the sum of that over runs (seeds) and that over documents, as in
Clark's min F' (1973), which generalizes to new seeds and to new documents. The degrees of freedom are those of the runs
alone: with three seeds, those of the sum would make errors of the first kind several times too frequent. Corpora are
fixed: their differences are averaged with equal weights, and their errors add up (degrees of freedom: Satterthwaite).
The rank correlation is over methods, so its p value comes from permutations of the methods. p values are two-sided and
corrected with Holm's method for the number of all claims of the paper, measured or not.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import yaml
from scipy.stats import permutation_test, rankdata
from scipy.stats import t as t_distribution

from megatron.evaluation.modes import UNSUPPORTED_NOTE
from megatron.evaluation.scoring import standard_error
from megatron.reporting.aggregate import ALPHA, AnyRecord, Method, Setting, method_of, setting_of
from megatron.reporting.formatting import NOT_MEASURED, format_number
from megatron.reporting.published import corpus_name, corpus_rank
from megatron.reporting.tables import Cell, Row, Section, Table
from megatron.utils.errors import UserError

FILE = Path(__file__).with_name("claims.yml")
PROTOCOL = "non-overlapping"
VALUES = {"extrapolation": "loss", "resolution": "resolution", "effective_length": "effective_lengths"}  # of each kind
MIN_METHODS = 4  # for a rank correlation

Verdict = Literal["holds", "does not hold", "inconclusive", "one seed", "not measured"]
FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]
IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Term:
    """One side of a claim. method: its mode has no size, as in `Method.kind`. at: multiples of the training length."""

    method: Method
    at: tuple[int, ...]


@dataclass(frozen=True)
class Claim:
    """`first` minus `second` is below `limit`, or above it if `greater`. For kind `rank`, the terms have no method, and
    the difference is a correlation.
    """

    text: str
    source: str
    kind: Literal["loss", "resolution", "effective-length", "effective-lengths", "seconds", "rank"]
    first: Term
    second: Term
    limit: float = 0.0
    greater: bool = False

    def agrees(self, difference: float) -> bool:
        return difference > self.limit if self.greater else difference < self.limit

    @property
    def paper(self) -> str:
        return self.source.partition(", ")[0]


@dataclass(frozen=True)
class Estimate:
    """A difference and its parts.

    Attributes:
        mean: over the corpora.
        by_corpus: the difference for each corpus; empty for step times.
        by_run: the difference of each pair of runs (of rounds, for step times).
        variances: (squared standard error over runs, degrees of freedom) for each corpus; they add up. None if there
            are fewer than two seeds.
        documents: the squared standard error over documents.
        permutation_p: the p value of a test that needs no variances.
    """

    mean: float
    by_corpus: Mapping[str | None, float]
    by_run: tuple[float, ...]
    variances: tuple[tuple[float, int], ...] | None
    documents: float = 0.0
    permutation_p: float | None = None

    @property
    def error(self) -> tuple[float, float] | None:
        """(standard error, degrees of freedom)."""
        if self.variances is None:
            return None
        total = sum(variance for variance, _ in self.variances)
        if total <= 1e-24:  # equal values up to rounding
            return None
        df = total**2 / sum(variance**2 / df for variance, df in self.variances)
        return math.sqrt(total + self.documents), df

    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval, not corrected for the number of claims."""
        if self.error is None:
            return None
        stderr, df = self.error
        width = float(t_distribution.ppf(1 - ALPHA / 2, df)) * stderr
        return self.mean - width, self.mean + width

    def p_value(self, limit: float) -> float | None:
        """Two-sided, of the hypothesis that the difference is `limit`."""
        if self.permutation_p is not None or self.error is None:
            return self.permutation_p
        stderr, df = self.error
        return float(2 * t_distribution.sf(abs(self.mean - limit) / stderr, df))


@dataclass(frozen=True)
class Result:
    """A tested claim. p: None if it cannot be computed. corrected_p: with Holm's method. without_loss: a run of the
    claim has no loss, so there is no estimate.
    """

    claim: Claim
    estimate: Estimate | None
    p: float | None
    corrected_p: float | None
    without_loss: bool = False

    @property
    def reason(self) -> str:
        """Why the claim is inconclusive without a test; empty if it is not."""
        if self.without_loss:
            return "a run has no finite loss"
        if self.estimate is not None and self.p is None and self.estimate.variances is not None:
            return "no variation between runs, not tested"
        return ""

    @property
    def verdict(self) -> Verdict:
        if self.without_loss:
            return "inconclusive"
        if self.estimate is None:
            return "not measured"
        if self.p is None and self.estimate.variances is None:
            return "one seed"
        if self.corrected_p is None or self.corrected_p >= ALPHA:
            return "inconclusive"
        return "holds" if self.claim.agrees(self.estimate.mean) else "does not hold"


@cache
def claims() -> tuple[Claim, ...]:
    """The claims in `claims.yml`."""

    def term(text: str, at: int | list[int]) -> Term:
        pos_emb, _, mode = text.partition(", ")
        return Term(Method(pos_emb, mode or "full"), tuple(at) if isinstance(at, list) else (at,))

    result = []
    for entry in yaml.safe_load(FILE.read_text(encoding="utf-8")):
        unknown = entry.keys() - {"claim", "source", "kind", "less", "greater", "than", "at", "than_at", "limit"}
        if unknown:
            raise ValueError(f"{FILE}: {entry['claim']}: unknown keys {unknown}")
        terms = entry.keys() & {"less", "greater", "than"}
        if entry.get("kind") != "rank" and terms not in ({"less", "than"}, {"greater", "than"}):
            raise ValueError(f"{FILE}: {entry['claim']}: needs than, and either less or greater")
        at, greater = entry.get("at", 1), "greater" in entry
        first = term(entry.get("greater" if greater else "less", ""), at)
        second = term(entry.get("than", ""), entry.get("than_at", at))
        kind, limit = entry.get("kind", "loss"), entry.get("limit", 0.0)
        result.append(Claim(entry["claim"], entry["source"], kind, first, second, limit, greater))
    return tuple(result)


def evaluate_claims(
    records: Iterable[AnyRecord], seconds: Mapping[str, Sequence[float]], tested: Sequence[Claim] | None = None
) -> list[Result]:
    """All claims, or those in `tested`, with Holm's correction for their number in each paper.

    seconds: the time of each training step by `pos-emb`; steps with the same index were measured one after the other.
    """
    tested = claims() if tested is None else tested
    data = Data(records)
    without_loss = [data.without_loss(claim) for claim in tested]
    estimates = [
        None if missing else _step_times(claim, seconds) if claim.kind == "seconds" else data.estimate(claim)
        for claim, missing in zip(tested, without_loss, strict=True)
    ]
    p_values = [
        None if estimate is None else estimate.p_value(claim.limit)
        for claim, estimate in zip(tested, estimates, strict=True)
    ]
    corrected = list(p_values)
    for paper in {claim.paper for claim in tested}:
        indices = [index for index, claim in enumerate(tested) if claim.paper == paper]
        known = [index for index in indices if p_values[index] is not None]
        for index, p in zip(known, holm([cast(float, p_values[index]) for index in known], len(indices)), strict=True):
            corrected[index] = p
    return [Result(*parts) for parts in zip(tested, estimates, p_values, corrected, without_loss, strict=True)]


def holm(p_values: Sequence[float], count: int) -> list[float]:
    """The p values multiplied by Holm's factors for `count` hypotheses, at most 1, in the given order."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


class Data:
    """Records by kind, setting, method (without the size of its mode), length and seed.

    Raises UserError if there are two records of the same kind, setting, method, length and seed.
    """

    def __init__(self, records: Iterable[AnyRecord]):
        self._records: dict[str, dict[tuple[Setting, Method], dict[int, dict[int | None, AnyRecord]]]] = {}
        for record in records:
            setting, method, length = setting_of(record), method_of(record), record["length"]
            if record["kind"] not in VALUES:
                continue
            if record["kind"] == "extrapolation":
                if setting.protocol != PROTOCOL or str(record.get("note")).startswith(UNSUPPORTED_NOTE):
                    continue
            elif record.get(VALUES[record["kind"]]) is None:
                continue
            if method.mode not in ("full", "blockwise", f"window@{setting.train_length}"):
                continue
            setting = replace(setting, protocol="")
            by_method = self._records.setdefault(record["kind"], {})
            lengths = by_method.setdefault((setting, method.kind), {})
            first = lengths.setdefault(length, {}).setdefault(record.get("seed"), record)
            if first is not record:
                raise UserError(
                    f"{setting.corpus}: {method.pos_emb}, seed {record.get('seed')}, has two {record['kind']} records "
                    f"in mode {method.mode} at length {length:,}; omit the results of one of the two evaluations"
                )

    def without_loss(self, claim: Claim) -> bool:
        """Whether a run of the claim has no loss. Leaving it out would favour the methods whose runs fail."""
        if claim.kind not in ("loss", "rank"):
            return False
        return any(
            record["loss"] is None
            for (setting, method), lengths in self._records.get("extrapolation", {}).items()
            for term in (claim.first, claim.second)
            if method == term.method or (claim.kind == "rank" and method.mode == "full")
            for multiple in term.at
            for record in lengths.get(multiple * (setting.train_length or 0), {}).values()
        )

    def estimate(self, claim: Claim) -> Estimate | None:
        """The difference of a claim, from all corpora on which both terms were measured; with at least two common seeds
        if there are any. None if there are none.
        """
        if claim.kind == "rank":
            return self._rank_correlation(claim)
        function: Callable[[Claim, Setting], _Differences | None]
        function = {
            "loss": self._losses,
            "resolution": self._resolutions,
            "effective-length": self._effective_lengths,
            "effective-lengths": self._effective_lengths,
        }[claim.kind]
        settings = dict.fromkeys(setting for by_method in self._records.values() for setting, _ in by_method)
        found = {setting: value for setting in settings if (value := function(claim, setting)) is not None}
        several = {setting: value for setting, value in found.items() if len(value.by_run) > 1}
        used = several or found
        if not used:
            return None
        variances, share = None, 1 / len(used) ** 2
        if several:
            variances = tuple((share * value.variance, len(value.by_run) - 1) for value in used.values())
        means = {setting: statistics.fmean(value.by_run) for setting, value in used.items()}
        by_corpus = {
            corpus: statistics.fmean(mean for setting, mean in means.items() if setting.corpus == corpus)
            for corpus in dict.fromkeys(setting.corpus for setting in means)
        }
        by_run = tuple(difference for value in used.values() for difference in value.by_run)
        documents = share * sum(value.document_variance for value in used.values())
        return Estimate(statistics.fmean(means.values()), by_corpus, by_run, variances, documents)

    def _cells(self, kind: str, setting: Setting, term: Term) -> list[dict[int | None, AnyRecord]]:
        """The records by seed, one entry per length; empty if a length is missing."""
        lengths = self._records.get(kind, {}).get((setting, term.method), {})
        train_length = setting.train_length or 0
        cells = [lengths.get(multiple * train_length) for multiple in term.at]
        return [cell for cell in cells if cell is not None] if None not in cells else []

    def _pairs(self, kind: str, setting: Setting, claim: Claim) -> list[list[tuple[AnyRecord, AnyRecord]]]:
        """For each common seed, the records of both terms at every length."""
        first, second = self._cells(kind, setting, claim.first), self._cells(kind, setting, claim.second)
        if not first or not second:
            return []
        cells = list(zip(first, second, strict=True))
        common = set.intersection(*(cell.keys() & other.keys() for cell, other in cells))
        return [[(cell[seed], other[seed]) for cell, other in cells] for seed in sorted(common, key=str)]

    def _losses(self, claim: Claim, setting: Setting) -> "_Differences | None":
        by_run, by_document = [], []
        tokens: list[int] | None = None
        for pairs in self._pairs("extrapolation", setting, claim):
            for one, other in pairs:
                groups = [record["groups"]["tokens"] for record in (one, other) if record.get("groups")]
                if len(groups) < 2:
                    return None  # losses that cannot be paired
                if one["targets"] != other["targets"] or any(g != (tokens or g) for g in groups):
                    names = [f"{method_of(r).pos_emb} ({r['mode']}, length {r['length']:,})" for r in (one, other)]
                    raise UserError(
                        f"{setting.corpus}: {' and '.join(names)} with seed {one.get('seed')} were scored on other "
                        "tokens than each other or than other seeds; evaluate them again with the same data and "
                        "--tokens, or omit the results of one of them"
                    )
                tokens = groups[0]
            by_run.append(statistics.fmean(one["loss"] - other["loss"] for one, other in pairs))
            by_document.append(
                np.mean([np.subtract(a["groups"]["losses"], b["groups"]["losses"]) for a, b in pairs], axis=0)
            )
        if tokens is None:
            return None
        counts = np.array(tokens)
        return _Differences(by_run, np.mean(by_document, axis=0) * counts, counts)

    def _resolutions(self, claim: Claim, setting: Setting) -> "_Differences | None":
        pairs_by_run = self._pairs("resolution", setting, claim)
        return _Differences.of_runs(
            statistics.fmean(one["resolution"] - other["resolution"] for one, other in pairs) for pairs in pairs_by_run
        )

    def _effective_lengths(self, claim: Claim, setting: Setting) -> "_Differences | None":
        def value(record: AnyRecord) -> float:
            """Of all heads. An effective length of 0 (the bias is below the limit at every distance) counts as 1."""
            logs = [math.log2(max(n, 1)) for layer in record["effective_lengths"] for n in layer]
            return max(logs) if claim.kind == "effective-length" else statistics.fmean(logs)

        cells = []
        for term in (claim.first, claim.second):
            by_length = self._records.get("effective_length", {}).get((setting, term.method), {})
            cells.append({seed: r for cell in by_length.values() for seed, r in cell.items() if r["effective_lengths"]})
        common = sorted(cells[0].keys() & cells[1].keys(), key=str)
        return _Differences.of_runs(value(cells[0][seed]) - value(cells[1][seed]) for seed in common)

    def _rank_correlation(self, claim: Claim) -> Estimate | None:
        """Spearman's correlation between attention resolution and loss over the methods, each the mean over its seeds,
        from the corpus with most methods. Methods without a meaningful resolution, in (0, 1], are left out. p: the
        proportion of permutations of the methods with a correlation as far from 0 (of 40,320 random ones for more than
        8 methods).
        """
        found: dict[Setting, list[tuple[float, float]]] = {}
        for (setting, method), lengths in self._records.get("resolution", {}).items():
            length = claim.first.at[0] * (setting.train_length or 0)
            resolutions = lengths.get(length, {})
            losses = self._records.get("extrapolation", {}).get((setting, method), {}).get(length, {})
            seeds = resolutions.keys() & losses.keys()
            if method.mode != "full" or " (" in method.pos_emb or not seeds:  # each method once
                continue
            resolution = statistics.fmean(resolutions[seed]["resolution"] for seed in seeds)
            if 0 < resolution <= 1:
                values = resolution, statistics.fmean(losses[seed]["loss"] for seed in seeds)
                found.setdefault(setting, []).append(values)
        corpora = sorted(found, key=lambda setting: len(found[setting]))
        if not corpora or len(found[corpora[-1]]) < MIN_METHODS:
            return None
        setting = corpora[-1]
        ranks = rankdata(np.array(found[setting]), axis=0)
        ranks -= ranks.mean(axis=0)
        resolutions, losses = (ranks / np.linalg.norm(ranks, axis=0)).T

        def correlation(order: IntArray) -> float:
            return float(resolutions[order] @ losses)

        order = np.arange(len(ranks))
        options: dict[str, Any] = {"permutation_type": "pairings", "vectorized": False, "rng": 0}
        test = permutation_test((order,), correlation, n_resamples=math.factorial(8), **options)
        mean = correlation(order)
        return Estimate(mean, {setting.corpus: mean}, (mean,), None, permutation_p=float(test.pvalue))


@dataclass(frozen=True)
class _Differences:
    """The differences on one corpus: by run and, for losses, as sums by document with the numbers of tokens."""

    by_run: list[float]
    document_sums: FloatArray | None = None
    document_tokens: IntArray | None = None

    @classmethod
    def of_runs(cls, by_run: Iterable[float]) -> "_Differences | None":
        values = list(by_run)
        return cls(values) if values else None

    @property
    def variance(self) -> float:
        """The squared standard error over runs."""
        return statistics.variance(self.by_run) / len(self.by_run)

    @property
    def document_variance(self) -> float:
        """The squared standard error over documents; 0 if they are not known."""
        if self.document_sums is None or self.document_tokens is None:
            return 0.0
        return (standard_error(self.document_sums, self.document_tokens) or 0.0) ** 2


def _step_times(claim: Claim, seconds: Mapping[str, Sequence[float]]) -> Estimate | None:
    """The mean log ratio of step times that were measured one after the other."""
    first, second = seconds.get(claim.first.method.pos_emb, ()), seconds.get(claim.second.method.pos_emb, ())
    ratios = [math.log(one / other) for one, other in zip(first, second, strict=False)]
    if not ratios:
        return None
    variances = ((statistics.variance(ratios) / len(ratios), len(ratios) - 1),) if len(ratios) > 1 else None
    return Estimate(statistics.fmean(ratios), {}, tuple(ratios), variances)


# -- table ------------------------------------------------------------------------------------------------------------


def claims_table(results: Sequence[Result]) -> Table:
    """One row per claim, with the verdict and the difference with its interval; the difference on each corpus if there
    are several, and the number of pairs of runs in which the claim is true if a claim has several.
    """
    corpora = dict.fromkeys(corpus for result in results if result.estimate for corpus in result.estimate.by_corpus)
    names = sorted(corpora, key=lambda corpus: (corpus_rank(corpus), corpus or ""))
    names = names if len(names) > 1 else []
    several_runs = has_several_runs(results)
    lines: list[Row | Section] = []
    for paper, group in itertools.groupby(results, key=lambda result: result.claim.paper):
        lines.append(Section(paper))
        for result in group:
            lines.append(
                Row((result.claim.text, result.claim.source.partition(", ")[2]), _cells(result, names, several_runs))
            )
    return Table(
        "claims",
        "Claims",
        ("claim", "where, with the paper's numbers"),
        (
            "verdict",
            "difference [95 % interval]" if several_runs else "difference",
            *map(corpus_name, names),
            *(["as claimed"] if several_runs else []),
            "p",
            "corrected p",
        ),
        tuple(lines),
    )


def has_several_runs(results: Iterable[Result]) -> bool:
    """Whether any claim was measured with several pairs of runs."""
    return any(result.estimate is not None and len(result.estimate.by_run) > 1 for result in results)


def _cells(result: Result, corpora: Sequence[str | None], several_runs: bool) -> tuple[Cell, ...]:
    estimate, claim = result.estimate, result.claim
    verdict = f"{result.verdict} ({result.reason})" if result.reason else result.verdict
    if estimate is None:
        return (Cell(verdict), *[Cell(NOT_MEASURED)] * (len(corpora) + 3 + several_runs))
    interval = estimate.interval()
    if claim.kind == "seconds":
        text = f"time x {math.exp(estimate.mean):.3f}"
        text += f" [{math.exp(interval[0]):.3f}, {math.exp(interval[1]):.3f}]" if interval else ""
    else:
        unit = {
            "loss": "loss",
            "resolution": "R",
            "effective-length": "log2",
            "effective-lengths": "log2",
            "rank": "correlation",
        }[claim.kind]
        text = f"{unit} {_signed(estimate.mean)}"
        text += f" [{_signed(interval[0])}, {_signed(interval[1])}]" if interval else ""
    by_corpus = (estimate.by_corpus.get(corpus) for corpus in corpora)
    runs = len(estimate.by_run)
    as_claimed = f"{sum(map(claim.agrees, estimate.by_run))} of {runs}"
    return (
        Cell(verdict, best=result.verdict in ("holds", "does not hold")),
        Cell(text),
        *(Cell(NOT_MEASURED if value is None else _signed(value)) for value in by_corpus),
        *([Cell(as_claimed if runs > 1 else NOT_MEASURED)] if several_runs else []),
        *(Cell(_p_value(p)) for p in (result.p, result.corrected_p)),
    )


def _p_value(p: float | None) -> str:
    return NOT_MEASURED if p is None else "<0.0001" if p < 1e-4 else f"{p:.2g}"


def _signed(value: float) -> str:
    """A difference with its sign: four decimals below 1, otherwise three significant digits."""
    return f"{value:+.4f}" if abs(value) < 1 else f"{'+' if value > 0 else ''}{format_number(value, 3)}"
