"""Evaluation records."""

import math
from typing import get_type_hints

from megatron.evaluation.records import Checkpoint, ExtrapolationRecord, Provenance, Record


def record(
    pos_emb: str, length: int, perplexity: float | None, seed: int | None = 1, **keys: object
) -> dict:
    """A record of kind `extrapolation`. `keys` replace its values."""
    return {
        "kind": "extrapolation",
        "corpus": "github",
        "pos_emb": pos_emb,
        "mode": "full",
        "seed": seed,
        "train_length": 512,
        "protocol": "non-overlapping",
        "length": length,
        "tokens": 1000,
        "loss": math.log(perplexity) if perplexity else None,
        "perplexity": perplexity,
        "note": None if perplexity else "out of memory",
        "environment": None,
        "checkpoint": {
            "path": f"nowhere/{pos_emb}/{seed}",
            "iteration": 10,
            "fingerprint": f"{pos_emb}{seed}",
            "layers": 12,
            "hidden_size": 768,
        },
        **keys,
    }


def seeds(pos_emb: str, length: int, values: list[float], **keys: object) -> list[dict]:
    """One record per value, with seeds 1, 2 ..."""
    return [
        record(pos_emb, length, value, seed, **keys) for seed, value in enumerate(values, start=1)
    ]


def passkey_record(
    pos_emb: str, length: int, depth: float, accuracy: float | None, **keys: object
) -> dict:
    """A record of kind `passkey`. `keys` replace its values."""
    return {
        **record(pos_emb, length, 1.0),
        "kind": "passkey",
        "protocol": "passkey",
        "depth": depth,
        "trials": 10,
        "correct": round(10 * (accuracy or 0)),
        "accuracy": accuracy,
        "note": "no such position" if accuracy is None else None,
        **keys,
    }


def stored_record(
    length: int = 16, *, fingerprint: str = "aa", determined_by: str = "tokens", loss: float = 2.0
) -> ExtrapolationRecord:
    """A record of kind `extrapolation` with all its keys, as results.jsonl has it."""
    checkpoint: Checkpoint = {
        "path": "runs/a",
        "iteration": 4,
        "fingerprint": fingerprint,
        "layers": 2,
        "hidden_size": 32,
    }
    planned = Provenance(checkpoint, "alibi", 7, 16).record(
        "extrapolation",
        corpus="text",
        mode="full",
        protocol="non-overlapping",
        length=length,
        determined_by=determined_by,
    )
    values = {"tokens": 64, "segments": 4, "documents": None, "stderr": None, "bits_per_byte": None}
    values |= {"perplexity": math.exp(loss), "targets": "ab", "groups": None}
    return ExtrapolationRecord(**planned, loss=loss, **values)


def of_kind(kind: str, **values: object) -> dict:
    """A record of another kind: the keys that all kinds have, and `values`."""
    planned = {
        key: value for key, value in stored_record().items() if key in get_type_hints(Record)
    }
    return {**planned, "kind": kind, **values}


def positions(**values: object) -> dict:
    """A record of kind `positions` with all its keys. `values` replace them."""
    bins = {"edges": [0, 8, 16], "losses": [2.0, 1.5], "counts": [8, 8], "targets": "ab"}
    return of_kind("positions", **{**bins, **values})
