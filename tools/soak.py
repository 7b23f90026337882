"""Soak test: hostile configurations, hostile files, and kills of commands that are then resumed.

python tools/soak.py [configs] [files] [kills] [--seed N] [--count N] [--minutes M] [--output runs/soak]

Every trial runs a real command in a fork of this process. It fails if a process prints a traceback, loses saved work,
leaves a process behind, or needs too much memory (docs/reliability.md). Each trial depends only on the seed and its
index. Results are appended to OUTPUT/PART.jsonl; the same command resumes. The folders of failed trials are kept in
OUTPUT/failed. At the end, this prints a table as Markdown and writes OUTPUT/soak.json.

This is a tool for developers. It needs Linux and the folder tests/ of a checkout.
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "WANDB_MODE": "offline"}

import check_megatron  # noqa: E402, F401
from megatron.config.command_line import OptionParser, integer, number, run_main  # noqa: E402
from megatron.utils.errors import UserError  # noqa: E402
from megatron.utils.progress import Progress, readable_time  # noqa: E402
from tests.support import forks, hostile, hostile_cases, kills  # noqa: E402
from tests.support.outcomes import Outcome  # noqa: E402

# Part -> number of trials (for kills: of kills) of a full run.
COUNTS = {"configs": 2000, "files": 1000, "kills": 500}
KILLS_PER_CHAIN = 12


# -- parts -------------------------------------------------------------------------------------------------------------


class Kills:
    """Trials that kill one command repeatedly. Commands are drawn with these weights."""

    def __init__(self, folder: Path, only: str):
        corpus = folder / "corpus"
        self._folder = folder
        self._references: dict[str, kills.Reference] = {}
        self._commands: dict[str, tuple[int, Callable[[Path], kills.Command]]] = {
            "training": (16, kills.Training),
            "training, async save": (16, lambda path: kills.Training(path, async_save=True)),
            "training, 2 ranks": (12, lambda path: kills.Training(path, ranks=2, iterations=20)),
            "training, 2 ranks, async save": (
                12,
                lambda path: kills.Training(path, ranks=2, iterations=20, async_save=True),
            ),
            "training, 2 ranks, new interpreters": (2, lambda path: kills.Training(path, ranks=2, iterations=20)),
            "preprocessing": (10, kills.Preprocessing),
            "preprocessing, 2 workers": (5, lambda path: kills.Preprocessing(path, workers=2)),
            "evaluation": (10, kills.Evaluation),
            "evaluation, 2 ranks": (6, lambda path: kills.Evaluation(path, ranks=2)),
            "sweep": (8, kills.SweepCommand),
            "demo": (5, kills.Demo),
            "demo, with its corpus": (5, lambda path: kills.Demo(path, corpus=corpus)),
        }
        self._corpus = corpus
        self._names = [name for name in self._commands if only in name]
        if not self._names:
            raise UserError(f"--only {only}: choose a part of one of {'; '.join(self._commands)}")

    def trial(self, generator: random.Random, folder: Path, limit: int) -> Outcome:
        """One trial; `limit`: number of kills or inputs that are left."""
        name = generator.choices(self._names, [self._commands[name][0] for name in self._names])[0]
        reference = self._reference(name)
        command = self._commands[name][1](folder)
        fork = "new interpreters" not in name
        return kills.run_chain(name, command, reference, generator, min(limit, KILLS_PER_CHAIN), fork)

    def _reference(self, name: str) -> kills.Reference:
        if "with its corpus" in name and not self._corpus.exists():
            self._reference("demo")
        if name not in self._references:
            folder = self._folder / f"reference{len(self._references)}"
            if folder.exists():
                hostile.remove(folder)
            command = self._commands[name][1](folder)
            self._references[name] = kills.run_reference(command, fork="new interpreters" not in name)
            if name == "demo":
                (folder / "data").rename(self._corpus)
            hostile.remove(folder)
        return self._references[name]


class Cases:
    """Hostile inputs of several groups, in equal shares."""

    def __init__(self, groups: dict[str, hostile.MakeCase], only: str):
        self._groups = {name: make for name, make in groups.items() if only in name}
        if not self._groups:
            raise UserError(f"--only {only}: choose a part of one of {'; '.join(groups)}")

    def trial(self, generator: random.Random, folder: Path, limit: int) -> Outcome:
        group = generator.choice(list(self._groups))
        folder.mkdir()
        return hostile.run_case(group, self._groups[group], generator, folder)


def make_part(name: str, folder: Path, only: str) -> Kills | Cases:
    if name == "kills":
        return Kills(folder, only)
    return Cases(hostile_cases.FILES if name == "files" else hostile_cases.CONFIGS, only)


# -- running -----------------------------------------------------------------------------------------------------------


def run_part(name: str, options: argparse.Namespace, header: dict[str, object], deadline: float) -> None:
    """Run the trials of a part that its journal does not contain yet."""
    journal = options.output / f"{name}.jsonl"
    outcomes = read_journal(journal, header)
    work = options.output / "work" / name
    if work.exists():
        hostile.remove(work)
    work.mkdir(parents=True)
    part = make_part(name, work, options.only)
    total = options.count or COUNTS[name]
    if sum(outcome.count for outcome in outcomes) < total:
        forks.import_modules()
        forks.adopt_orphans()
    with Progress(name, total, unit=name) as display, open(journal, "a") as stream:
        done = sum(outcome.count for outcome in outcomes)
        display.restart(done, done)
        stream.truncate(len(complete_lines(journal)))
        if not journal.stat().st_size:
            print(json.dumps(header), file=stream, flush=True)
        while done < total and time.monotonic() < deadline:
            index = len(outcomes)
            folder = work / str(index)
            outcome = part.trial(random.Random(f"{options.seed} {name} {index}"), folder, total - done)
            keep_or_remove(folder, outcome, options.output / "failed" / f"{name}-{index}")
            outcomes.append(outcome)
            print(json.dumps(dataclasses.asdict(outcome)), file=stream, flush=True)
            if not outcome.is_good:
                display.print(f"{name} {index}, {outcome.group}: {problems(outcome)}")
            done += outcome.count
            failed = sum(not outcome.is_good for outcome in outcomes)
            display.update(done, f"{done:,} of {total:,}, {failed} failed trials")
    hostile.remove(work)


def read_journal(path: Path, header: dict[str, object]) -> list[Outcome]:
    """The outcomes of earlier runs. Raises UserError if they have another seed or are of another commit."""
    lines = complete_lines(path).splitlines()
    if not lines:
        return []
    stored = json.loads(lines[0])
    for key in ("commit", "seed", "only"):
        if stored[key] != header[key]:
            raise UserError(
                f"{path}: has results of {key} {stored[key]!r}, not {header[key]!r}; choose another --output"
            )
    return [Outcome(**json.loads(line)) for line in lines[1:]]


def complete_lines(path: Path) -> bytes:
    """The content of a journal, if it exists, without a last line that a killed process has not completed."""
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def keep_or_remove(folder: Path, outcome: Outcome, kept: Path) -> None:
    if outcome.is_good:
        hostile.remove(folder)
    else:
        kept.parent.mkdir(exist_ok=True)
        if kept.exists():  # a killed process has not recorded the trial
            hostile.remove(kept)
        folder.rename(kept)


def problems(outcome: Outcome) -> str:
    found = [f"{outcome.tracebacks} tracebacks"] if outcome.tracebacks else []
    found += [f"memory {outcome.memory_ratio:.2f} of the limit"] if outcome.memory_ratio > 1 else []
    return "; ".join([*found, *outcome.losses, *outcome.failures, str(outcome.details.get("output", ""))[-500:]])


# -- report ------------------------------------------------------------------------------------------------------------


def describe_run(options: argparse.Namespace) -> dict[str, object]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    cpu = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "commit": commit + (", modified" if git("status", "--porcelain", "--untracked-files=no") else ""),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{cpu[0] if cpu else platform.processor()}, {os.cpu_count()} cores, {memory:.0f} GB",
        "seed": options.seed,
        "only": options.only,
    }


COLUMNS = ("trials", "kills or inputs", "tracebacks", "losses", "orphans", "other failures", "memory", "time")


def row(outcomes: Sequence[Outcome]) -> list[str]:
    """The cells of the table: sums over trials, and the largest memory ratio."""
    counts = [
        len(outcomes),
        sum(outcome.count for outcome in outcomes),
        sum(outcome.tracebacks for outcome in outcomes),
        sum(len(outcome.losses) for outcome in outcomes),
        sum(outcome.orphans for outcome in outcomes),
        sum(len(outcome.failures) for outcome in outcomes),
    ]
    memory = max((outcome.memory_ratio for outcome in outcomes), default=0.0)
    return [*(f"{count:,}" for count in counts), f"{memory:.2f}", readable_time(sum(o.seconds for o in outcomes))]


def table(results: dict[str, list[Outcome]]) -> Iterator[str]:
    """A Markdown table: one line per kind of trial, and one per part."""
    yield f"| | {' | '.join(COLUMNS)} |"
    yield f"|---|{'---:|' * len(COLUMNS)}"
    for name, outcomes in results.items():
        for group in sorted({outcome.group for outcome in outcomes}):
            cells = row([outcome for outcome in outcomes if outcome.group == group])
            yield f"| {name}: {group} | {' | '.join(cells)} |"
        yield f"| **{name}** | {' | '.join(f'**{cell}**' for cell in row(outcomes))} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen parts. Returns 0 if no trial has failed, otherwise 1."""
    options = parse_options(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    header = describe_run(options)
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    for name in options.parts:
        run_part(name, options, header, deadline)
    # The other parts may run in other processes.
    results = {
        name: outcomes for name in COUNTS if (outcomes := read_journal(options.output / f"{name}.jsonl", header))
    }
    rows = {name: dict(zip(COLUMNS, row(outcomes), strict=True)) for name, outcomes in results.items()}
    (options.output / "soak.json").write_text(json.dumps({**header, "parts": rows}, indent=1) + "\n")
    print(f"{header['date']}, commit {header['commit']}, seed {header['seed']}, {header['machine']}\n")
    print("\n".join(table(results)))
    return int(any(not outcome.is_good for outcomes in results.values() for outcome in outcomes))


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(COUNTS)} (default: all)")
    parser.add_argument("--seed", type=integer(0), default=1)
    parser.add_argument("--count", type=integer(1), help=f"kills or inputs of each part (default: {COUNTS})")
    parser.add_argument("--minutes", type=number(0), help="stop after this time; the same command continues")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kinds of trials whose name contains TEXT")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "soak", help="default: runs/soak")
    options = parser.parse_args(argv)
    options.parts = options.parts or list(COUNTS)
    if unknown := set(options.parts) - set(COUNTS):
        parser.error(f"unknown part {unknown.pop()!r}; choose from {', '.join(COUNTS)}")
    return options


if __name__ == "__main__":
    sys.exit(run_main(main))
