"""The key-value cache for incremental decoding and chunked evaluation.

Legend: b batch, s new tokens, t cached tokens, n heads of this rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kerple.attention import Span


class LayerCache:
    """The states of one layer, `[b, n, t, size]` each: keys (stored after rotation), values, and
    with a decay its prefix sums.

    Buffers are allocated for `max_length` tokens if that is given. Otherwise they double in size
    whenever they are full, so appending a token costs amortized constant time. With a `window`,
    keys that no later query sees are dropped, and the buffers have at most two windows plus the new
    tokens. With `sinks`, the first tokens of the text are kept as well.
    """

    def __init__(self, max_length: int | None = None, window: int | None = None, sinks: int = 0):
        self.max_length = max_length
        self.window = window
        self.sinks = sinks
        self.length = 0  # of the text, including dropped tokens
        self._stored = 0  # in the buffers
        self._sinks: list[Tensor] = []  # [b, n, up to `sinks`, size] each
        self._buffers: list[Tensor] = []  # [b, n, capacity, size] each

    def append(self, *states: Tensor) -> list[Tensor]:
        """Append states `[b, n, s, size]`, the same kinds in each call; return all of them,
        `[b, n, t + s, size]`, as views of the buffers. With a window, t is at most `sinks` +
        `window` - 1. If there are sinks and tokens after them were dropped, they are copies.
        """
        # The first stored token that the new ones see.
        new, first = states[0].shape[2], 0
        if self.window is not None:
            # The first new token is one of the `window` tokens that it sees.
            first = max(0, self._stored - self.window + 1)
        if not self._buffers or self._stored + new > self._buffers[0].shape[2]:
            self._grow(states, first)
            first = 0

        # Write behind the stored tokens.
        end = self._stored + new
        for buffer, part in zip(self._buffers, states, strict=True):
            buffer[:, :, self._stored : end] = part
        self._stored = end
        recent = [buffer[:, :, first:end] for buffer in self._buffers]
        if self.window is None or not self.sinks:
            self.length += new
            return recent

        # Keep the first tokens of the text, and put those before the window in front.
        if self.length < self.sinks:
            missing = self.sinks - self.length
            sinks = self._sinks or [part[:, :, :0] for part in states]
            pairs = zip(sinks, states, strict=True)
            self._sinks = [torch.cat((old, part[:, :, :missing]), dim=2) for old, part in pairs]
        self.length += new
        dropped = self.length - (end - first)  # the position of the first recent token
        if not dropped:
            return recent
        pairs = zip(self._sinks, recent, strict=True)
        return [torch.cat((sinks[:, :, :dropped], part), dim=2) for sinks, part in pairs]

    def _grow(self, states: Sequence[Tensor], first: int) -> None:
        """Make room for the states in larger buffers, without tokens before `first`."""
        kept = self._stored - first
        needed, doubled = kept + states[0].shape[2], 64
        if self._buffers:
            doubled = max(64, 2 * self._buffers[0].shape[2])
        # Room for twice the tokens, or for all of the text; with a window, for one window more than
        # now.
        capacity = max(needed, self.max_length or doubled)
        if self.window is not None:
            capacity = min(capacity, needed + self.window)
        larger = [part.new_empty(*part.shape[:2], capacity, part.shape[3]) for part in states]
        for buffer, old in zip(larger, self._buffers, strict=False):
            buffer[:, :, :kept] = old[:, :, first : self._stored]
        self._buffers, self._stored = larger, kept

    def last(self) -> list[Tensor] | None:
        """The states of the last token, `[b, n, 1, size]` each; None if there is none."""
        return [buffer[:, :, self._stored - 1 : self._stored] for buffer in self._buffers] or None

    def select(self, rows: Tensor) -> None:
        self._buffers = [buffer[rows] for buffer in self._buffers]
        self._sinks = [sinks[rows] for sinks in self._sinks]


class KVCache:
    """One `LayerCache` per block."""

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
