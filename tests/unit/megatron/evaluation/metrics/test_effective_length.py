"""Effective lengths of heads."""

from megatron.evaluation.metrics.effective_length import (
    LIMIT,
    effective_lengths,
    plan_effective_lengths,
)
from megatron.evaluation.records import Provenance
from tests.support.language_models import small_gpt


def test_methods_with_and_without_a_bias():
    planned = plan_effective_lengths(Provenance(pos_emb="some method"), "corpus")
    assert (planned["kind"], planned["protocol"], planned["length"]) == (
        "effective_length",
        "effective-length",
        LIMIT,
    )
    alibi, rotary = (small_gpt(name).blocks[0].attention.rpe for name in ("alibi", "rotary"))
    record = effective_lengths(planned, [("layer 0", alibi), ("layer 1", rotary)])
    assert (record["layers"], record["note"], record["corpus"]) == (["layer 0"], None, "corpus")
    assert record["effective_lengths"] == [alibi.effective_length(LIMIT).tolist()]
    record = effective_lengths(planned, [("all layers", rotary)])
    assert (record["layers"], record["effective_lengths"]) == ([], [])
    assert (
        record["note"]
        == "some method has no bias over distance alone, so its heads have no effective length"
    )
    assert record["measurement"] == planned["measurement"]
