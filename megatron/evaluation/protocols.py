"""Evaluation protocols: which tokens are scored, and how much context precedes each of them.

For every length, a protocol plans segments of the token stream. The model reads `length` tokens
from each start, and its predictions from position `first` on are scored against the tokens that
follow. docs/evaluation.md compares the protocols. To add one, write a subclass of `Protocol` here
and add it to `PROTOCOLS`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron.utils.errors import UserError


@dataclass(frozen=True)
class Segments:
    """Segments of equal length in a token stream: inputs `[start, start + length)`, targets shifted
    by one token. Only the predictions at positions `first` to `length - 1` are scored.
    """

    length: int
    starts: Sequence[int]
    first: int = 0

    @property
    def targets(self) -> int:
        """The number of scored tokens."""
        return len(self.starts) * (self.length - self.first)

    def shard(self, rank: int, ranks: int) -> "Segments":
        """The segments of one rank: `rank`, `rank + ranks`, `rank + 2 * ranks`, ..."""
        return replace(self, starts=self.starts[rank::ranks])

    def cut(self, length: int) -> "Segments":
        """The same text in segments of a length that divides this one."""
        offsets = range(0, self.length, length)
        return Segments(length, [start + offset for start in self.starts for offset in offsets])


@dataclass(frozen=True)
class Protocol:
    """A protocol with its size (0 if it has none). Its full name is, for example, last-k@256.

    Class attributes:
        base_name: name without the size.
        default_size: 0 if the protocol has no size.
        uses_budget: whether the token budget limits the number of scored tokens.
    """

    base_name: ClassVar[str]
    default_size: ClassVar[int] = 0
    uses_budget: ClassVar[bool] = True

    size: int = 0

    @property
    def name(self) -> str:
        if not self.size:
            return self.base_name
        return f"{self.base_name}@{self.size}"

    def plan(
        self, available: int, lengths: Sequence[int], token_budget: int | None
    ) -> list[Segments]:
        """The segments of each length, in the order of `lengths`.

        Args:
            available: tokens in the stream. The first token is only context, so `available - 1` can
                be scored.
            lengths: segment lengths in tokens.
            token_budget: maximum number of tokens to score at each length, evenly spaced in the
                stream so that they represent all of it; None for no limit.

        Raises UserError if the stream is too short, or the lengths do not fit the protocol.
        """
        raise NotImplementedError


class NonOverlapping(Protocol):
    """The stream is cut into segments and every prediction is scored (KERPLE, section 5:
    "non-overlapping segments").

    All lengths score the same tokens, so two lengths differ only in context: a multiple of the
    lengths' least common multiple, from the start of the stream, or evenly spaced pieces of that
    size if a budget limits them.

    Bias: the first predictions of a segment have little context, and longer segments have fewer of
    them. A model that ignores distant tokens therefore improves with length too. The windowed modes
    show how large this gain is.
    """

    base_name = "non-overlapping"

    def plan(
        self, available: int, lengths: Sequence[int], token_budget: int | None
    ) -> list[Segments]:
        limit = available - 1
        if token_budget is not None:
            limit = min(limit, token_budget)
        # A segment of each length must fit, and so must a piece that all lengths divide.
        longest, common = max(lengths), math.lcm(*lengths)
        if longest > limit:
            if longest <= available - 1:
                raise UserError(
                    f"a budget of {token_budget:,} tokens is shorter than a segment of "
                    f"{longest:,}: increase it to at least {longest:,}"
                )
            raise _stream_too_short(available, longest)
        if common > limit:
            raise UserError(
                f"lengths {', '.join(map(str, lengths))} cannot score the same tokens: their least "
                f"common multiple is {common:,}, but only {limit:,} tokens can be scored; choose "
                "lengths that divide the longest, or more tokens"
            )

        # Each piece can be cut into segments of every length.
        pieces = Segments(common, _spread(available - 1, common, common, limit // common))
        return [pieces.cut(length) for length in lengths]


class Kerple(Protocol):
    """The first N segments of the stream at every length, 320 by default, as in the original KERPLE
    code (320 batches of one sequence, one run per length).

    Bias: that of `non-overlapping`. In addition, 32 times more text is scored at 16,384 tokens than
    at 512, so two lengths also differ in text.
    """

    base_name = "kerple"
    default_size = 320
    uses_budget = False

    def plan(
        self, available: int, lengths: Sequence[int], token_budget: int | None
    ) -> list[Segments]:
        for length in lengths:
            if self.size * length > available - 1:
                fitting = max(available - 1, 0) // length
                if not fitting:
                    raise _stream_too_short(available, length)
                raise UserError(
                    f"protocol {self.name}: the text has only {fitting:,} segments of {length:,} "
                    f"tokens; use more text, leave out that length, or choose kerple@{fitting}"
                )
        return [Segments(length, range(0, self.size * length, length)) for length in lengths]


class LastK(Protocol):
    """The stream is cut into segments of the longest length, and the last K tokens of each are
    scored, 256 by default (DAPE, arXiv 2405.14722). At shorter lengths, the same tokens are scored
    with less context.

    Bias: none from context, but few tokens are scored, so the standard error is large.
    """

    base_name = "last-k"
    default_size = 256

    def stride(self, lengths: Sequence[int]) -> int:
        """Tokens between the ends of consecutive segments."""
        return max(lengths)

    def plan(
        self, available: int, lengths: Sequence[int], token_budget: int | None
    ) -> list[Segments]:
        # The shortest segment must contain the scored tokens, and the text the longest.
        longest, shortest = max(lengths), min(lengths)
        if shortest < self.size:
            raise UserError(
                f"protocol {self.name} scores {self.size:,} tokens of each segment, but the "
                f"shortest length is {shortest:,}; choose {self.base_name}@{shortest}, or longer "
                "lengths"
            )
        if longest > available - 1:
            raise _stream_too_short(available, longest)

        # Segments of the longest length, as many as the text and the budget allow.
        stride = self.stride(lengths)
        count = (available - 1 - longest) // stride + 1
        if token_budget is not None:
            if token_budget < self.size:
                raise UserError(
                    f"a budget of {token_budget:,} tokens is less than the {self.size:,} of "
                    f"{self.name}; increase it"
                )
            count = min(count, token_budget // self.size)
        starts = _spread(available - 1, longest, stride, count)

        # Shorter segments end where the longest do.
        plans = []
        for length in lengths:
            shifted = [start + longest - length for start in starts]
            plans.append(Segments(length, shifted, length - self.size))
        return plans


class Sliding(LastK):
    """Windows of the given length with a stride of S tokens, 256 by default; the last S predictions
    of each are scored (Press et al., arXiv 2108.12409, and LEX, arXiv 2212.10554).

    Every scored token has length - S + 1 to length tokens of context, and all lengths score the
    same tokens. The cost is length / S times that of `non-overlapping`.
    """

    base_name = "sliding"

    def stride(self, lengths: Sequence[int]) -> int:
        return self.size


_ALL: tuple[type[Protocol], ...] = (NonOverlapping, Kerple, LastK, Sliding)
PROTOCOLS = {each.base_name: each for each in _ALL}
_SIZED = re.compile(r"([a-z-]+)@([1-9][0-9]{0,11})")


def parse_protocol(name: str) -> Protocol:
    """The protocol with this name, e.g. `last-k` or `last-k@64`. Raises UserError if unknown."""
    if name in PROTOCOLS:
        # The name alone has the default size.
        protocol = PROTOCOLS[name]
        return protocol(protocol.default_size)
    # With a size, for protocols that have one.
    match = _SIZED.fullmatch(name)
    if match and match[1] in PROTOCOLS:
        protocol = PROTOCOLS[match[1]]
        if protocol.default_size:
            return protocol(int(match[2]))
    raise UserError(
        f"evaluation protocol {name!r} is unknown; choose {', '.join(PROTOCOLS)}, or with a size "
        "kerple@SEGMENTS, last-k@TOKENS, sliding@STRIDE"
    )


def _spread(available: int, size: int, stride: int, count: int) -> Sequence[int]:
    """The starts of `count` pieces of `size` tokens in a stream of `available` tokens: every
    `stride` tokens if that uses all of the stream, otherwise evenly spaced.
    """
    most = (available - size) // stride + 1
    if count >= most:
        return range(0, most * stride, stride)
    return [index * (available - size + stride) // count for index in range(count)]


def _stream_too_short(available: int, length: int) -> UserError:
    return UserError(
        f"a text of {available:,} tokens is too short for a segment of {length:,} (which needs "
        f"{length + 1:,}): choose lengths of at most {available - 1:,}, or more text (a larger "
        "share of the split, or another corpus)"
    )
