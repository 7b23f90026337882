"""The facts that the pages state about the records."""

from megatron.reporting.experiment import setting_facts
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
