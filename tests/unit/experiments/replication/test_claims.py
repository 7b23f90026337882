"""Claims of the papers: estimates, corrected p values and verdicts."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import f as f_distribution
from scipy.stats import spearmanr

from experiments.replication.claims import Claim, Term, claims, claims_table, evaluate_claims, holm
from kerple.positional.registry import canonical_name
from megatron.evaluation.modes import UNSUPPORTED_NOTE
from megatron.reporting.aggregate import Method
from megatron.utils.errors import UserError
from tests.support.records import record

TOKENS = [100] * 8
RUNS = {"kerple_log": (0.00, 0.02, 0.01), "alibi": (0.30, 0.33, 0.36)}  # by seed


def losses(pos_emb, shift=0.0, seeds=3, length=128, mode="full", corpus="debian_c", targets="ab", runs=None):
    """Records whose losses vary by seed and document."""
    result = []
    for seed in range(seeds):
        documents = np.random.default_rng(len(pos_emb)).normal(0, 0.05, len(TOKENS)) + np.arange(len(TOKENS)) / 10
        groups = 3 + shift + (runs or RUNS)[pos_emb][seed] + documents - documents.mean()
        keys = {"corpus": corpus, "mode": mode, "train_length": 128, "targets": targets, "stderr": 0.1}
        keys |= {"groups": {"tokens": TOKENS, "losses": groups.tolist()}, "documents": 8}
        result.append(record(pos_emb, length, math.exp(groups.mean()), seed, **keys))
    return result


def claim(first="kerple_log", than="alibi", at=(1,), than_at=None, kind="loss", limit=0.0, greater=False):
    terms = [Term(Method(*name.split(", ")), multiples) for name, multiples in ((first, at), (than, than_at or at))]
    return Claim("text", "KERPLE, Table 3", kind, *terms, limit, greater)


def result_of(records, tested=None, seconds=None):
    return evaluate_claims(records, seconds or {}, [tested or claim()])[0]


def test_the_test_is_min_f_of_clark():
    """With documents of equal size, the square of t is F1 F2 / (F1 + F2). It has the degrees of freedom of the runs."""
    result = result_of([*losses("kerple_log"), *losses("alibi")])
    groups = [[np.array(entry["groups"]["losses"]) for entry in losses(pos_emb)] for pos_emb in ("kerple_log", "alibi")]
    differences = np.subtract(*groups)  # seeds x documents
    f = []
    for axis in (1, 0):
        means = differences.mean(axis=axis)
        f.append((differences.mean() ** 2 / (means.var(ddof=1) / len(means)), len(means) - 1))
    (f1, runs), (f2, _) = f
    expected = f_distribution.sf(f1 * f2 / (f1 + f2), 1, runs)
    assert result.estimate.mean == pytest.approx(differences.mean(), abs=1e-12)
    assert result.p == pytest.approx(expected, rel=1e-9)
    low, high = result.estimate.interval()
    assert low < differences.mean() < high
    at_the_end = evaluate_claims([*losses("kerple_log"), *losses("alibi")], {}, [claim(limit=high)])[0]
    assert at_the_end.p == pytest.approx(0.05, rel=1e-6)


def test_verdicts():
    records = [*losses("kerple_log"), *losses("alibi")]
    assert result_of(records).verdict == "holds"
    assert result_of(records, claim("alibi", "kerple_log")).verdict == "does not hold"
    assert result_of(records, claim("alibi", "kerple_log", greater=True)).verdict == "holds"
    assert result_of(records, claim(greater=True)).verdict == "does not hold"
    assert result_of(records, claim(limit=result_of(records).estimate.mean)).verdict == "inconclusive"
    assert result_of(records, claim("rpe")).verdict == "not measured"
    assert result_of([*losses("kerple_log"), {**losses("alibi")[0], "groups": None}]).verdict == "not measured"
    one_seed = result_of([*losses("kerple_log", seeds=1), *losses("alibi")])
    assert (one_seed.verdict, one_seed.p, len(one_seed.estimate.by_run)) == ("one seed", None, 1)
    assert one_seed.estimate.interval() is None


def test_other_tokens_are_an_error():
    with pytest.raises(UserError, match=r"debian_c: kerple_log \(full, length 128\) and alibi \(.*seed 1 were scored"):
        result_of([*losses("kerple_log"), *losses("alibi")[:1], *losses("alibi", targets="cd")[1:]])


@pytest.mark.parametrize("method", ["kerple_log", "alibi"])
def test_a_run_without_a_loss_decides_nothing(method):
    records = [*losses("kerple_log"), *losses("alibi")]
    failed = next(entry for entry in records if entry["pos_emb"] == method and entry["seed"] == 1)
    failed |= {"loss": None, "groups": None, "note": None}
    result = result_of(records)
    assert (result.verdict, result.estimate, result.p) == ("inconclusive", None, None)
    (row,) = claims_table([result]).rows
    assert row.cells[0].text == "inconclusive (a run has no finite loss)"
    failed["note"] = f"{UNSUPPORTED_NOTE}: reason"
    assert len(result_of(records).estimate.by_run) == 2


def test_without_variation_between_runs_there_is_no_test():
    records = [*losses("kerple_log"), *losses("alibi", runs={"alibi": [0.3 + run for run in RUNS["kerple_log"]]})]
    result = result_of(records)
    assert (result.verdict, result.p) == ("inconclusive", None)
    (row,) = claims_table([result]).rows
    assert row.cells[0].text == "inconclusive (no variation between runs, not tested)"


def test_corpora_have_equal_weights_and_need_two_seeds():
    c = [*losses("kerple_log"), *losses("alibi")]
    prose = [*losses("kerple_log", 0.6, corpus="debian_prose"), *losses("alibi", corpus="debian_prose", seeds=2)]
    latex = [*losses("kerple_log", corpus="debian_latex"), *losses("alibi", corpus="debian_latex", seeds=1)]
    estimate = result_of([*c, *prose, *latex]).estimate
    assert list(estimate.by_corpus) == ["debian_c", "debian_prose"]
    assert estimate.mean == pytest.approx(np.mean(list(estimate.by_corpus.values())))
    assert len(estimate.by_run) == 5
    single = result_of(c).estimate
    assert [df for _, df in estimate.variances] == [2, 1]
    assert estimate.variances[0][0] == pytest.approx(single.variances[0][0] / 4)
    other = result_of(prose).estimate
    assert estimate.documents == pytest.approx((single.documents + other.documents) / 4)
    assert estimate.error[1] < 3


def test_two_models_on_one_corpus_are_averaged_like_two_corpora():
    small, large = [*losses("kerple_log"), *losses("alibi", 0.3)], [*losses("kerple_log"), *losses("alibi", 0.9)]
    large = [{**entry, "checkpoint": {**entry["checkpoint"], "layers": 24}} for entry in large]
    expected = [result_of(records).estimate.mean for records in (small, large)]
    estimate = result_of([*small, *large]).estimate
    assert estimate.mean == pytest.approx(np.mean(expected))
    assert estimate.by_corpus == {"debian_c": pytest.approx(np.mean(expected))}


def test_two_records_of_the_same_run_are_rejected():
    record_of = losses("alibi", seeds=1)[0]
    resolutions = [
        {**record_of, "kind": "resolution", "resolution": 0.1, "protocol": protocol}
        for protocol in ("first@4", "first@8")
    ]
    with pytest.raises(
        UserError, match="debian_c: alibi, seed 0, has two resolution records in mode full at length 128"
    ):
        result_of(resolutions, claim(kind="resolution"))


def test_lengths_and_modes():
    log = [*losses("kerple_log", length=128), *losses("kerple_log", 0.1, length=512)]
    log += losses("kerple_log", 0.3, length=1024)
    window = [*losses("kerple_log", 0.5, length=512, mode="window@128"), *losses("kerple_log", 9, mode="window@512")]
    records = [*log, *window, *losses("alibi", length=512)]

    def mean(*arguments, **options):
        return result_of(records, claim(*arguments, **options)).estimate.mean

    assert mean("kerple_log", "kerple_log", at=(1,), than_at=(4,)) == pytest.approx(-0.1)
    assert mean("kerple_log", "kerple_log", at=(4, 8), than_at=(1, 1)) == pytest.approx(0.2)
    assert mean("kerple_log", "kerple_log, window", at=(4,)) == pytest.approx(-0.4)
    assert mean(at=(4,)) == pytest.approx(0.1 + 0.01 - 0.33)
    assert result_of(records, claim(at=(4, 8))).verdict == "not measured"


def test_other_measures():
    def measured(kind, pos_emb, values, **keys):
        return [
            {**record(pos_emb, 1024, 9.0, seed), "kind": kind, "train_length": 128, **keys, **value}
            for seed, value in enumerate(values)
        ]

    records = measured("resolution", "alibi", [{"resolution": 0.3}, {"resolution": 0.4}])
    records += measured("resolution", "rotary", [{"resolution": 0.1}, {"resolution": 0.1}])
    tested = claim("rotary", "alibi", (8,), kind="resolution")
    assert result_of(records, tested).estimate.mean == pytest.approx(-0.25)
    records = measured("effective_length", "alibi", [{"effective_lengths": [[4, 16]]}] * 2)
    records += measured("effective_length", "kerple_log", [{"effective_lengths": [[64], [256]]}] * 2)
    assert result_of(records, claim("rotary", kind="effective-length")).verdict == "not measured"
    tested = claim("kerple_log", "alibi", kind="effective-length", greater=True)
    assert result_of(records, tested).estimate.mean == pytest.approx(4)  # 256 and 16
    mean = claim("kerple_log", "alibi", kind="effective-lengths", greater=True)
    records[-1] = {**records[-1], "effective_lengths": [[64], [1024]]}
    zero = [{**entry, "effective_lengths": [[0]]} if entry["pos_emb"] == "alibi" else entry for entry in records]
    assert result_of(zero, tested).estimate.mean == pytest.approx((8 + 10) / 2)  # 0 counts as 1
    assert result_of(records, mean).estimate.mean == pytest.approx((4 + 5) / 2)  # 7 and 8 minus 3


def test_rank_correlation():
    """Spearman's coefficient of scipy; p is the exact proportion of the permutations of the methods."""

    def estimate(resolutions, losses, seeds=(2, 2, 2, 2, 2)):
        records = []
        methods = ("alibi", "kerple_log", "rpe", "rotary", "xpos")
        for pos_emb, resolution, loss, count in zip(methods, resolutions, losses, seeds, strict=False):
            for seed in range(count):
                keys = {**record(pos_emb, 1024, 9.0, seed), "train_length": 128}
                records.append({**keys, "kind": "resolution", "resolution": resolution + seed / 100})
                records.append({**keys, "loss": loss + seed})
        (result,) = evaluate_claims(records, {}, [claim("", "", (8,), kind="rank")])
        return result.estimate

    resolutions, losses = (0.9, 0.5, 0.7, 0.1, 0.3), (2.0, 3.5, 3.0, 5.0, 9.0)
    found = estimate(resolutions, losses)
    assert found.mean == pytest.approx(spearmanr(resolutions, losses).statistic) == pytest.approx(-0.9)
    assert found.interval() is None
    orders = itertools.permutations(losses)
    as_far = [abs(spearmanr(resolutions, order).statistic) > 0.9 - 1e-9 for order in orders]
    assert found.p_value(0.0) == pytest.approx(sum(as_far) / len(as_far))
    assert estimate(resolutions[:3], losses[:3]) is None
    # Means over the seeds; without resolutions that are not between 0 and 1.
    assert estimate(resolutions, losses, seeds=(2, 2, 2, 1, 2)).mean == pytest.approx(-0.9)
    without = estimate((0.9, 0.5, -7.0, 0.1, 0.3), losses)
    assert without.mean == pytest.approx(spearmanr((0.9, 0.5, 0.1, 0.3), (2.0, 3.5, 5.0, 9.0)).statistic)


