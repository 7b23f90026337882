"""Effective lengths of a checkpoint's heads (KERPLE, Figure 6)."""

from collections.abc import Iterable

from kerple.positional import PositionalMethod
from megatron.evaluation.records import EffectiveLengthRecord, Provenance, Record

LIMIT = 20_480  # distances looked at, as the paper does
PROTOCOL = "effective-length"


def plan_effective_lengths(origin: Provenance, corpus: str | None) -> Record:
    """The record, its values yet to come."""
    about = {"corpus": corpus, "mode": "full", "protocol": PROTOCOL, "length": LIMIT}
    return origin.record("effective_length", **about, determined_by=(PROTOCOL, LIMIT))


def effective_lengths(record: Record, methods: Iterable[tuple[str, PositionalMethod]]) -> EffectiveLengthRecord:
    """The record with its values. methods: (place, method), as
    `megatron.checkpoint.inspection.positional_methods` gives them; what has no bias is left out.
    """
    found = {place: method.effective_length(LIMIT).tolist() for place, method in methods if method.has_bias}
    note = None if found else f"{record['pos_emb']} has no bias, so its heads have no effective length"
    return EffectiveLengthRecord(**{**record, "note": note}, layers=list(found), effective_lengths=list(found.values()))
