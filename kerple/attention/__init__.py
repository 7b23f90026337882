"""Attention with a bias and weight over distance: softmax(weight * q.k / sqrt(d) + bias) v, in
several backends.
"""

from kerple.attention.attention import Attention, attend
from kerple.attention.backend import Requirements
from kerple.attention.backends.flex import score_mod
from kerple.attention.backends.triton.operator import prepare_tables
from kerple.attention.call import AttentionCall
from kerple.attention.dispatch import Dispatcher, backend_names, check_backend, run, runs_fused
from kerple.attention.documents import Documents, document_positions, ids_of_sequences
from kerple.attention.inference.attend import attend_in_mode
from kerple.attention.inference.mode import (
    DEFAULT_MODE,
    FULL_MODE,
    AttentionMode,
    Mode,
    parse_mode,
)
from kerple.attention.inference.scaling import (
    DynamicNtk,
    LogLength,
    ScoreScaling,
    YarnTemperature,
)
from kerple.attention.span import FULL, Span
from kerple.attention.startup import ExpectedCalls, check_kernels, describe_choice
from kerple.attention.tables import PositionTables, jacobians, position_tables, score_table, tables

__all__ = [
    "DEFAULT_MODE",
    "FULL",
    "FULL_MODE",
    "Attention",
    "AttentionCall",
    "AttentionMode",
    "Dispatcher",
    "Documents",
    "DynamicNtk",
    "ExpectedCalls",
    "LogLength",
    "Mode",
    "PositionTables",
    "Requirements",
    "ScoreScaling",
    "Span",
    "YarnTemperature",
    "attend",
    "attend_in_mode",
    "backend_names",
    "check_backend",
    "check_kernels",
    "describe_choice",
    "document_positions",
    "ids_of_sequences",
    "jacobians",
    "parse_mode",
    "position_tables",
    "prepare_tables",
    "run",
    "runs_fused",
    "score_mod",
    "score_table",
    "tables",
]
