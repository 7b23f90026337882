"""Length extrapolation: protocols, inference modes, losses and further measures, and the records that store them."""

from megatron.evaluation.modes import parse_mode
from megatron.evaluation.protocols import PROTOCOLS, parse_protocol
from megatron.evaluation.records import ExtrapolationRecord, Record, read_results
from megatron.evaluation.runner import evaluate_extrapolation

__all__ = [
    "PROTOCOLS",
    "ExtrapolationRecord",
    "Record",
    "evaluate_extrapolation",
    "parse_mode",
    "parse_protocol",
    "read_results",
]
