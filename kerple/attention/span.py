"""Which of the keys up to its own position a query sees, and blockwise causal attention made of causal calls.

Legend: b batch, s query length, t key length, h heads, d head size, n blocks, B tokens in a block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True)
class Span:
    """What a query sees of the keys up to its own position; without either of these, all of them.

    window: the last so many keys, itself included.
    block: positions fall into blocks of so many, counted from position 0; a query sees its own block and the whole
        block before it (blockwise causal attention of LEX, arXiv 2212.10554).

    Raises ValueError for both at once, or for a size below 1.
    """

    window: int | None = None
    block: int | None = None

    def __post_init__(self):
        if self.window is not None and self.block is not None:
            raise ValueError(f"a query sees a window ({self.window}) or blocks ({self.block}), not both")
        for name, size in (("window", self.window), ("block", self.block)):
            if size is not None and size < 1:
                raise ValueError(f"{name} {size}: a query sees at least itself, so it must be at least 1")

    def max_kv_len(self, length: int) -> int:
        """The most keys that a query can see among `length` positions."""
        most = self.window if self.block is None else 2 * self.block
        return length if most is None else min(length, most)

    def first_key(self, position: Position) -> Position:
        """The earliest position that the query at `position` sees: of one, or of each in a tensor."""
        if self.block is not None:
            first = (position // self.block - 1) * self.block
        elif self.window is not None:
            first = position - self.window + 1
        else:
            first = 0 * position
        return first.clamp(min=0) if isinstance(first, Tensor) else max(0, first)


FULL = Span()


def blockwise(
    causal: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, block: int
) -> Tensor:
    """Blockwise causal attention of `[b, h, s, d]` queries, the last of the `[b, h, t, d]` keys' positions.

    Within its own block and the one before, a block of queries is ordinary `causal` attention, whose queries are the
    last of the keys' positions too. Whole blocks are equal calls, and become one with the blocks in the batch.
    """
    held = key.shape[2] - query.shape[2]
    contexts = []
    position, end = held, key.shape[2]
    while position < end:
        number = position // block
        first = Span(block=block).first_key(position)
        whole = (end - position) // block if number and position % block == 0 else 0
        last = position + whole * block if whole else min((number + 1) * block, end)
        parts = (query[:, :, position - held : last - held], key[:, :, first:last], value[:, :, first:last])
        if whole > 1:
            strides = (block, 2 * block, 2 * block)
            folded = (_fold(states, size, block) for states, size in zip(parts, strides, strict=True))
            contexts.append(_unfold(causal(*folded), len(query)))
        else:
            contexts.append(causal(*parts))
        position = last
    return torch.cat(contexts, dim=2) if len(contexts) > 1 else contexts[0]


def _fold(states: Tensor, size: int, step: int) -> Tensor:
    """`[b, h, s, d]` -> `[b n, h, size, d]`: the pieces of `size` that begin every `step`."""
    return states.unfold(2, size, step).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _unfold(states: Tensor, batch: int) -> Tensor:
    """`[b n, h, B, d]` -> `[b, h, n B, d]`."""
    return states.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
