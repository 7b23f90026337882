"""What a trial found (`Outcome`), and trials of a command on a hostile input (`run_case`)."""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import psutil
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron.utils.command_line import EXIT_STATUS_OF_USER_ERROR
from tests.support.forks import start_run

MEGABYTE = 1 << 20
# Beyond what the command needs without hostile input, and twice the size of that input.
MEMORY_ALLOWANCE = 500 * MEGABYTE
TRACEBACK = "Traceback (most recent call last)"
# In the line that `run_main` prints for an exception that nothing else has caught.
LAST_RESORT = "--traceback prints"
SECONDS = 60.0
# The command may map this much before an allocation fails, so that a case cannot exhaust the machine's memory.
ADDRESS_SPACE = 6000 * MEGABYTE
OUT_OF_MEMORY = "failed: out of memory"  # in the line of the last-resort handler
# Carriage returns are allowed before the progress bars of libraries.
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?![^\r\n]*%\|)")


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


@dataclass(frozen=True)
class Case:
    """A command and its hostile input.

    Attributes:
        command: script, relative to the root of the project, and its options.
        statuses: exit statuses that are allowed.
        constants: "module:NAME" -> value, replaced in the process.
        stop_at: the command is stopped when it prints this.
        accepted_at: if it has printed this, it may do what the input asks for: run longer than `SECONDS`, need more
            memory, or end because there is not enough.
        problem: returns what is wrong with the exit status and the output, or None.
    """

    command: list[str]
    statuses: tuple[int, ...] = (0, 2)
    constants: Mapping[str, object] = field(default_factory=dict)
    stop_at: bytes | None = None
    accepted_at: bytes | None = None
    problem: Callable[[int, str], str | None] = lambda status, output: None


# hypothesis's function that draws a value of a strategy.
Draw = Callable[[st.SearchStrategy[Any]], Any]
# Draws the input of a case and writes it to a folder. Servers and the like stay open as long as the ExitStack.
MakeCase = Callable[[Draw, Path, contextlib.ExitStack], Case]


def draw_seeded(make: Callable[[Draw], Any], seed: str) -> Any:
    """What `make` returns with a function that draws values of strategies, the same for the same seed."""
    drawn = []

    @hypothesis.seed(seed)
    @settings(max_examples=2, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=HealthCheck)
    @given(st.data())
    def draw_second(data: Any) -> None:
        if data.draw(st.integers(0, 2**32)):  # the first example is always the simplest one
            drawn.append(make(data.draw))

    draw_second()
    return drawn[-1]


def pick(draw: Draw, values: Iterable[Any]) -> Any:
    return draw(st.sampled_from(list(values)))


class Cases:
    """Trials of hostile inputs of several groups, in equal shares."""

    def __init__(self, groups: dict[str, MakeCase], only: str):
        self._groups = {name: make for name, make in groups.items() if only in name}

    def trial(self, seed: str, folder: Path, limit: int) -> Outcome:
        with contextlib.ExitStack() as resources:
            group, case = self.draw(seed, folder, resources)
            return run_case(group, case, folder)

    def draw(self, seed: str, folder: Path, resources: contextlib.ExitStack) -> tuple[str, Case]:
        """A case in a new folder. Its command runs later: hypothesis changes the recursion limit."""

        def make(draw: Draw) -> tuple[str, Case]:
            if folder.exists():  # hypothesis has given up an example that was too large
                remove(folder)
            folder.mkdir()
            group = pick(draw, self._groups)
            return group, self._groups[group](draw, folder, resources)

        return draw_seeded(make, seed)


def run_case(group: str, case: Case, folder: Path) -> Outcome:
    """Run the command of a case that was made in `folder`, and judge how it ends, what it prints, and how much memory
    it needs. It may write only in `folder`, which is also its home, and may not create the file `executed`.
    """
    started_at = time.monotonic()
    size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    outside = set(folder.parent.iterdir())
    normal_peak = psutil.Process().memory_info().rss  # the fork starts with the modules of this process
    log = folder / "output.log"
    run = start_run(
        case.command,
        log,
        constants=case.constants,
        environment={**os.environ, "HOME": str(folder)},
        memory=ADDRESS_SPACE,
    )
    has_printed = lambda text: text is not None and text in log.read_bytes()  # noqa: E731
    status = run.wait(SECONDS, lambda: has_printed(case.stop_at))
    left = [] if status is None else run.wait_for_all(5.0)
    run.kill_all()
    output = log.read_bytes().decode("utf-8", "surrogateescape")
    outcome = Outcome(group, 1, orphans=len(left), seconds=round(time.monotonic() - started_at, 2))
    accepted = has_printed(case.accepted_at)
    if not accepted:
        outcome.memory_ratio = round(run.peak / (normal_peak + 2 * size + MEMORY_ALLOWANCE), 3)
    outcome.tracebacks = output.count(TRACEBACK) + output.count(LAST_RESORT)
    if accepted and OUT_OF_MEMORY in output:
        outcome.tracebacks -= 1
    elif status is None:
        if not accepted and not has_printed(case.stop_at):
            outcome.failures.append(f"still running after {SECONDS:.0f} s")
    elif status not in case.statuses and not outcome.tracebacks:
        outcome.failures.append(f"exit status {status}")
    elif status == EXIT_STATUS_OF_USER_ERROR and "error" not in output:
        outcome.failures.append("no error message")
    elif problem := case.problem(status, output):
        outcome.failures.append(problem[:1000])
    if hidden := _CONTROL_CHARACTER.search(output):
        outcome.failures.append(f"control character {hidden[0]!r} in the output")
    if list(folder.rglob("executed")):
        outcome.failures.append("code in the input was executed")
    if outside != set(folder.parent.iterdir()):
        outcome.failures.append(f"files outside: {[path.name for path in outside ^ set(folder.parent.iterdir())]}")
    end = output[-300:] if outcome.is_good else output[-2000:]
    outcome.details = {"command": " ".join(case.command)[:1000], "status": status, "output": end}
    return outcome


def remove(folder: Path) -> None:
    """Delete the folder of a case, even if parts of it are not readable."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder)
