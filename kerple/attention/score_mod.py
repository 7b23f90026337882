"""A positional method as a `score_mod` of PyTorch's FlexAttention, for models that use it.

    flex_attention(query, key, value, score_mod=score_mod(method, length, query.device), block_mask=block_mask)

Legend: b batch, s query length, t key length, h heads.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kerple.attention.tables import tables
from kerple.positional import PositionalMethod

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def score_mod(method: PositionalMethod, length: int, device: torch.device | str, *, offset: int = 0) -> ScoreMod:
    """weight(δ) * score + bias(δ), by tables over the distances 0 ... length - 1 that are made here, once.

    method: one whose bias or weight is a function of the distance. length: the number of keys, t. offset: the position
    of the first query among the keys, t - s where the queries are the last. Keys after a query get the values of
    distance 0: the causal mask is FlexAttention's `block_mask`, which leaves their blocks out. Gradients max_kv_len the
    method's parameters where FlexAttention gives them (compiled, on a GPU); make a new one after each optimizer step.

    Raises ValueError for a method that has neither bias nor weight (rotary turns queries and keys instead, before
    attention).
    """
    name = type(method).__name__
    if not (method.has_bias or method.has_weight):
        extra = "; turn queries and keys by its `rotate` before attention" if method.rotates else ""
        if method.modifies_scores:
            extra = "; it makes the scores from those of other heads or keys, which a score_mod does not see"
        raise ValueError(f"{name} has neither bias nor weight of the distance, so it has no score_mod{extra}")
    return table_score_mod(*tables(method, length, device), offset)


def table_score_mod(bias: Tensor | None, weight: Tensor | None, offset: int) -> ScoreMod:
    """weight(δ) * score + bias(δ) by tables over distance, `[h, length]`; see `score_mod`.

    Keys beyond the tables, which a mask leaves out, get the values of their last distance.
    """
    last = min(table.shape[1] for table in (bias, weight) if table is not None) - 1

    def modify(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = (query + offset - key).clamp(min=0, max=last)
        if weight is not None:
            score = score * weight[head, distance]
        if bias is not None:
            score = score + bias[head, distance]
        return score

    return modify