def test_step_times():
    seconds = {"kerple_log": [1.0, 1.1, 1.2], "alibi": [1.0, 1.0, 1.0], "rpe": [2.0, 2.0, 2.1]}
    assert result_of([], claim("kerple_log", "rpe", kind="seconds"), seconds).verdict == "holds"
    result = result_of([], claim("kerple_log", "alibi", kind="seconds", limit=0.3), seconds)
    assert result.estimate.mean == pytest.approx(math.log(1.0 * 1.1 * 1.2) / 3)
    assert len(result.estimate.by_run) == 3
    (row,) = claims_table([result]).rows
    assert row.cells[1].text.startswith("time x 1.097 [")


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.005], 4) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, 0.02], 5) == pytest.approx([0.05, 0.08])
    assert holm([0.9, 0.8], 2) == [1.0, 1.0]
    records = [*losses("kerple_log"), *losses("alibi")]
    single = result_of(records).p
    several = evaluate_claims(records, {}, [claim(), claim("alibi", "kerple_log"), claim("rpe")])
    assert [result.p for result in several] == pytest.approx([single, single, None])
    corrected = [result.corrected_p for result in several]
    assert corrected == pytest.approx([3 * single, 3 * single, None])  # also for the one that was not measured
    other_paper = replace(claim(), source="LEX, Table 1")
    assert evaluate_claims(records, {}, [claim(), other_paper])[1].corrected_p == pytest.approx(single)


