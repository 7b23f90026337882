"""Length extrapolation: protocols, inference modes, losses and further metrics, and the records
that store them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.evaluation.protocols import PROTOCOLS, parse_protocol
    from megatron.evaluation.records import ExtrapolationRecord, Record, read_results
    from megatron.evaluation.runner import evaluate_extrapolation

__all__ = [
    "PROTOCOLS",
    "ExtrapolationRecord",
    "Record",
    "evaluate_extrapolation",
    "parse_protocol",
    "read_results",
]

# Imported when used, so that reading records does not import the model.
_MODULES = {
    "PROTOCOLS": "protocols",
    "ExtrapolationRecord": "records",
    "Record": "records",
    "evaluate_extrapolation": "runner",
    "parse_protocol": "protocols",
    "read_results": "records",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
