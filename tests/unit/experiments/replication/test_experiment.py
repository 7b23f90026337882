"""The facts that the pages state about the records."""

import pytest

from experiments.replication.experiment import check_comparable, setting_facts
from megatron.utils.errors import UserError
from tests.support.records import record


def test_facts_of_each_corpus():
    records = [
        record("kerple_log", 128, 9.0, seed, corpus=corpus, documents=5, stderr=0.1 * seed)
        for corpus, seeds in (("debian_latex", (1,)), ("debian_c", (1, 2)))
        for seed in seeds
    ]
    records.append({**records[-1], "pos_emb": "alibi", "stderr": 0.9})
    c, latex = setting_facts(records)
    assert (c["corpus"], c["seeds"], c["steps"], c["stderr"]) == ("C", "1 to 2", 10, 0.2)
    assert (latex["corpus"], latex["seeds"], latex["longest"]) == ("LaTeX", "1", 128)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"iteration": 20}, "have different numbers of training steps"),
        ({"layers": 24}, "have different models or training lengths"),
    ],
)
def test_runs_that_cannot_be_compared_are_rejected(keys, problem):
    first, second = (record(name, 128, 9.0, corpus="debian_c", protocol="non-overlapping") for name in ("alibi", "rpe"))
    check_comparable([first, second])
    changed = {**second, "checkpoint": {**second["checkpoint"], **keys}}
    check_comparable([first, {**changed, "corpus": "debian_prose"}])
    with pytest.raises(UserError, match=rf"debian_c: alibi with seed 1 \(.* and rpe with seed 1 \(.*{problem}"):
        check_comparable([first, changed])
