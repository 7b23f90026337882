"""The bias and weight of a positional method as tables over distance, their jacobians, and the documents in which
distances count.

Legend: b batch, s query length, t key length, h heads, p coefficients per head; n documents of equal size, c queries, l
keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
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
        signed: whether the tables are halves `[2, ...]`: for keys up to the query, and for keys after it.
        kernel, max_kv_len: what the fused backend makes of these tables for calls with this `max_kv_len`; None: it
            makes it in each call. Layers that share it save launches (see `prepare_tables`).
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
    """All tables of a method at distances 0 ... length-1 on `device`; of none for None. causal, distance_map: see
    `tables` and `score_table`; a map is without jacobians.
    """
    if method is None:
        return NO_TABLES
    bias, weight = tables(method, length, device, causal=causal, distance_map=distance_map)
    bias_jacobian = weight_jacobian = None
    if with_jacobians and distance_map is None:
        bias_jacobian, weight_jacobian = jacobians(method, length, device)
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
    """(bias, weight) of a positional method at distances `first` ... length-1, float32 `[h, length - first]` on
    `device`.

    A method without a bias or weight has None in its place. Autograd propagates a table's gradient to the method's
    parameters.

    causal: if False, a `signed` method has tables `[2, h, length - first]`: for keys up to the query, and for keys
    after it. Those of other methods are the same for both.

    rounded: round distances and tables to bfloat16. The original KERPLE code computes in bfloat16, which cannot
    represent odd distances above 256; this reproduces its numbers.

    distance_map: replaces the distances, before they are rounded.
    """
    if not method.hooks & {"bias", "weight"}:
        return None, None
    distance = torch.arange(first, length, dtype=torch.float32, device=device)
    if distance_map is not None:
        distance = distance_map(distance)
    if rounded:
        distance = distance.bfloat16().float()

    signed = method.signed and not causal
    bias = _values(method.bias, distance, signed) if "bias" in method.hooks else None
    weight = _values(method.weight, distance, signed) if "weight" in method.hooks else None
    if rounded:
        bias = None if bias is None else bias.bfloat16().float()
        weight = None if weight is None else weight.bfloat16().float()
    return bias, weight


def _values(function: Callable[[Tensor], Tensor], distance: Tensor, signed: bool) -> Tensor:
    return torch.stack((function(distance), function(-distance))) if signed else function(distance)


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
    causal: bool = True,
    distance_map: DistanceMap | None = None,
    first: int = 0,
) -> Tensor | None:
    """The `table` for `modify_scores` at distances `first` ... length-1, `[..., length - first]`; None if the method
    has none. causal: see `tables`.

    distance_map: replaces the distances. `length` must then be the length of the text, even with a window (see
    `PositionalMethod.mapped_table`), unless the method is `shift_invariant`.
    """
    distance = torch.arange(first, length, dtype=torch.float32, device=device)
    if not causal and method.signed:
        halves = method.table(distance), method.table(-distance)
        return None if halves[0] is None or halves[1] is None else torch.stack((halves[0], halves[1]))
    return method.table(distance) if distance_map is None else method.mapped_table(distance_map(distance))


def lookup(table: Tensor, distance: Tensor) -> Tensor:
    """The values of a table `[h, n]` at distances `[c, l]` or `[b, c, l]`: `[h, c, l]` or `[b, h, c, l]`. The distances
    of keys after the query are negative; a table `[2, h, n]` has its own half for them.
    """
    if table.dim() == 3:
        follows = distance < 0
        after, before = lookup(table[1], distance), lookup(table[0], distance)
        return torch.where(follows if distance.dim() == 2 else follows[:, None], after, before)
    values = table[:, distance.abs()]
    return values if distance.dim() == 2 else values.transpose(0, 1)


class DocumentTiles(NamedTuple):
    """The documents of some rows in tiles of the fused kernels, of ROWS tokens.

    Attributes:
        tiles: int32 `[n, 5]`, for each tile the row of its document, the document's first token in the row, its length,
            the place of its first token if all documents are padded to complete tiles, and the tile's position in it.
        counts: int32, the number of tiles at position ROWS * i or later, for each i. `tiles` begins with these.
        tokens: int64 `[n * ROWS]`, indices of the flattened rows: the tokens of padded documents, with the last token
            of a document in the place of its padding.
    """

    tiles: Tensor
    counts: Tensor
    tokens: Tensor


class Documents:
    """The documents of the tokens of each row.

    Attributes:
        ids: int64 `[b, t]`. Tokens of a row with the same number are one document, even if others are between them. A
            negative number is padding, which belongs to no document.
        positions: int64 `[b, t]`, the position of each token in its document.
        queries: int64 `[s]`, the places of the queries among the tokens; None: the last s.
        tiles: what the fused kernels read, computed in their first call (see `document_tiles`).
    """

    def __init__(self, ids: Tensor, positions: Tensor | None = None, queries: Tensor | None = None):
        """positions: by default from 0 on. Raises ValueError unless ids are integers `[b, t]`."""
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"document_ids must be integers [b, t], not {ids.dtype} {list(ids.shape)}")
        self.ids = ids.long()
        self._from_zero, self.queries = positions is None, queries
        self.tiles: DocumentTiles | None = None
        self._groups: dict[int, list[tuple[Tensor, Tensor, int]]] = {}
        self.positions = document_positions(self.ids) if positions is None else positions

    def to(self, device: torch.device) -> "Documents":
        """The same documents for tensors on `device`. Their ids are not copied back for `ranges` and `groups`."""
        queries = None if self.queries is None else self.queries.to(device)
        moved = Documents(self.ids.to(device, non_blocking=True), self.positions.to(device, non_blocking=True), queries)
        moved._from_zero, moved._ids_on_cpu = self._from_zero, self._ids_on_cpu
        return moved

    @cached_property
    def _ids_on_cpu(self) -> Tensor:
        return self.ids.cpu()

    @cached_property
    def fill_rows(self) -> bool:
        """Whether each row is one document at the positions from 0 on, without padding. Waits for the ids."""
        ids = self._ids_on_cpu
        return self._from_zero and self.queries is None and bool(((ids == ids[:, :1]) & (ids >= 0)).all())

    @cached_property
    def ranges(self) -> Tensor | None:
        """Int64 `[n, 3]` on the CPU: row, first token and length of each document, if each is a range of tokens at the
        positions from 0 on; otherwise None.
        """
        ids = self._ids_on_cpu
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        row, first = begins.nonzero().unbind(1)
        flat = row * ids.shape[1] + first
        length = flat.diff(append=flat.new_tensor([ids.numel()]))
        ranges = torch.stack((row, first, length), dim=1)[ids[row, first] >= 0]
        named = torch.stack((ranges[:, 0], ids[ranges[:, 0], ranges[:, 1]]), dim=1)
        is_packed = self._from_zero and self.queries is None and len(named.unique(dim=0)) == len(named)
        return ranges if is_packed else None

    def places(self, queries: range, offset: int) -> slice | Tensor:
        """The places of a range of queries, the first of which would be at `offset` in the last tokens."""
        if self.queries is None:
            return slice(queries.start, queries.stop)
        return self.queries[queries.start - offset : queries.stop - offset]

    @cached_property
    def _tokens(self) -> list[Tensor]:
        """The tokens of each document, int64 on the CPU: indices of the flattened rows, in ascending order."""
        ids = self._ids_on_cpu
        numbers = ids - ids.min() + torch.arange(len(ids))[:, None] * (ids.max() - ids.min() + 1)
        order = numbers.flatten().argsort(stable=True)
        counts = numbers.flatten()[order].unique_consecutive(return_counts=True)[1].tolist()
        return [tokens for tokens in order.split(counts) if ids.flatten()[tokens[0]] >= 0]

    def groups(self, q_len: int) -> list[tuple[Tensor, Tensor, int]]:
        """(queries `[n, c]`, keys `[n, l]`, position of the first key if all positions follow each other) of documents
        of equal size and position, as indices of the flattened rows on the device.

        q_len: the number of queries. Documents without a query, and keys after the last query, are left out. The layers
        share the result. Raises ValueError if the queries of a document do not follow each other.
        """
        if q_len in self._groups:
            return self._groups[q_len]
        length = self.ids.shape[1]
        positions = None if self._from_zero else self.positions.cpu().flatten()
        query_at = torch.full((length,), -1, device="cpu")  # the query at each place
        places = torch.arange(length - q_len, length, device="cpu") if self.queries is None else self.queries.cpu()
        query_at[places] = torch.arange(q_len, device="cpu")
        by_size: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}
        for keys in self._tokens:
            queries = query_at[keys % length]
            found = (queries >= 0).nonzero().flatten()
            if not len(found):
                continue
            before, end = int(found[0]), int(found[-1]) + 1
            if end - before != len(found):
                raise ValueError("Documents: the queries of a document must follow each other")
            queries, keys = queries[before:end] + keys[0] // length * q_len, keys[:end]
            dropped = 0 if positions is None else int(positions[keys[before]]) - before
            by_size.setdefault((len(queries), end, dropped), []).append((queries, keys))
        groups = []
        for (*_, dropped), documents in by_size.items():
            queries, keys = (torch.stack(indices).to(self.ids.device) for indices in zip(*documents, strict=True))
            groups.append((queries, keys, dropped))
        self._groups[q_len] = groups
        return groups


def document_positions(document_ids: Tensor) -> Tensor:
    """The position of each token in its document, int64 `[b, t]`, for document ids `[b, t]`."""
    order = document_ids.argsort(dim=1, stable=True)
    ids = document_ids.gather(1, order)
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    first = index.masked_fill(~begins, 0).cummax(dim=1).values
    return torch.empty_like(order).scatter_(1, order, index - first)


def ids_of_sequences(cu_seqlens: Tensor) -> Tensor:
    """Document ids `[1, t]` of sequences that follow each other in one row, as in flash-attention's varlen functions.

    cu_seqlens: `[n + 1]`, 0 and the end of each sequence; the last end is t.
    """
    lengths = cu_seqlens.diff().long()
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)[None]
