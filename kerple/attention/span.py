"""The keys that a query attends to: all keys, a window, or blocks.

Legend: s query length, t key length.
"""

from dataclasses import dataclass, replace
from numbers import Integral
from typing import TypeVar

import torch
from torch import Tensor

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True)
class Span:
    """The keys that a query attends to: all keys up to its own position, unless `window` or `block`
    limits them.

    Raises ValueError if both are set, if a size is below 1 or no integer, for sinks without a
    window, and for blocks or sinks that are not causal.

    Attributes:
        window: the last `window` keys, including its own position.
        block: positions are divided into blocks of this size, starting at position 0. A query
            attends to its own block and to the previous one (blockwise causal attention of LEX,
            arXiv 2212.10554).
        sinks: with a window, a query also attends to the first `sinks` positions of the text
            (StreamingLLM, arXiv 2309.17453; LM-Infinite, arXiv 2308.16137). Only `attend_in_mode`
            supports them.
        causal: if False, a query also attends to the keys after it. A window then has `window` - 1
            keys on both sides.
    """

    window: int | None = None
    block: int | None = None
    sinks: int = 0
    causal: bool = True

    def __post_init__(self) -> None:
        # One limit at most.
        if self.window is not None and self.block is not None:
            raise ValueError(
                f"window ({self.window}) and block ({self.block}) are both set; use one of them"
            )
        # Sizes that are integers, and large enough. A SymInt is a length that torch.compile does
        # not know.
        for name, size in (("window", self.window), ("block", self.block), ("sinks", self.sinks)):
            if size is not None and not isinstance(size, Integral | torch.SymInt):
                raise ValueError(f"{name} must be an integer, not {size!r}")
        for name, size in (("window", self.window), ("block", self.block)):
            if size is not None and size < 1:
                raise ValueError(
                    f"{name} must be at least 1, since a query attends to its own position; got "
                    f"{size}"
                )
        if self.sinks < 0 or (self.sinks and self.window is None):
            raise ValueError(f"sinks {self.sinks} must be 0 or more, and sinks need a window")
        if not self.causal and (self.block is not None or self.sinks):
            raise ValueError(
                "block and sinks need causal attention; with causal=False, use a window"
            )

    def within(self, window: int | None) -> "Span":
        """This span, limited to the last `window` keys, if any. Raises ValueError with blocks."""
        if window is None or (self.window is not None and self.window <= window):
            return self
        return replace(self, window=window)

    def max_kv_len(self, length: int) -> int:
        """The most keys up to its own position that any of `length` queries attends to."""
        if self.block is not None:
            return min(length, 2 * self.block)
        if self.window is not None:
            return min(length, self.window + self.sinks)
        return length

    def first_key(self, position: Position) -> Position:
        """The first key position that the query at `position` attends to, without sinks;
        elementwise for a tensor.
        """
        if self.block is not None:
            first = (position // self.block - 1) * self.block  # the previous block's start
        elif self.window is not None:
            first = position - self.window + 1
        else:
            first = 0 * position
        if isinstance(first, Tensor):
            return first.clamp(min=0)
        return max(0, first)

    def mask(
        self, queries: slice | range, keys: slice | range, device: torch.device | str
    ) -> Tensor:
        """Bool `[queries, keys]` for ranges of positions. True = masked: the query does not attend
        to the key.

        The mask is built on `device`. A copy from the CPU would synchronize the host with the
        device.
        """
        # The positions of both, as parts of one range.
        start = min(queries.start, keys.start)
        positions = torch.arange(start, max(queries.stop, keys.stop), device=device)
        query = positions[queries.start - start : queries.stop - start, None]
        return self.mask_pairs(query, positions[keys.start - start : keys.stop - start])

    def mask_pairs(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether keys are masked, for positions that can be broadcast to each other."""
        if not self.causal:
            # A window on both sides, or every key.
            distance = (query - key).abs_()
            if self.window is None:
                return torch.zeros_like(distance, dtype=torch.bool)
            return distance >= self.window

        # Keys after the query, and those before its window or blocks, except the sinks.
        mask = key > query
        if self == FULL:
            return mask
        return mask | ((key < self.first_key(query)) & (key >= self.sinks))


FULL = Span()
EVERY_KEY = Span(causal=False)
