"""Evaluation records."""

import math


def record(pos_emb: str, length: int, perplexity: float | None, seed: int | None = 1, **keys: object) -> dict:
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
    return [record(pos_emb, length, value, seed, **keys) for seed, value in enumerate(values, start=1)]


def passkey_record(pos_emb: str, length: int, depth: float, accuracy: float | None, **keys: object) -> dict:
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
