"""Corpora to `.bin/.idx`, and `.bin/.idx` to batches and evaluation streams.

The training side needs torch and megatron-core, preprocessing does not: its many worker processes must not import them.
So these names are loaded when first used.
"""

import importlib

_HOMES = {
    "Datasets": "datasets",
    "build_datasets": "datasets",
    "build_loader": "loader",
    "document_lengths": "streams",
    "document_segments": "streams",
    "evaluation_corpora": "streams",
    "evaluation_tokens": "streams",
    "validation_stream": "streams",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
