"""Several documents in one row: a query attends only to keys of its own document, whose positions start at 0.

Legend: b batch, s query length, t key length, n documents of equal size, c queries, l keys.
"""

from functools import cached_property

import torch
from torch import Tensor


class Documents:
    """The documents of the tokens of each row.

    Attributes:
        ids: int64 `[b, t]`. Tokens of a row with the same number are one document, even if others are between them. A
            negative number is padding, which belongs to no document.
        positions: int64 `[b, t]`, the position of each token in its document.
    """

    def __init__(self, ids: Tensor):
        """Raises ValueError unless ids are integers `[b, t]`."""
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"document_ids must be integers [b, t], not {ids.dtype} {list(ids.shape)}")
        self.ids = ids.long()
        self.positions = document_positions(self.ids)

    @cached_property
    def _tokens(self) -> list[Tensor]:
        """The tokens of each document, int64 on the CPU: indices of the flattened rows, in ascending order."""
        ids = self.ids.cpu()
        numbers = ids - ids.min() + torch.arange(len(ids))[:, None] * (ids.max() - ids.min() + 1)
        order = numbers.flatten().argsort(stable=True)
        counts = numbers.flatten()[order].unique_consecutive(return_counts=True)[1].tolist()
        return [tokens for tokens in order.split(counts) if ids.flatten()[tokens[0]] >= 0]

    def groups(self, q_len: int) -> list[tuple[Tensor, Tensor]]:
        """(queries `[n, c]`, keys `[n, l]`) of documents of equal size, as indices of the flattened rows on the device.

        q_len: the number of queries, the last tokens of each row. Documents without a query are left out.
        """
        length = self.ids.shape[1]
        by_size: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for keys in self._tokens:
            row, columns = keys[0] // length, keys % length
            queries = columns[columns >= length - q_len] - (length - q_len) + row * q_len
            if len(queries):
                by_size.setdefault((len(queries), len(keys)), []).append((queries, keys))
        groups = []
        for documents in by_size.values():
            queries, keys = (torch.stack(indices).to(self.ids.device) for indices in zip(*documents, strict=True))
            groups.append((queries, keys))
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
