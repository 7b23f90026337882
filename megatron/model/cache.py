"""The key-value cache for incremental decoding and chunked evaluation.

Legend: b batch, s new tokens, t cached tokens, g heads of keys and values of this rank, d head size.
"""

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer, `[b, g, t, d]`, stored after rotation.

    The buffer is allocated for `max_length` tokens if that is given. Otherwise it doubles in size whenever it is full,
    so appending a token costs amortized constant time.
    """

    def __init__(self, max_length: int | None = None):
        self.max_length = max_length
        self.length = 0
        self._buffer: Tensor | None = None  # [2, b, g, capacity, d]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values `[b, g, s, d]`; return all of them, `[b, g, t + s, d]`, as views of the buffer."""
        batch, heads, new, head_size = key.shape
        end, buffer = self.length + new, self._buffer
        if buffer is None or end > buffer.shape[3]:
            capacity = max(end, self.max_length or max(64, 0 if buffer is None else 2 * buffer.shape[3]))
            larger = key.new_empty(2, batch, heads, capacity, head_size)
            if buffer is not None:
                larger[..., : self.length, :] = buffer[..., : self.length, :]
            self._buffer = buffer = larger
        buffer[0, :, :, self.length : end] = key
        buffer[1, :, :, self.length : end] = value
        self.length = end
        return buffer[0, :, :, :end], buffer[1, :, :, :end]

    def select(self, rows: Tensor) -> None:
        if self._buffer is not None:
            self._buffer = self._buffer[:, rows]

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)


class KVCache:
    """The key-value cache for incremental decoding and chunked evaluation: one `LayerCache` per block."""

    def __init__(self, num_layers: int, max_length: int | None = None):
        self.layers = [LayerCache(max_length) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Number of cached tokens, which is the position of the next token."""
        return self.layers[0].length

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows with these int64 indices, in this order."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        for layer in self.layers:
            layer.select(rows)

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on."""
        for layer in self.layers:
            layer.truncate(length)
