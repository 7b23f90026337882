"""Inference modes: which keys a query may see when a text is longer than those the model was trained on.

`full`      every earlier token, as in training.
`window@W`  the last W tokens, the query itself included (KERPLE's figures 5 and 7: log, windowed@512). Applied in every
            layer, so what a token can depend on still reaches back layers * (W - 1) tokens.
"""

import re
from dataclasses import dataclass

from megatron.config.errors import UserError

_WINDOW = re.compile(r"window@([1-9][0-9]*)")


@dataclass(frozen=True)
class Mode:
    """`window`: the number of keys a query sees, itself included; None: all."""

    name: str
    window: int | None = None

    def keys(self, length: int) -> float:
        """The mean number of keys of a query in a segment of `length` tokens: what attention costs per token."""
        if self.window is None or self.window >= length:
            return (length + 1) / 2
        return self.window * (1 - (self.window - 1) / (2 * length))


def parse_mode(name: str) -> Mode:
    """The mode of that name. Raises UserError for any other name."""
    if name == "full":
        return Mode(name)
    match = _WINDOW.fullmatch(name)
    if match:
        return Mode(name, int(match[1]))
    raise UserError(
        f"inference mode {name!r} is not known; choose full or window@W, W being a number of tokens, as in window@512"
    )
