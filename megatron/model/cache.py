"""The key-value cache of incremental decoding and chunked evaluation.

Legend: b batch, h heads, t tokens held, s new tokens, d head size.
"""

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer, `[b, h, t, d]`, kept as they enter attention (rotated where the method rotates).

    Memory grows by doubling, up to `max_length` when that is known, so that appending costs amortised constant time
    per token.
    """

    def __init__(self, max_length: int | None = None):
        self.max_length = max_length
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[b, h, s, d]` new keys and values; return all that are held, `[b, h, t + s, d]`, as views."""
        end = self.length + key.shape[2]
        if self._keys is None or end > self._keys.shape[2]:
            self._grow(key, end)
        self._keys[:, :, self.length : end] = key
        self._values[:, :, self.length : end] = value
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def _grow(self, like: Tensor, needed: int) -> None:
        held = 0 if self._keys is None else self._keys.shape[2]
        capacity = max(needed, 2 * held, 64)
        if self.max_length is not None:
            capacity = max(needed, min(capacity, self.max_length)) if held else max(needed, self.max_length)
        batch, heads, _, size = like.shape
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = like.new_empty(batch, heads, capacity, size)
            if old is not None:
                new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def select(self, rows: Tensor) -> None:
        if self._keys is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)


class KVCache:
    """One `LayerCache` per transformer block, and the number of tokens they hold."""

    def __init__(self, num_layers: int, max_length: int | None = None):
        self.layers = [LayerCache(max_length) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens held: the position of the next token."""
        return self.layers[0].length

    def select(self, rows: Tensor) -> None:
        """Keep the rows of the batch given by an int64 tensor of indices, in that order."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        for layer in self.layers:
            layer.select(rows)

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        for layer in self.layers:
            layer.truncate(length)
