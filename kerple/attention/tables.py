"""The bias and weight of a positional method as tables over distance, and their jacobians.

Legend: s query length, t key length, h heads, p coefficients per head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kerple.positional import PositionalMethod, TableJacobian
from kerple.positional.distance_maps import DistanceMap


class KernelTables(NamedTuple):
    """The tables as the fused backend's kernels read them, and the inputs of their gradients; see `triton/launch.py`.

    The fields are arguments of the operator `kerple::fused_attention`, in its order.

    Attributes:
        bias_table, weight_table: the tables `[h, >= max_kv_len]`, or None. Detached if all gradients are those of
            coefficients.
        bias_coefficients, weight_coefficients: of the jacobians that are used, `[h, p]`, or None.
        bias: float32 `[h, margins + max_kv_len]`, in units of log2, with -inf in the margins; `[1, ...]` if there is
            neither bias nor weight.
        weight: float32 of the same shape, with 0 in the margins, or None.
        directions: float32 `[p, h, ...]` of all coefficients, first those of the bias, with margins, or None.
        bias_dense, weight_dense: the gradient of the table itself is computed below this distance; None: everywhere.
    """

    bias_table: Tensor | None
    weight_table: Tensor | None
    bias_coefficients: Tensor | None
    weight_coefficients: Tensor | None
    bias: Tensor
    weight: Tensor | None
    directions: Tensor | None
    bias_dense: int | None
    weight_dense: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class PositionTables:
    """The tables over distance of a positional method; None for those that it does not have.

    Attributes:
        bias, weight: float32 `[h, >= max_kv_len]`. Their gradients are exact.
        bias_jacobian, weight_jacobian: alternative gradients of these tables (see `jacobians`).
        scores: the table of a method's `modify_scores`, `[..., >= max_kv_len]`.
        kernel, max_kv_len: what the fused backend makes of these tables for calls with this `max_kv_len`; None: it
            makes it in each call. Layers that share it save launches (see `prepare_tables`).
    """

    bias: Tensor | None = None
    weight: Tensor | None = None
    bias_jacobian: TableJacobian | None = None
    weight_jacobian: TableJacobian | None = None
    scores: Tensor | None = None
    kernel: KernelTables | None = None
    max_kv_len: int | None = None


NO_TABLES = PositionTables()


def position_tables(
    method: PositionalMethod | None,
    length: int,
    device: torch.device | str,
    *,
    with_jacobians: bool = False,
    distance_map: DistanceMap | None = None,
) -> PositionTables:
    """All tables of a method at distances 0 ... length-1 on `device`; of none for None. distance_map: see `tables` and
    `score_table`; without jacobians.
    """
    if method is None:
        return NO_TABLES
    bias, weight = tables(method, length, device, distance_map=distance_map)
    bias_jacobian, weight_jacobian = jacobians(method, length, device) if with_jacobians else (None, None)
    scores = None
    if "modify_scores" in method.hooks:
        scores = score_table(method, length, device, distance_map=distance_map)
    return PositionTables(
        bias=bias, weight=weight, bias_jacobian=bias_jacobian, weight_jacobian=weight_jacobian, scores=scores
    )


def tables(
    method: PositionalMethod,
    length: int,
    device: torch.device | str,
    *,
    rounded: bool = False,
    distance_map: DistanceMap | None = None,
    first: int = 0,
) -> tuple[Tensor | None, Tensor | None]:
    """(bias, weight) of a positional method at distances `first` ... length-1, float32 `[h, length - first]` on
    `device`.

    A method without a bias or weight has None in its place. Autograd propagates a table's gradient to the method's
    parameters.

    rounded: round distances and tables to bfloat16. The KERPLE release computes in bfloat16, which cannot represent
    odd distances above 256; this reproduces its numbers.

    distance_map: replaces the distances, before they are rounded.
    """
    if not method.hooks & {"bias", "weight"}:
        return None, None
    distance = torch.arange(first, length, dtype=torch.float32, device=device)
    if distance_map is not None:
        distance = distance_map(distance)
    if rounded:
        distance = distance.bfloat16().float()

    bias = method.bias(distance) if "bias" in method.hooks else None
    weight = method.weight(distance) if "weight" in method.hooks else None
    if rounded:
        bias = None if bias is None else bias.bfloat16().float()
        weight = None if weight is None else weight.bfloat16().float()
    return bias, weight


def jacobians(
    method: PositionalMethod, length: int, device: torch.device | str
) -> tuple[TableJacobian | None, TableJacobian | None]:
    """The `TableJacobian`s of (bias, weight) at distances 0 ... length-1 on `device`; None if the method has none.

    A backend that uses them (see `attend`) sums the gradients of a few coefficients per head instead of those of the
    whole table.
    """
    if not method.hooks & {"bias", "weight"}:
        return None, None
    distance = torch.arange(length, dtype=torch.float32, device=device)
    bias = method.bias_jacobian(distance) if "bias" in method.hooks else None
    weight = method.weight_jacobian(distance) if "weight" in method.hooks else None
    return bias, weight


def score_table(
    method: PositionalMethod,
    length: int,
    device: torch.device | str,
    *,
    distance_map: DistanceMap | None = None,
    first: int = 0,
) -> Tensor | None:
    """The `table` for `modify_scores` at distances `first` ... length-1, `[..., length - first]`; None if the method
    has none.

    distance_map: replaces the distances. `length` must then be the length of the text, even with a window (see
    `PositionalMethod.mapped_table`), unless the method is `shift_invariant`.
    """
    distance = torch.arange(first, length, dtype=torch.float32, device=device)
    return method.table(distance) if distance_map is None else method.mapped_table(distance_map(distance))


def pair_distances(queries: range, keys: range, mask: Tensor) -> Tensor:
    """Distances between ranges of positions, int64 `[s, t]` on the mask's device; 0 for masked pairs.

    So every pair, masked or not, has an entry in a table over the visible distances.
    """
    query = torch.arange(queries.start, queries.stop, device=mask.device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=mask.device)
    return (query - key).masked_fill_(mask, 0)


def lookup(table: Tensor, distance: Tensor) -> Tensor:
    """The values of a table `[h, n]` at distances `[c, l]` or `[b, c, l]`: `[h, c, l]` or `[b, h, c, l]`."""
    values = table[:, distance]
    return values if distance.dim() == 2 else values.transpose(0, 1)
