"""The bias and weight of a positional method as tables over distance, and their jacobians.

Legend: b batch, h heads, p coefficients per head, n distances, c queries, l keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kerple.positional import PositionalMethod, TableJacobian
from kerple.positional.distance_maps import DistanceMap


class KernelTables(NamedTuple):
    """The tables as the fused backend's kernels read them, and the inputs of their gradients; see
    `triton/launch.py`.

    The fields are arguments of the operator `kerple::fused_attention`, in its order.

    Attributes:
        bias_table, weight_table: the tables `[h, >= max_kv_len]`, or None. Detached if all
            gradients are those of coefficients.
        bias_coefficients, weight_coefficients: of the jacobians that are used, `[h, p]`, or None.
        bias: float32 `[h, margins + max_kv_len]`, in units of log2, with -inf in the margins;
            `[1, ...]` if there is neither bias nor weight.
        weight: float32 of the same shape, with 0 in the margins, or None.
        directions: float32 `[p, h, ...]` of all coefficients, first those of the bias, with
            margins, or None.
        bias_dense, weight_dense: the gradient of the table itself is computed below this distance;
            None: everywhere.
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
        signed: whether the tables are halves `[2, ...]`: for keys up to the query, and for keys
            after it.
        kernel, max_kv_len: what the fused backend makes of these tables for calls with this
            `max_kv_len`; None: it makes it in each call. Layers that share it save launches (see
            `prepare_tables`).
    """

    bias: Tensor | None = None
    weight: Tensor | None = None
    bias_jacobian: TableJacobian | None = None
    weight_jacobian: TableJacobian | None = None
    scores: Tensor | None = None
    signed: bool = False
    kernel: KernelTables | None = None
    max_kv_len: int | None = None


NO_TABLES = PositionTables()


def position_tables(
    method: PositionalMethod | None,
    length: int,
    device: torch.device | str,
    *,
    causal: bool = True,
    with_jacobians: bool = False,
    distance_map: DistanceMap | None = None,
) -> PositionTables:
    """All tables of a method at distances 0 ... length-1 on `device`; of none for None. causal,
    distance_map: see `tables` and `score_table`; a map is without jacobians.
    """
    if method is None:
        return NO_TABLES

    # Those of bias and weight, which the fused backend differentiates by their coefficients.
    bias, weight = tables(method, length, device, causal=causal, distance_map=distance_map)
    bias_jacobian = weight_jacobian = None
    if with_jacobians and distance_map is None:
        bias_jacobian, weight_jacobian = jacobians(method, length, device)

    # The one that the method itself reads in `modify_scores`.
    scores = None
    if "modify_scores" in method.hooks:
        scores = score_table(method, length, device, causal=causal, distance_map=distance_map)
    return PositionTables(
        bias=bias,
        weight=weight,
        bias_jacobian=bias_jacobian,
        weight_jacobian=weight_jacobian,
        scores=scores,
        signed=method.signed and not causal,
    )


def tables(
    method: PositionalMethod,
    length: int,
    device: torch.device | str,
    *,
    causal: bool = True,
    rounded: bool = False,
    distance_map: DistanceMap | None = None,
    first: int = 0,
) -> tuple[Tensor | None, Tensor | None]:
    """(bias, weight) of a positional method at distances `first` ... length-1, float32
    `[h, length - first]` on `device`.

    A method without a bias or weight has None in its place. Autograd propagates a table's gradient
    to the method's parameters.

    causal: if False, a `signed` method has tables `[2, h, length - first]`: for keys up to the
    query, and for keys after it. Those of other methods are the same for both.

    rounded: round distances and tables to bfloat16. The original KERPLE code computes in bfloat16,
    which cannot represent odd distances above 256; this reproduces its numbers.

    distance_map: replaces the distances, before they are rounded.
    """
    if not method.hooks & {"bias", "weight"}:
        return None, None
    # The distances [n], as the method sees them.
    distance = torch.arange(first, length, dtype=torch.float32, device=device)
    if distance_map is not None:
        distance = distance_map(distance)
    if rounded:
        distance = distance.bfloat16().float()

    # The values of each hook, for both directions if they differ.
    values: list[Tensor | None] = []
    for name in ("bias", "weight"):
        if name not in method.hooks:
            values.append(None)
            continue
        # In float32, at all distances at once.
        hook: Callable[[Tensor], Tensor] = getattr(method, name)
        table = hook(distance)  # [h, n]
        if method.signed and not causal:
            table = torch.stack((table, hook(-distance)))  # [2, h, n]
        if rounded:
            table = table.bfloat16().float()
        values.append(table)
    return values[0], values[1]


def jacobians(
    method: PositionalMethod, length: int, device: torch.device | str
) -> tuple[TableJacobian | None, TableJacobian | None]:
    """The `TableJacobian`s of (bias, weight) at distances 0 ... length-1 on `device`; None if the
    method has none.

    A backend that uses them (see `attend`) sums the gradients of a few coefficients per head
    instead of those of the whole table.
    """
    bias = weight = None
    if not method.hooks & {"bias", "weight"}:
        return bias, weight
    distance = torch.arange(length, dtype=torch.float32, device=device)
    if "bias" in method.hooks:
        bias = method.bias_jacobian(distance)
    if "weight" in method.hooks:
        weight = method.weight_jacobian(distance)
    return bias, weight


def score_table(
    method: PositionalMethod,
    length: int,
    device: torch.device | str,
    *,
    causal: bool = True,
    distance_map: DistanceMap | None = None,
    first: int = 0,
) -> Tensor | None:
    """The `table` for `modify_scores` at distances `first` ... length-1, `[..., length - first]`;
    None if the method has none. causal: see `tables`.

    distance_map: replaces the distances. `length` must then be the length of the text, even with a
    window (see `PositionalMethod.mapped_table`), unless the method is `shift_invariant`.
    """
    # One table serves both directions, unless the method tells them apart.
    distance = torch.arange(first, length, dtype=torch.float32, device=device)
    if causal or not method.signed:
        if distance_map is None:
            return method.table(distance)
        return method.mapped_table(distance_map(distance))

    # A half for keys up to the query, and one for keys after it.
    before = method.table(distance)
    after = method.table(-distance)
    if before is None or after is None:
        return None
    return torch.stack((before, after))


def lookup(table: Tensor, distance: Tensor) -> Tensor:
    """The values of a table `[h, n]` at distances `[c, l]` or `[b, c, l]`: `[h, c, l]` or
    `[b, h, c, l]`. The distances of keys after the query are negative; a table `[2, h, n]` has its
    own half for them.
    """
    # With documents, each row has its own distances.
    has_batch = distance.dim() == 3
    if table.dim() == 3:
        # A half for each direction: both are looked up, and each pair takes its own.
        before = lookup(table[0], distance)
        after = lookup(table[1], distance)
        follows = distance < 0
        if has_batch:
            follows = follows[:, None]
        return torch.where(follows, after, before)
    values = table[:, distance.abs()]  # [h, c, l], or [h, b, c, l]
    if has_batch:
        return values.transpose(0, 1)
    return values
