"""Bias and weight as tables over distance, and the pairs of query and key that look them up.

Legend: s query length, t key length, h heads.
"""

import torch
from torch import Tensor

from kerple.positional import PositionalMethod, TableJacobian


def tables(
    method: PositionalMethod, length: int, device: torch.device | str, *, rounded: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """(bias, weight) of a positional method at distances 0 ... length-1, float32 `[h, length]`; None where it has none.

    rounded: distances and tables take the nearest bfloat16 values, as in the KERPLE release, which lost the odd
    distances above 256 that way; for comparing with its numbers. Autograd carries a table's gradient back to the
    method's parameters.
    """
    if not (method.has_bias or method.has_weight):
        return None, None
    distance = torch.arange(length, dtype=torch.float32, device=device)
    if rounded:
        distance = _nearest_bfloat16(distance)
    found = (
        method.bias(distance) if method.has_bias else None,
        method.weight(distance) if method.has_weight else None,
    )
    return tuple(_nearest_bfloat16(table) if rounded and table is not None else table for table in found)


def jacobians(
    method: PositionalMethod, length: int, device: torch.device | str
) -> tuple[TableJacobian | None, TableJacobian | None]:
    """(bias, weight) as `TableJacobian`s of a positional method at distances 0 ... length-1; None where it has none.

    Attention that takes them (see `attend`) adds up the gradients of a few numbers per head instead of the table's.
    """
    distance = torch.arange(length, dtype=torch.float32, device=device)
    return tuple(
        getattr(method, f"{name}_jacobian")(distance) if exists and _has_jacobian(type(method), name) else None
        for name, exists in (("bias", method.has_bias), ("weight", method.has_weight))
    )


def _has_jacobian(cls: type, name: str) -> bool:
    """Not where a subclass changes the bias or weight of a class that has one, and not the jacobian."""
    owner, of_table = (
        next(index for index, base in enumerate(cls.__mro__) if hook in vars(base))
        for hook in (f"{name}_jacobian", name)
    )
    return owner <= of_table


def score_table(method: PositionalMethod, length: int, device: torch.device | str) -> Tensor | None:
    """The `table` for `modify_scores` at distances 0 ... length-1, `[..., length]`; None if the method has none."""
    return method.table(torch.arange(length, dtype=torch.float32, device=device))


def _nearest_bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def pair_distances(
    query_positions: tuple[int, int], key_positions: tuple[int, int], window: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Distances of all pairs, and which keys a query does not see: int64 and bool `[s, t]`.

    Positions are given as (first, last + 1). Unseen pairs have distance 0, so that they can look up a table; the mask
    takes them out afterwards.
    """
    query = torch.arange(*query_positions, device=device)
    distance = query[:, None] - torch.arange(*key_positions, device=device)
    unseen = distance < 0
    if window is not None:
        unseen |= distance >= window
    return distance.masked_fill_(unseen, 0), unseen
