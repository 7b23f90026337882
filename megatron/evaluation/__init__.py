"""Length extrapolation measured: protocols, inference modes, losses, tables and plots."""

from megatron.evaluation.extrapolation import evaluate_extrapolation
from megatron.evaluation.modes import parse_mode
from megatron.evaluation.protocols import PROTOCOLS, parse_protocol
from megatron.evaluation.records import ExtrapolationRecord, Record, read_results

__all__ = [
    "PROTOCOLS",
    "ExtrapolationRecord",
    "Record",
    "evaluate_extrapolation",
    "parse_mode",
    "parse_protocol",
    "read_results",
]
