"""What a trial of `tools/soak.py` found."""

from dataclasses import dataclass, field

MEGABYTE = 1 << 20
# Beyond what the command needs without hostile input, and twice the size of that input.
MEMORY_ALLOWANCE = 500 * MEGABYTE
TRACEBACK = "Traceback (most recent call last)"
# In the line that `run_main` prints for an exception that nothing else has caught.
LAST_RESORT = "--traceback prints"


@dataclass
class Outcome:
    """One trial: a command that was killed several times, or one hostile input.

    Attributes:
        group: kind of trial, a row of the table.
        count: number of kills or inputs.
        tracebacks: printed by any process, including errors that only the last-resort handler caught.
        losses: what was lost or differs from an uninterrupted run.
        orphans: number of processes that were left.
        failures: everything else that was wrong.
        memory_ratio: largest resident memory of a process, relative to its limit.
        details: how the trial can be repeated.
    """

    group: str
    count: int = 0
    tracebacks: int = 0
    losses: list[str] = field(default_factory=list)
    orphans: int = 0
    failures: list[str] = field(default_factory=list)
    memory_ratio: float = 0.0
    seconds: float = 0.0
    details: dict[str, object] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not (self.tracebacks or self.losses or self.orphans or self.failures or self.memory_ratio > 1)
