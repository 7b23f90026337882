"""Token files (`.bin/.idx`) as training samples and evaluation text.

Datasets and loaders need torch and megatron-core, but the worker processes of preprocessing, which read token files,
must not import them. So the names below are imported lazily.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.data.datasets import Datasets, build_datasets
    from megatron.data.loader import build_loader
    from megatron.data.streams import (
        document_lengths,
        document_segments,
        evaluation_corpora,
        evaluation_stream,
        validation_stream,
    )

_MODULES = {
    "Datasets": "datasets",
    "build_datasets": "datasets",
    "build_loader": "loader",
    "document_lengths": "streams",
    "document_segments": "streams",
    "evaluation_corpora": "streams",
    "evaluation_stream": "streams",
    "validation_stream": "streams",
}

__all__ = [
    "Datasets",
    "build_datasets",
    "build_loader",
    "document_lengths",
    "document_segments",
    "evaluation_corpora",
    "evaluation_stream",
    "validation_stream",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
