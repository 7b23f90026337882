"""Attention with a bias and weight over distance: softmax(weight * q.k / sqrt(d) + bias) v, in several backends."""

from kerple.attention.backends.flex import score_mod
from kerple.attention.backends.triton.operator import prepare_tables
from kerple.attention.call import FULL, Requirements, Span
from kerple.attention.dispatch import Attention, attend, backend_names, check_backend
from kerple.attention.inference.attend import attend_in_mode
from kerple.attention.inference.mode import (
    DEFAULT_MODE,
    FULL_MODE,
    AttentionMode,
    DynamicNtk,
    LogLength,
    Mode,
    ScoreScaling,
    YarnTemperature,
    parse_mode,
)
from kerple.attention.tables import (
    Documents,
    PositionTables,
    document_positions,
    ids_of_sequences,
    jacobians,
    position_tables,
    score_table,
    tables,
)

__all__ = [
    "DEFAULT_MODE",
    "FULL",
    "FULL_MODE",
    "Attention",
    "AttentionMode",
    "Documents",
    "DynamicNtk",
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
    "document_positions",
    "ids_of_sequences",
    "jacobians",
    "parse_mode",
    "position_tables",
    "prepare_tables",
    "score_mod",
    "score_table",
    "tables",
]
