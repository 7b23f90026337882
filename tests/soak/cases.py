"""What a trial found (`Outcome`), and trials of a command on a wrong input (`run_case`)."""

import contextlib
import functools
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
from tests.support.forks import Run, start_run

# Beyond what the command needs without wrong input, and twice the size of that input.
MEMORY_ALLOWANCE = 500 << 20
TRACEBACK = "Traceback (most recent call last)"
# In the line that `run_main` prints for an exception that nothing else has caught.
LAST_RESORT = "; traceback: "
SECONDS = 60.0
# The command may map this much before an allocation fails, so that a case cannot exhaust the
# machine's memory.
ADDRESS_SPACE = 6000 << 20
OUT_OF_MEMORY = "failed: out of memory"  # in the line of the last-resort handler
# Carriage returns are allowed before the progress bars of libraries.
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?![^\r\n]*%\|)")
# Kinds of problems, which are columns of the table.
PROBLEMS = ("tracebacks", "losses", "orphans", "other failures")


@dataclass
class Outcome:
    """One trial: a command that was killed several times, or one wrong input.

    Attributes:
        group: kind of trial, a row of the table.
        count: number of kills or inputs.
        problems: of each kind, what went wrong. A traceback is also an error that only the
            last-resort handler caught, a loss is a missing result, or one that differs from that of
            an uninterrupted run.
        peak: largest resident memory of a process, in bytes.
        memory_limit: what it may be.
        details: how the trial can be repeated.
    """

    group: str
    count: int = 0
    problems: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in PROBLEMS})
    peak: int = 0
    memory_limit: float = float("inf")
    seconds: float = 0.0
    details: dict[str, object] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not any(self.problems.values()) and self.peak <= self.memory_limit

    def end(self, run: Run, log: Path, seconds: float) -> str:
        """Wait at most `seconds` for the processes of a run, note orphans and tracebacks; returns
        the text of `log`.
        """
        self.problems["orphans"] += [command_line(pid) for pid in run.wait_for_all(seconds)]
        run.kill_all()
        self.peak = max(self.peak, run.peak)
        output = log.read_bytes().decode("utf-8", "surrogateescape")
        for text in (TRACEBACK, LAST_RESORT):
            self.problems["tracebacks"] += [text] * output.count(text)
        return output


def command_line(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    return ""


@dataclass(frozen=True)
class Case:
    """A command and its wrong input.

    Attributes:
        command: script, relative to the root of the project, and its options.
        statuses: exit statuses that are allowed.
        constants: "module:NAME" -> value, replaced in the process.
        stop_at: the command is stopped when it prints this.
        accepted_at: if it has printed this, it may do what the input asks for: run longer than
            `SECONDS`, need more memory, or end because there is not enough.
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
# Draws the input of a case and writes it to a folder.
MakeCase = Callable[[Draw, Path], Case]
# Runs one trial, given its seed, a folder that it creates, and the largest number of kills.
Trial = Callable[[str, Path, int], Outcome]


def draw_seeded(make: Callable[[Draw], Any], seed: str) -> Any:
    """What `make` returns with a function that draws values of strategies, the same for the same
    seed.
    """
    drawn = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=2,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=HealthCheck,
    )
    @given(st.data())
    def draw_second(data: Any) -> None:
        if data.draw(st.integers(0, 2**32)):  # the first example is always the simplest one
            drawn.append(make(data.draw))

    draw_second()
    return drawn[-1]


def pick(draw: Draw, values: Iterable[Any]) -> Any:
    return draw(st.sampled_from(list(values)))


def draw_case(make: MakeCase, seed: str, folder: Path) -> Case:
    """A case in a new folder. Its command runs later: hypothesis changes the recursion limit."""

    def make_again(draw: Draw) -> Case:
        shutil.rmtree(
            folder, ignore_errors=True
        )  # hypothesis has given up an example that was too large
        folder.mkdir()
        return make(draw, folder)

    return draw_seeded(make_again, seed)


def trials(groups: Mapping[str, MakeCase]) -> dict[str, Trial]:
    """Trials of wrong inputs of several groups."""
    return {group: functools.partial(run_case, group, make) for group, make in groups.items()}


def run_case(group: str, make: MakeCase, seed: str, folder: Path, limit: int) -> Outcome:
    """Run the command of a case, and judge how it ends, what it prints, and how much memory it
    needs. It may write only in `folder`, which is also its home.
    """
    case, started_at = draw_case(make, seed, folder), time.monotonic()
    size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    outside = set(folder.parent.iterdir())
    normal_peak = (
        psutil.Process().memory_info().rss
    )  # the fork starts with the modules of this process
    log, home = folder / "output.log", {**os.environ, "HOME": str(folder)}
    has_printed = lambda text: text is not None and text in log.read_bytes()  # noqa: E731
    run = start_run(
        case.command, log, constants=case.constants, environment=home, memory=ADDRESS_SPACE
    )
    status = run.wait(SECONDS, lambda: has_printed(case.stop_at))
    if status is None:
        run.kill_all()

    # Judge the processes, the memory and the exit status.
    outcome = Outcome(group, 1)
    output = outcome.end(run, log, 5.0)
    outcome.seconds = round(time.monotonic() - started_at, 2)
    tracebacks, failures = outcome.problems["tracebacks"], outcome.problems["other failures"]
    accepted = has_printed(case.accepted_at)
    if not accepted:
        outcome.memory_limit = normal_peak + 2 * size + MEMORY_ALLOWANCE
    if accepted and OUT_OF_MEMORY in output:
        tracebacks.remove(LAST_RESORT)
    elif status is None:
        if not accepted and not has_printed(case.stop_at):
            failures.append(f"still running after {SECONDS:.0f} s")
    elif status not in case.statuses and not tracebacks:
        failures.append(f"exit status {status}")
    elif status == EXIT_STATUS_OF_USER_ERROR and "error" not in output:
        failures.append("no error message")
    elif problem := case.problem(status, output):
        failures.append(problem[:1000])

    # Judge the output and the files.
    if hidden := _CONTROL_CHARACTER.search(output):
        failures.append(f"control character {hidden[0]!r} in the output")
    if changed := outside ^ set(folder.parent.iterdir()):
        failures.append(f"files outside: {[path.name for path in changed]}")
    end = output[-300:] if outcome.is_good else output[-2000:]
    outcome.details = {"command": " ".join(case.command)[:1000], "status": status, "output": end}
    return outcome
