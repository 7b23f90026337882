"""One attention call, several backends: softmax(weight * q.k / sqrt(d) + bias) over the keys that a query may see."""

from megatron.model.attention.score_mod import score_mod
from megatron.model.attention.select import Attention, attend, backend_names, check_backend
from megatron.model.attention.span import FULL, Span
from megatron.model.attention.tables import adapt_table, differentials, tables

__all__ = [
    "FULL",
    "Attention",
    "Span",
    "adapt_table",
    "attend",
    "backend_names",
    "check_backend",
    "differentials",
    "score_mod",
    "tables",
]
