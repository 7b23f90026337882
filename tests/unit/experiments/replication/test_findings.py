"""Sentences about the claims of the papers."""

from experiments.replication.claims import evaluate_claims
from experiments.replication.findings import comparisons_of_log, decided_claims, verdict_summary
from tests.unit.experiments.replication.test_claims import claim, losses


def test_verdicts():
    records = [*losses("kerple_log"), *losses("alibi")]
    results = evaluate_claims(records, {}, [claim(), claim("alibi", "kerple_log"), claim("rpe")])
    assert verdict_summary(results) == ("Of 3 claims of the papers, 1 holds, 1 does not hold, 1 is not measured yet.")
    assert decided_claims(results) == {"holds": ["text"], "does not hold": ["text"]}
    assert verdict_summary(results[2:]) == "No claim of the papers has been measured yet."


def test_one_seed():
    results = evaluate_claims([*losses("kerple_log", seeds=1), *losses("alibi", seeds=1)], {}, [claim(), claim("rpe")])
    assert verdict_summary(results).startswith("The claims of the papers are not decided yet")
    assert decided_claims(results) == {"holds": [], "does not hold": []}


def test_comparisons_of_log():
    """The second run of ALiBi is the only one with a lower loss than log's."""
    runs = {"kerple_log": (0.0, 0.0, 0.0), "alibi": (0.3, -0.1, 0.2)}
    records = [
        *(record for method in runs for length in (512, 1024) for record in losses(method, length=length, runs=runs)),
        *losses("kerple_log", -0.1, length=1024, mode="window@128", runs=runs),
    ]
    tested = [claim(at=(4, 8)), claim(than="kerple_log, window", at=(8,)), claim(than="rpe", at=(4, 8)), claim(at=(4,))]
    others, windows = comparisons_of_log(evaluate_claims(records, {}, tested))
    assert others.endswith("beyond the training length: than ALiBi in 2 of 3 (4 to 8 times).")
    assert windows.endswith("a window of the training length: in 0 of 3 at 8 times.")
    assert comparisons_of_log(evaluate_claims([], {}, tested)) == []
