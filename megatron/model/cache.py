"""The key-value cache for incremental decoding and chunked evaluation.

Legend: b batch, s new tokens, t cached tokens, n heads of this rank: of keys and values, or of queries (h).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kerple.attention import Span


class LayerCache:
    """The states of one layer, `[b, n, t, size]` each: keys (stored after rotation), values, and with a decay its
    prefix sums.

    Buffers are allocated for `max_length` tokens if that is given. Otherwise they double in size whenever they are
    full, so appending a token costs amortized constant time. With a `window`, keys that no later query sees are
    dropped, and the buffers have at most two windows plus the new tokens. With `sinks`, the first tokens of the text
    are kept as well.
    """

    def __init__(self, max_length: int | None = None, window: int | None = None, sinks: int = 0):
        self.max_length = max_length
        self.window = window
        self.sinks = 0 if window is None else sinks
        self.length = 0  # of the text, including dropped tokens
        self._stored = 0  # in the buffers
        self._sinks: list[Tensor] = []  # [b, n, up to `sinks`, size] each
        self._buffers: list[Tensor] = []  # [b, n, capacity, size] each

    def append(self, *states: Tensor) -> list[Tensor]:
        """Append states `[b, n, s, size]`, the same kinds in each call; return all of them, `[b, n, t + s, size]`, as
        views of the buffers. With a window, t is at most `sinks` + `window` - 1. If there are sinks and tokens after
        them were dropped, they are copies.
        """
        new = states[0].shape[2]
        first = 0 if self.window is None else max(0, self._stored - self.window + 1)
        capacity = self._buffers[0].shape[2] if self._buffers else 0
        if not self._buffers or self._stored + new > capacity:
            kept = self._stored - first
            capacity = max(kept + new, self.max_length or max(64, 2 * capacity))
            if self.window is not None:
                capacity = min(capacity, kept + new + self.window)
            larger = [part.new_empty(*part.shape[:2], capacity, part.shape[3]) for part in states]
            for buffer, old in zip(larger, self._buffers, strict=False):
                buffer[:, :, :kept] = old[:, :, first : self._stored]
            self._buffers, self._stored, first = larger, kept, 0
        end = self._stored + new
        for buffer, part in zip(self._buffers, states, strict=True):
            buffer[:, :, self._stored : end] = part
        self._stored, self.length = end, self.length + new
        recent = [buffer[:, :, first:end] for buffer in self._buffers]
        if self.sinks:
            missing_sinks = self.sinks - (self._sinks[0].shape[2] if self._sinks else 0)
            if missing_sinks > 0:
                more = [part[:, :, :missing_sinks] for part in states]
                pairs = zip(self._sinks, more, strict=True) if self._sinks else ((part,) for part in more)
                self._sinks = [torch.cat(parts, dim=2) for parts in pairs]
            dropped = self.length - (end - first)  # the position of the first recent token
            if dropped:
                pairs = zip(self._sinks, recent, strict=True)
                recent = [torch.cat((sinks[:, :, :dropped], part), dim=2) for sinks, part in pairs]
        return recent

    def last(self) -> list[Tensor] | None:
        """The states of the last token, `[b, n, 1, size]` each; None if there is none."""
        return [buffer[:, :, self._stored - 1 : self._stored] for buffer in self._buffers] or None

    def select(self, rows: Tensor) -> None:
        self._buffers = [buffer[rows] for buffer in self._buffers]
        self._sinks = [sinks[rows] for sinks in self._sinks]


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
