"""One attention call, several backends: softmax(weight * q.k / sqrt(d) + bias) over the keys that a query may see."""

from kerple.attention.dispatch import Attention, attend, backend_names, check_backend
from kerple.attention.score_mod import score_mod
from kerple.attention.span import FULL, Span
from kerple.attention.tables import jacobians, score_table, tables

__all__ = [
    "FULL",
    "Attention",
    "Span",
    "attend",
    "backend_names",
    "check_backend",
    "jacobians",
    "score_mod",
    "score_table",
    "tables",
]
