"""The key-value cache for incremental decoding and chunked evaluation.

Legend: b batch, s new tokens, t cached tokens, g heads of keys and values of this rank, d head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kerple.attention import Span


class LayerCache:
    """Keys and values of one layer, `[b, g, t, d]`, stored after rotation.

    The buffer is allocated for `max_length` tokens if that is given. Otherwise it doubles in size whenever it is full,
    so appending a token costs amortized constant time. With a `window`, keys that no later query sees are dropped, and
    the buffer has at most two windows plus the new tokens. With `sinks`, the first tokens of the text are kept as well.
    """

    def __init__(self, max_length: int | None = None, window: int | None = None, sinks: int = 0):
        self.max_length = max_length
        self.window = window
        self.sinks = 0 if window is None else sinks
        self.length = 0  # of the text, including dropped tokens
        self._stored = 0  # in the buffer
        self._sinks: Tensor | None = None  # [2, b, g, up to `sinks`, d]
        self._buffer: Tensor | None = None  # [2, b, g, capacity, d]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values `[b, g, s, d]`; return all of them, `[b, g, t + s, d]`, as views of the buffer. With a
        window, t is at most `sinks` + `window` - 1. Without the tokens between the sinks and the window, they are
        copies.
        """
        batch, heads, new, head_size = key.shape
        first = 0 if self.window is None else max(0, self._stored - self.window + 1)
        buffer = self._buffer
        if buffer is None or self._stored + new > buffer.shape[3]:
            needed = self._stored - first + new
            capacity = max(needed, self.max_length or max(64, 0 if buffer is None else 2 * buffer.shape[3]))
            if self.window is not None:
                capacity = min(capacity, needed + self.window)
            larger = key.new_empty(2, batch, heads, capacity, head_size)
            if buffer is not None:
                larger[..., : needed - new, :] = buffer[..., first : self._stored, :]
            self._buffer, self._stored, first, buffer = larger, needed - new, 0, larger
        end = self._stored + new
        buffer[0, :, :, self._stored : end] = key
        buffer[1, :, :, self._stored : end] = value
        self._stored, self.length = end, self.length + new
        recent = buffer[..., first:end, :]
        if self.sinks:
            missing_sinks = self.sinks - (0 if self._sinks is None else self._sinks.shape[3])
            if missing_sinks > 0:
                more = torch.stack([states[:, :, :missing_sinks] for states in (key, value)])
                self._sinks = more if self._sinks is None else torch.cat((self._sinks, more), dim=3)
            dropped = self.length - (end - first)  # the position of the first recent token
            if dropped and self._sinks is not None:
                recent = torch.cat((self._sinks[..., :dropped, :], recent), dim=3)
        return recent[0], recent[1]

    def last_key(self) -> Tensor | None:
        """The key of the last token, `[b, g, 1, d]`; None if there is none."""
        return None if self._buffer is None else self._buffer[0, :, :, self._stored - 1 : self._stored]

    def select(self, rows: Tensor) -> None:
        if self._buffer is not None:
            self._buffer = self._buffer[:, rows]
        if self._sinks is not None:
            self._sinks = self._sinks[:, rows]


class KVCache:
    """The key-value cache for incremental decoding and chunked evaluation: one `LayerCache` per block."""

    def __init__(self, spans: Sequence[Span], max_length: int | None = None):
        """spans: the keys that the queries of each block attend to."""
        self.layers = [LayerCache(max_length, span.window, span.sinks) for span in spans]

    @property
    def length(self) -> int:
        """Number of tokens so far, which is the position of the next token."""
        return self.layers[0].length

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows with these int64 indices, in this order."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        for layer in self.layers:
            layer.select(rows)
