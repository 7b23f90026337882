"""What `make demo` concludes. `test_readme.py` runs it."""

from tests.support.records import record
from tools import demo


def test_the_conclusions_claim_what_the_standard_errors_support():
    def record_of(pos_emb, length, losses):
        groups = {"tokens": [100, 100, 100, 100], "losses": losses}
        keys = {"loss": sum(losses) / 4, "targets": "a", "groups": groups}
        return record(pos_emb, length, 2.0, **keys)

    kerple = [3.0, 2.0, 1.0, 4.0]
    records = [
        record_of("kerple_log", 128, kerple),
        record_of("kerple_log", 2048, [2.89, 1.91, 0.9, 3.9]),
        record_of("alibi", 128, kerple),
        record_of("alibi", 2048, [3.2, 1.85, 1.1, 3.9]),
        record_of("rotary", 128, kerple),
        record_of("rotary", 2048, [4.0, 3.1, 2.0, 4.9]),
    ]
    assert demo.conclusions(records) == [
        "kerple_log: from 128 to 2,048 tokens the loss falls (-0.1000 ± 0.0041 nats per token)",
        "alibi: from 128 to 2,048 tokens the loss shows no clear change (+0.0125 ± 0.0826 nats per "
        "token)",
        "rotary: from 128 to 2,048 tokens the loss rises (+1.0000 ± 0.0408 nats per token)",
        "alibi minus kerple_log at 2,048: +0.1125 ± 0.0862 nats per token: a tie on this text",
        "rotary minus kerple_log at 2,048: +1.1000 ± 0.0389 nats per token: kerple_log is better "
        "on this text",
        "± is the standard error over documents. With one seed per method, this does not rank the "
        "methods in general.",
    ]
