"""Evaluation protocols: which tokens are scored, and what stands before each of them.

A protocol plans, for every length, segments of the token stream: the model reads `length` tokens from each start, and
its predictions from position `first` on are scored against the tokens that follow. docs/evaluation.md compares them.

`non-overlapping`
    The stream is cut into segments of the given length and every prediction is scored, as the KERPLE paper does
    (section 5, "non-overlapping segments"). All lengths score the SAME targets, tokens 1 ... N of the stream, so that
    two lengths differ in context alone. Its bias: the first predictions of a segment have little context, so a longer
    segment also gains from having fewer such beginnings. A model that only ignores what is far away looks better with
    length until that gain is used up, which is why the windowed modes belong beside it.
`kerple`, `kerple@N`
    The first N segments of the stream at every length, by default 320: what the KERPLE release does (320 batches of one
    sequence in one run per length). Its bias, besides that of `non-overlapping`: 32 times more text is scored at 16,384
    tokens than at 512, so two lengths differ in text, too.
`last-k`, `last-k@K`
    The stream is cut into segments of the longest length, and the last K tokens of each are the targets (256 by
    default), as DAPE's paper says (arXiv 2405.14722). At a shorter length the SAME targets are read with fewer tokens
    before them: only the context grows. Its bias: the targets are few, so the error is large.
`sliding`, `sliding@S`
    Windows of the given length that move on by S tokens (256 by default), the last S predictions of each being scored:
    the sliding evaluation of LEX and of Press et al. (arXiv 2108.12409). Every target has length - S + 1 to length
    tokens of context, and the targets are the same at every length. Its cost: length / S times that of
    `non-overlapping`.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.utils.errors import UserError


@dataclass(frozen=True)
class Segments:
    """Equal segments of a token stream: inputs `[start, start + length)`, targets one token further, scored from input
    `first` on.
    """

    length: int
    starts: Sequence[int]
    first: int = 0

    @property
    def targets(self) -> int:
        """The number of tokens scored."""
        return len(self.starts) * (self.length - self.first)

    def share(self, rank: int, ranks: int) -> "Segments":
        """Every `ranks`-th segment, from `rank` on."""
        return replace(self, starts=self.starts[rank::ranks])


@dataclass(frozen=True)
class Kind:
    """A protocol before its size is chosen.

    plan: (tokens available, lengths, budget of targets or None, size) -> segments per length; raises UserError.
    needed: (lengths, budget, size) -> tokens of the stream it reads; None: as many as there are.
    size: the default; None for a protocol without one. by_document: whether it serves texts laid out by document.
    """

    plan: Callable[[int, Sequence[int], int | None, int], list[Segments]]
    needed: Callable[[Sequence[int], int | None, int], int | None]
    size: int | None = None
    by_document: bool = True
    budgeted: bool = True


def non_overlapping(
    available: int, lengths: Sequence[int], token_budget: int | None, size: int | None = None
) -> list[Segments]:
    """Targets 1 ... N at every length, N being the largest common multiple of the lengths within the budget and the
    stream.

    `available` counts the stream's tokens, of which the first is no target. Where each length divides the longest, N is
    a multiple of the longest. Raises UserError when no such N exists, rather than scoring other tokens at one length
    than at another.
    """
    limit = available - 1 if token_budget is None else min(token_budget, available - 1)
    longest, common = max(lengths), math.lcm(*lengths)
    if longest > limit:
        if token_budget is not None and token_budget < longest <= available - 1:
            raise UserError(
                f"a budget of {token_budget:,} tokens holds no segment of {longest:,}: give at least {longest:,}"
            )
        raise _too_short(available, longest)
    if common > limit:
        raise UserError(
            f"lengths {', '.join(map(str, lengths))} cannot score the same tokens: they divide no common number up to "
            f"{limit:,} (the least one is {common:,}); choose lengths that divide the longest, or give more tokens"
        )
    total = limit // common * common
    return [Segments(length, range(0, total, length)) for length in lengths]


def release_segments(available: int, lengths: Sequence[int], token_budget: int | None, count: int) -> list[Segments]:
    """The first `count` segments at every length. The budget has no say. Raises UserError for too short a stream."""
    for length in lengths:
        if count * length > available - 1:
            held = max(available - 1, 0) // length
            if not held:
                raise _too_short(available, length)
            raise UserError(
                f"protocol kerple@{count}: the text holds {held:,} segments of {length:,} tokens; give more text, "
                f"leave out that length, or choose kerple@{held}"
            )
    return [Segments(length, range(0, count * length, length)) for length in lengths]


def last_tokens(available: int, lengths: Sequence[int], token_budget: int | None, count: int) -> list[Segments]:
    """The last `count` tokens of each segment of the longest length, after as much context as each length holds."""
    return _endings("last-k", available, lengths, token_budget, count, step=max(lengths))


def sliding(available: int, lengths: Sequence[int], token_budget: int | None, stride: int) -> list[Segments]:
    """Windows that move on by `stride`; the first window of the longest length sets the first targets."""
    return _endings("sliding", available, lengths, token_budget, stride, step=stride)


def _endings(
    name: str, available: int, lengths: Sequence[int], token_budget: int | None, count: int, step: int
) -> list[Segments]:
    """The last `count` targets of each segment that ends at longest, longest + step ..."""
    longest, shortest = max(lengths), min(lengths)
    if shortest < count:
        raise UserError(
            f"protocol {name}@{count} scores {count:,} tokens of each text, more than a length of {shortest:,} has; "
            f"choose {name}@{shortest}, or longer lengths"
        )
    if longest > available - 1:
        raise _too_short(available, longest)
    endings = (available - 1 - longest) // step + 1
    if token_budget is not None:
        if token_budget < count:
            raise UserError(f"a budget of {token_budget:,} tokens is less than the {count:,} of {name}@{count}")
        endings = min(endings, token_budget // count)
    ends = range(longest, longest + endings * step, step)
    return [Segments(length, [end - length for end in ends], length - count) for length in lengths]


def _too_short(available: int, longest: int) -> UserError:
    return UserError(
        f"{available:,} tokens hold no segment of {longest:,} (which needs {longest + 1:,}): "
        "give more text or a shorter length"
    )


def _of_budget(lengths: Sequence[int], budget: int | None, size: int | None) -> int | None:
    return None if budget is None else max(budget, *lengths) + 1


def _of_endings(lengths: Sequence[int], budget: int | None, count: int, step: int) -> int | None:
    return None if budget is None else max(lengths) + (max(budget // count, 1) - 1) * step + 1


PROTOCOLS: dict[str, Kind] = {
    "non-overlapping": Kind(non_overlapping, _of_budget),
    "kerple": Kind(
        release_segments,
        lambda lengths, budget, size: size * max(lengths) + 1,
        320,
        by_document=False,
        budgeted=False,
    ),
    "last-k": Kind(last_tokens, lambda lengths, budget, size: _of_endings(lengths, budget, size, max(lengths)), 256),
    "sliding": Kind(
        sliding, lambda lengths, budget, size: _of_endings(lengths, budget, size, size), 256, by_document=False
    ),
}
_SIZED = re.compile(r"([a-z-]+)@([1-9][0-9]*)")


@dataclass(frozen=True)
class Protocol:
    """A protocol by its full name, e.g. last-k@256."""

    name: str
    kind: Kind
    size: int | None

    def needed(self, lengths: Sequence[int], token_budget: int | None) -> int | None:
        """How many tokens of the stream it reads at most; None: as many as there are."""
        return self.kind.needed(lengths, token_budget, self.size)

    def plan(self, available: int, lengths: Sequence[int], token_budget: int | None) -> list[Segments]:
        """The segments of each length, in the order of `lengths`. Raises UserError."""
        return self.kind.plan(available, lengths, token_budget, self.size)

    def plan_rows(self, rows: int, lengths: Sequence[int], token_budget: int | None) -> list[Segments]:
        """The segments of a stream of `rows` rows, each of as many tokens as the longest length and one more, none of
        which crosses from one row to the next. Raises UserError.
        """
        if not self.kind.by_document:
            raise UserError(f"protocol {self.name} reads one stream; by document choose non-overlapping or last-k")
        stride = max(lengths) + 1
        within = self.plan(stride, lengths, None)
        if token_budget is not None:
            if within[0].targets > token_budget:
                raise UserError(
                    f"a budget of {token_budget:,} tokens is less than the {within[0].targets:,} of one text"
                )
            rows = min(rows, token_budget // within[0].targets)
        return [
            replace(part, starts=[row * stride + start for row in range(rows) for start in part.starts])
            for part in within
        ]


def parse_protocol(name: str) -> Protocol:
    """The protocol of that name. Raises UserError for an unknown one."""
    match = _SIZED.fullmatch(name)
    kind = PROTOCOLS.get(match[1] if match else name)
    if kind is None or (match and kind.size is None):
        raise UserError(
            f"evaluation protocol {name!r} is not known; choose {', '.join(PROTOCOLS)}, or with a number of segments "
            "or tokens kerple@N, last-k@K, sliding@STRIDE"
        )
    if kind.size is None:
        return Protocol(name, kind, None)
    base, size = (match[1], int(match[2])) if match else (name, kind.size)
    return Protocol(f"{base}@{size}", kind, size)


def plan(protocol: str, available: int, lengths: Sequence[int], token_budget: int | None) -> list[Segments]:
    """`Protocol.plan` of the protocol of that name."""
    return parse_protocol(protocol).plan(available, lengths, token_budget)
