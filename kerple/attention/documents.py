"""The documents of the tokens of each row, in which distances count.

Legend: b batch, s query length, t key length; n documents of equal size, c queries, l keys.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class DocumentTiles(NamedTuple):
    """The documents of some rows in tiles of the fused kernels, of ROWS tokens.

    Attributes:
        tiles: int32 `[n, 5]`, for each tile the row of its document, the document's first token in
            the row, its length, the place of its first token if all documents are padded to
            complete tiles, and the tile's position in it.
        counts: int32, the number of tiles at position ROWS * i or later, for each i. `tiles` begins
            with these.
        tokens: int64 `[n * ROWS]`, indices of the flattened rows: the tokens of padded documents,
            with the last token of a document in the place of its padding.
    """

    tiles: Tensor
    counts: Tensor
    tokens: Tensor


class Documents:
    """The documents of the tokens of each row.

    Attributes:
        ids: int64 `[b, t]`. Tokens of a row with the same number are one document, even if others
            are between them. A negative number is padding, which belongs to no document.
        positions: int64 `[b, t]`, the position of each token in its document.
        queries: int64 `[s]`, the places of the queries among the tokens; None: the last s.
        tiles: what the fused kernels read, computed in their first call (see `document_tiles`).
    """

    def __init__(self, ids: Tensor, positions: Tensor | None = None, queries: Tensor | None = None):
        """positions: by default from 0 on. Raises ValueError unless ids are integers `[b, t]`."""
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(
                f"document_ids must be integers [b, t], not {ids.dtype} {list(ids.shape)}"
            )
        # Positions that begin at 0 follow from the ids; given ones may continue a text.
        self.ids = ids.long()
        self._from_zero = positions is None
        self.queries = queries
        self.tiles: DocumentTiles | None = None
        self._groups: dict[int, list[tuple[Tensor, Tensor, int]]] = {}
        if positions is None:
            positions = document_positions(self.ids)
        self.positions = positions

    def to(self, device: torch.device) -> "Documents":
        """The same documents for tensors on `device`. Their ids are not copied back for `ranges`
        and `groups`.
        """
        ids = self.ids.to(device, non_blocking=True)
        positions = self.positions.to(device, non_blocking=True)
        moved = Documents(ids, positions)
        if self.queries is not None:
            moved.queries = self.queries.to(device)
        moved._from_zero = self._from_zero
        moved._ids_on_cpu = self._ids_on_cpu
        return moved

    @cached_property
    def _ids_on_cpu(self) -> Tensor:
        return self.ids.cpu()

    @cached_property
    def fill_rows(self) -> bool:
        """Whether each row is one document from position 0 on, without padding. Waits for ids."""
        ids = self._ids_on_cpu
        is_first = (ids == ids[:, :1]) & (ids >= 0)
        return self._from_zero and self.queries is None and bool(is_first.all())

    @cached_property
    def ranges(self) -> Tensor | None:
        """Int64 `[n, 3]` on the CPU: row, first token and length of each document, if each is a
        range of tokens at the positions from 0 on; otherwise None.
        """
        ids = self._ids_on_cpu
        # A range begins where the document differs from that of the token before.
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        row, first = begins.nonzero().unbind(1)
        flat = row * ids.shape[1] + first
        length = flat.diff(append=flat.new_tensor([ids.numel()]))
        id_of_range = ids[row, first]
        is_document = id_of_range >= 0
        ranges = torch.stack((row, first, length), dim=1)
        ranges = ranges[is_document]  # [n, 3]

        # A document that has several ranges has other tokens between them.
        named = torch.stack((row, id_of_range), dim=1)
        named = named[is_document]  # [n, 2]
        are_documents = len(named.unique(dim=0)) == len(named)
        if self._from_zero and self.queries is None and are_documents:
            return ranges
        return None

    def places(self, queries: slice, offset: int) -> slice | Tensor:
        """The places of queries, the first of which would be at `offset` in the last tokens."""
        if self.queries is None:
            return queries
        # Queries that are not the last tokens have their own list of places.
        return self.queries[queries.start - offset : queries.stop - offset]

    @cached_property
    def _tokens(self) -> list[Tensor]:
        """The tokens of each document, int64 on the CPU: ascending indices of the flat rows."""
        ids = self._ids_on_cpu
        # A number for each document of each row. Sums with the ids themselves could overflow.
        found, index = ids.unique(return_inverse=True)
        rows = torch.arange(len(ids))[:, None] * len(found)
        numbers = (index + rows).flatten()
        order = numbers.argsort(stable=True)
        _, counts = numbers[order].unique_consecutive(return_counts=True)
        documents = order.split(counts.tolist())
        flat_ids = ids.flatten()
        return [tokens for tokens in documents if flat_ids[tokens[0]] >= 0]

    def groups(self, q_len: int) -> list[tuple[Tensor, Tensor, int]]:
        """(queries `[n, c]`, keys `[n, l]`, position of the first key if all positions follow each
        other) of documents of equal size and position, as indices of the flattened rows on the
        device.

        q_len: the number of queries. Documents without a query, and keys after the last query, are
        left out. The layers share the result. Raises ValueError if the queries of a document do not
        follow each other.
        """
        if q_len in self._groups:
            return self._groups[q_len]
        # The query at each place of a row, or -1.
        length = self.ids.shape[1]
        positions = self.positions
        if not self._from_zero:  # otherwise nothing reads them
            positions = positions.cpu().flatten()
        query_at = torch.full((length,), -1, device="cpu")
        places = torch.arange(length - q_len, length, device="cpu")
        if self.queries is not None:
            places = self.queries.cpu()
        query_at[places] = torch.arange(q_len, device="cpu")

        # The queries and keys of each document, by their numbers and the position of the first key.
        by_size: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}
        for keys in self._tokens:
            queries = query_at[keys % length]
            found = (queries >= 0).nonzero().flatten()
            if not len(found):
                continue
            # Keys before the first query, and those up to the last one.
            before = int(found[0])
            end = int(found[-1]) + 1
            if end - before != len(found):
                raise ValueError("Documents: the queries of a document must follow each other")
            row = keys[0] // length
            queries = queries[before:end] + row * q_len
            keys = keys[:end]
            dropped = 0
            if not self._from_zero:
                dropped = int(positions[keys[before]]) - before
            size = len(queries), end, dropped
            by_size.setdefault(size, []).append((queries, keys))

        # One group for each kind, on the device.
        groups = []
        device = self.ids.device
        for (*_, dropped), documents in by_size.items():
            all_queries, all_keys = zip(*documents, strict=True)
            queries = torch.stack(all_queries).to(device)  # [n, c]
            keys = torch.stack(all_keys).to(device)  # [n, l]
            groups.append((queries, keys, dropped))
        self._groups[q_len] = groups
        return groups


def document_positions(document_ids: Tensor) -> Tensor:
    """The position of each token in its document, int64 `[b, t]`, for document ids `[b, t]`."""
    order = document_ids.argsort(dim=1, stable=True)
    ids = document_ids.gather(1, order)
    # In the order of documents, the position is the distance to the document's first token.
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    first = index.masked_fill(~begins, 0).cummax(dim=1).values
    # Back in the order of the row.
    positions = torch.empty_like(order)
    return positions.scatter_(1, order, index - first)


def ids_of_sequences(cu_seqlens: Tensor) -> Tensor:
    """Document ids `[1, t]` of sequences that follow each other in one row, as in flash-attention's
    varlen functions.

    cu_seqlens: `[n + 1]`, 0 and the end of each sequence; the last end is t.
    """
    # The number of a sequence, as often as it has tokens.
    lengths = cu_seqlens.diff().long()
    numbers = torch.arange(len(lengths), device=lengths.device)
    return numbers.repeat_interleave(lengths)[None]
