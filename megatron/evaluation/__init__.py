"""Length extrapolation measured: protocols, inference modes, losses, tables and plots."""

from megatron.evaluation.extrapolation import evaluate_extrapolation
from megatron.evaluation.modes import parse_mode
from megatron.evaluation.protocols import PROTOCOLS
from megatron.evaluation.rows import Row

__all__ = ["PROTOCOLS", "Row", "evaluate_extrapolation", "parse_mode"]
