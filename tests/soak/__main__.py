"""Soak test: hostile configurations, hostile files, and kills of commands that are then resumed.

python -m tests.soak [configs] [files] [kills] [--seed N] [--count N] [--minutes M] [--output runs/soak]

Every trial runs a real command in a fork of this process. It fails if a process prints a traceback, loses saved work,
leaves a process behind, or needs too much memory (docs/reliability.md). A trial depends only on the seed and its index.
This prints a table as Markdown; OUTPUT/trials.jsonl lists the trials, and OUTPUT/failed has the folders of failed ones.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "WANDB_MODE": "offline"}

import check_megatron  # noqa: F401
from megatron.utils.command_line import OptionParser, integer, number, run_main
from megatron.utils.progress import readable_time
from tests.soak import cases, configs, files, kills
from tests.soak.cases import Outcome
from tests.support import forks

# Part -> its trials, and the number of inputs (for kills: of kills) of a full run.
PARTS = {
    "configs": (lambda folder, only: cases.Cases({"training": configs.hostile_config}, only), 2000),
    "files": (lambda folder, only: cases.Cases(files.GROUPS, only), 1000),
    "kills": (kills.Kills, 500),
}


def run_part(name: str, options: argparse.Namespace, deadline: float) -> list[Outcome]:
    """Run trials until their inputs or kills are `options.count`, or until the deadline."""
    make, total = PARTS[name]
    left = options.count or total
    work, failed = options.output / "work" / name, options.output / "failed"
    for folder in (work, *failed.glob(f"{name}-*")):
        if folder.exists():
            cases.remove(folder)
    work.mkdir(parents=True)
    failed.mkdir(exist_ok=True)
    part = make(work, options.only)
    outcomes: list[Outcome] = []
    with open(options.output / "trials.jsonl", "a") as stream:
        while left > 0 and time.monotonic() < deadline:
            index = len(outcomes)
            folder = work / str(index)
            outcome = part.trial(f"{options.seed} {name} {index}", folder, left)
            record = {"part": name, "seed": options.seed, "index": index, **dataclasses.asdict(outcome)}
            print(json.dumps(record), file=stream, flush=True)
            outcomes.append(outcome)
            left -= outcome.count
            if outcome.is_good:
                cases.remove(folder)
            else:
                print(f"{name} {index}: {outcome}", flush=True)
                folder.rename(failed / f"{name}-{index}")
    cases.remove(work)
    return outcomes


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
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--seed", type=integer(0), default=1)
    parser.add_argument("--count", type=integer(1), help="inputs, or kills, of each part (default: 2000, 1000, 500)")
    parser.add_argument("--minutes", type=number(0), help="stop after this time, shared equally by the parts")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kinds of trials whose name contains TEXT")
    parser.add_argument("--output", type=Path, default=forks.ROOT / "runs" / "soak", help="default: runs/soak")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {unknown.pop()!r}; choose from {', '.join(PARTS)}")
    options.output = options.output.absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    forks.import_modules()
    forks.adopt_orphans()
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    results, parts = {}, options.parts or list(PARTS)
    for index, name in enumerate(parts):
        now = time.monotonic()
        results[name] = run_part(name, options, now + (end - now) / (len(parts) - index))
    print("\n".join(table(results)))
    return int(any(not outcome.is_good for outcomes in results.values() for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(run_main(main))
