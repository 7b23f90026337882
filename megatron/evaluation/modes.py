"""Inference modes: which keys a query may see when a text is longer than those the model was trained on.

`full`         every earlier token, as in training.
`window@W`     the last W tokens, the query itself included (KERPLE's figures 5 and 7: log, windowed@512).
`blockwise@L`  blockwise causal attention (LEX, arXiv 2212.10554) for a training length of L: positions fall into blocks
               of L / 2, and a query sees its own block and the one before, L / 2 + 1 to L tokens.
`blockwise`    `blockwise@L` with the model's own training length.

Each applies in every layer, so what a token can depend on reaches further back than what one query sees: with a window,
layers * (W - 1) tokens.
"""

import re
from dataclasses import dataclass

from kerple.attention import FULL, Span
from megatron.utils.errors import UserError

_SIZED = re.compile(r"(window|blockwise)@([1-9][0-9]*)")


@dataclass(frozen=True)
class Mode:
    """A mode's name, and the keys that a query sees in it."""

    name: str
    span: Span = FULL

    def keys(self, length: int) -> float:
        """The mean number of keys of a query in a segment of `length` tokens: what attention costs per token."""
        window, block = self.span.window, self.span.block
        if block is not None:
            whole, rest = divmod(length, block)
            own = whole * block * (block + 1) // 2 + rest * (rest + 1) // 2
            return (own + block * max(0, length - block)) / length
        if window is None or window >= length:
            return (length + 1) / 2
        return window * (1 - (window - 1) / (2 * length))


def parse_mode(name: str, train_length: int | None = None) -> Mode:
    """The mode of that name; `blockwise` needs the training length, in tokens. Raises UserError for any other name, and
    for a length that has no half.
    """
    if name == "full":
        return Mode(name)
    match = _SIZED.fullmatch(name)
    if match and match[1] == "window":
        return Mode(name, Span(window=int(match[2])))
    if match or name == "blockwise":
        length = int(match[2]) if match else train_length
        if length is None:
            raise UserError(
                "inference mode blockwise takes its blocks from the training length, which is not known here; "
                "name it, as in blockwise@512, or pass train_length"
            )
        if length % 2:
            raise UserError(
                f"inference mode {name}: blocks are half the training length, and {length} is odd; "
                f"name an even one, as in blockwise@{length - 1 or 2}"
            )
        return Mode(name, Span(block=length // 2))
    raise UserError(
        f"inference mode {name!r} is not known; choose full, window@W, blockwise or blockwise@L, W and L being numbers "
        "of tokens, as in window@512"
    )
