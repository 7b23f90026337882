"""Running a function on one or all ranks of a process group so that every rank gets the result, or
the error.

All functions also work in a single process without a process group. Otherwise every rank of the
group must call them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.utils.errors import UserError, first_line

T = TypeVar("T")
# Prints a line, once per run.
Report = Callable[[str], None]


def run_on_rank_0(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 while the other ranks wait, and return its (picklable) value on
    every rank. Raises what `run_on_all_ranks` raises.
    """

    def on_rank_0() -> T | None:
        if _distributed() and dist.get_rank() > 0:
            return None
        return function()

    values = run_on_all_ranks(on_rank_0)
    return values[0]  # type: ignore[return-value]  # not None unless `function` returned None


def run_on_all_ranks(function: Callable[[], T]) -> list[T]:
    """Call `function` on every rank and return the values of all ranks, in rank order, on every
    rank.

    A rank whose own call raised an exception raises it again. The others raise the UserError (or
    subclass) of the first rank that failed, or a UserError with the first line of another
    exception. Only the first of several ranks with the same UserError prints it.
    """
    if not _distributed():
        return [function()]
    outcome: tuple[T | None, UserError | None]
    failure: Exception | None = None
    try:
        outcome = (function(), None)
    except Exception as error:
        failure = error
        reported = UserError(f"{type(error).__name__} on another rank: {first_line(error)}")
        if isinstance(error, UserError):
            reported = error
        outcome = (None, reported)

    # The first failure is the one that all ranks raise, except those with their own.
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    for rank, (_, first_failure) in enumerate(outcomes):
        if first_failure is not None:
            raised = failure or first_failure
            if isinstance(raised, UserError):
                is_same = str(raised) == str(first_failure)
                raised.printed_by_other_rank = is_same and rank != dist.get_rank()
            raise raised
    return [value for value, _ in outcomes]


def agree(function: Callable[[], T]) -> T:
    """Call `function` on every rank and return this rank's own value, which need not be picklable.
    If one rank fails, all raise what `run_on_all_ranks` raises, so that no rank waits for one that
    has stopped.
    """
    values: list[T] = []
    run_on_all_ranks(lambda: values.append(function()))
    return values[0]


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
