"""Inference modes: which keys a query may attend to when a text is longer than the training length.

`full`         all earlier tokens, as in training.
`window@W`     the last W tokens including the query itself (KERPLE, figures 5 and 7: log, windowed@512).
`blockwise@L`  blockwise causal attention (LEX, arXiv 2212.10554) for a training length of L: positions are divided into
               blocks of L / 2, and a query attends to its own block and the one before, L / 2 + 1 to L tokens.
`blockwise`    `blockwise@L` with the model's own training length.

The mode applies in every layer, so a token can depend on more tokens than one query attends to: with a window, on
layers * (W - 1) earlier tokens.
"""

import re
from dataclasses import dataclass

from kerple.attention import FULL, Span
from megatron.utils.errors import UserError

_SIZED = re.compile(r"(window|blockwise)@([1-9][0-9]{0,11})")


@dataclass(frozen=True)
class Mode:
    """An inference mode: its name and the span of keys that a query may attend to."""

    name: str
    span: Span = FULL

    def mean_keys(self, length: int) -> float:
        """The mean number of keys per query in a segment of `length` tokens: the cost of attention per token."""
        window, block = self.span.window, self.span.block
        if block is not None:
            full_blocks, rest = divmod(length, block)
            keys_in_own_block = full_blocks * block * (block + 1) // 2 + rest * (rest + 1) // 2
            return (keys_in_own_block + block * max(0, length - block)) / length
        if window is None or window >= length:
            return (length + 1) / 2
        return window * (1 - (window - 1) / (2 * length))


def parse_mode(name: str, train_length: int | None = None) -> Mode:
    """The mode with this name. train_length: in tokens; only `blockwise` needs it.

    Raises UserError for an unknown name, and for blocks of an odd training length.
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
                "inference mode blockwise depends on the training length, which is not known here; "
                "use blockwise@LENGTH, e.g. blockwise@512, or pass train_length"
            )
        if length % 2:
            raise UserError(
                f"inference mode {name}: blocks are half the training length, but {length} is odd; "
                f"choose an even length, e.g. blockwise@{length - 1 or 2}"
            )
        return Mode(name, Span(block=length // 2))
    raise UserError(
        f"inference mode {name!r} is unknown; choose full, window@W, blockwise or blockwise@L, where W and L are "
        "numbers of tokens, e.g. window@512"
    )
