"""Evaluation protocols: which tokens are scored, and what stands before each of them.

A protocol plans, for every length, segments of the token stream: the model reads `length` tokens from each start, and
its predictions from position `first` on are scored against the tokens that follow.

`non-overlapping`
    The stream is cut into segments of the given length and every prediction is scored, as the KERPLE paper does
    (section 5, "non-overlapping segments"). All lengths score the SAME targets, tokens 1 ... N of the stream, so that
    two lengths differ in context alone. (KERPLE's released code scores 320 segments at every length, hence 32 times
    more text at 16,384 tokens than at 512.) Its bias: the first predictions of a segment have little context, so a
    longer segment also gains from having fewer such beginnings. A model that only ignores what is far away looks better
    with length until that gain is used up, which is why the windowed modes belong beside it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.config.errors import UserError


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


def non_overlapping(available: int, lengths: Sequence[int], token_budget: int | None) -> list[Segments]:
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
        raise UserError(
            f"{available:,} tokens hold no segment of {longest:,} (which needs {longest + 1:,}): "
            "give more text or a shorter length"
        )
    if common > limit:
        raise UserError(
            f"lengths {', '.join(map(str, lengths))} cannot score the same tokens: they divide no common number up to "
            f"{limit:,} (the least one is {common:,}); choose lengths that divide the longest, or give more tokens"
        )
    total = limit // common * common
    return [Segments(length, range(0, total, length)) for length in lengths]


PROTOCOLS: dict[str, Callable[[int, Sequence[int], int | None], list[Segments]]] = {"non-overlapping": non_overlapping}


def plan(protocol: str, available: int, lengths: Sequence[int], token_budget: int | None) -> list[Segments]:
    """The segments of each length, in the order of `lengths`. Raises UserError."""
    if protocol not in PROTOCOLS:
        raise UserError(f"evaluation protocol {protocol!r} is not known; choose {' or '.join(PROTOCOLS)}")
    return PROTOCOLS[protocol](available, lengths, token_budget)
