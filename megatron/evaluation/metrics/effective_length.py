"""Effective lengths of a checkpoint's heads (KERPLE, Figure 6): the smallest distance with a bias
below -2.
"""

from collections.abc import Iterable

from kerple.positional import PositionalMethod
from megatron.evaluation.records import EffectiveLengthRecord, Provenance, Record

LIMIT = 20_480  # distances examined, as in the paper
PROTOCOL = "effective-length"


def plan_effective_lengths(provenance: Provenance, corpus: str | None) -> Record:
    """The record without values."""
    return provenance.record(
        "effective_length",
        corpus=corpus,
        mode="full",
        protocol=PROTOCOL,
        length=LIMIT,
        determined_by=(PROTOCOL, LIMIT),
    )


def effective_lengths(
    planned: Record, methods: Iterable[tuple[str, PositionalMethod]]
) -> EffectiveLengthRecord:
    """The planned record with its values.

    methods: (label, method) pairs from `megatron.checkpoint.inspection.positional_methods`. Methods
    without a bias are skipped; if none is left, the record has a note.
    """
    # Only a bias over distance has an effective length.
    by_label = {}
    for label, method in methods:
        if "bias" in method.hooks:
            by_label[label] = method.effective_length(LIMIT).tolist()
    note = None
    if not by_label:
        note = (
            f"{planned['pos_emb']} has no bias over distance alone, so its heads have no effective "
            "length"
        )
    return {
        **planned,
        "note": note,
        "layers": list(by_label),
        "effective_lengths": list(by_label.values()),
    }