def test_the_table():
    records = [*losses("kerple_log", corpus="debian_prose"), *losses("alibi", corpus="debian_prose"), *losses("alibi")]
    table = claims_table(evaluate_claims(records, {}, [claim(), claim("alibi", "alibi", than_at=(4,))]))
    assert table.columns == (
        "verdict",
        "difference [95 % interval]",
        "as claimed",
        "p",
        "corrected p",
    )  # one corpus has no column
    first, second = table.rows
    assert first.cells[0].text == "holds"
    assert first.cells[1].text.startswith("loss -0.3200 [-0.")
    assert first.cells[2].text == "3 of 3"
    assert [cell.text for cell in second.cells] == ["not measured", "–", "–", "–", "–"]
    results = evaluate_claims([*records, *losses("kerple_log")], {}, [claim()])
    assert claims_table(results).columns[2:4] == ("C", "Prose")


def test_one_seed_decides_nothing():
    """Neither does one seed on each of several corpora."""
    records = [
        *losses("kerple_log", seeds=1),
        *losses("alibi", seeds=1),
        *losses("kerple_log", seeds=1, corpus="debian_prose"),
        *losses("alibi", seeds=1, corpus="debian_prose"),
    ]
    assert result_of(records).verdict == "one seed"
    results = evaluate_claims(records[:2], {}, [claim(), claim("rpe")])
    table = claims_table(results)
    assert table.columns == ("verdict", "difference", "p", "corrected p")
    assert [cell.text for cell in table.rows[0].cells] == ["one seed", "loss -0.3000", "–", "–"]


def test_the_claims_of_the_papers():
    assert len({entry.text + entry.source for entry in claims()}) == len(claims())
    papers = {entry.source.partition(",")[0] for entry in claims()}
    assert papers == {"KERPLE", "DAPE", "LEX"}
    for entry in claims():
        words = re.search(r"is above|resolution of .* is higher|is longer|is slower|raises", entry.text)
        assert entry.greater == (words is not None), entry.text
        for term in (entry.first, entry.second):
            assert term.method.mode in ("full", "window", "blockwise")
            if entry.kind != "rank":
                name = term.method.pos_emb.removesuffix(" (factor 1)")
                assert canonical_name(name) == name
