"""Soak test: wrong configurations, damaged files, and kills of commands that are then resumed.

python -m tests.soak [configs] [files] [kills] [--seed N] [--count N] [--minutes M] [--output
runs/soak]

Every trial runs a real command in a fork of this process. It fails if a process prints a traceback,
loses saved work, leaves a process behind, or needs too much memory (docs/reliability.md). A trial
depends only on the seed and its index. This prints a table as Markdown; OUTPUT/trials.jsonl lists
the trials, and OUTPUT/PART has the folders of failed ones.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "WANDB_MODE": "offline"}

import check_megatron  # noqa: F401
from megatron.utils.command_line import OptionParser, integer, number, run_main
from megatron.utils.progress import readable_time
from tests.soak import cases, configs, files, kills
from tests.soak.cases import PROBLEMS, Outcome
from tests.support import forks

# Part -> its kinds of trials, which may use a folder, and the number of inputs (for kills: of
# kills) of a full run.
PARTS = {
    "configs": (lambda folder: cases.trials({"training": configs.wrong_config}), 2000),
    "files": (lambda folder: cases.trials(files.GROUPS), 1000),
    "kills": (kills.trials, 500),
}


def run_part(name: str, options: argparse.Namespace) -> list[Outcome]:
    """Run trials until their inputs or kills are `options.count`, or for `options.minutes`."""
    make, total = PARTS[name]
    left, deadline = options.count or total, time.monotonic() + 60 * options.minutes
    work = options.output / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    trials = [trial for group, trial in make(work).items() if options.only in group]
    outcomes: list[Outcome] = []
    with open(options.output / "trials.jsonl", "a") as stream:
        while left > 0 and time.monotonic() < deadline:
            index = len(outcomes)
            folder, seed = work / str(index), f"{options.seed} {name} {index}"
            outcome = random.Random(seed).choice(trials)(seed, folder, left)
            record = {
                "part": name,
                "seed": options.seed,
                "index": index,
                **dataclasses.asdict(outcome),
            }
            print(json.dumps(record), file=stream, flush=True)
            outcomes.append(outcome)
            left -= outcome.count
            if outcome.is_good:
                shutil.rmtree(folder)
            else:
                print(f"{folder}: {outcome}", flush=True)
    return outcomes


def row(name: str, outcomes: Sequence[Outcome]) -> str:
    """A line of the table: sums over trials, and the largest memory ratio."""
    counts = [len(outcomes), sum(outcome.count for outcome in outcomes)]
    counts += [sum(len(outcome.problems[kind]) for outcome in outcomes) for kind in PROBLEMS]
    memory = max((outcome.peak / outcome.memory_limit for outcome in outcomes), default=0.0)
    time_used = readable_time(sum(outcome.seconds for outcome in outcomes))
    return " | ".join([name, *(f"{count:,}" for count in counts), f"{memory:.2f}", time_used])


def table(results: dict[str, list[Outcome]]) -> Iterator[str]:
    """A Markdown table: one line per kind of trial, and one per part."""
    columns = ("trials", "kills or inputs", *PROBLEMS, "memory", "time")
    yield f"| | {' | '.join(columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for name, outcomes in results.items():
        for group in sorted({outcome.group for outcome in outcomes}):
            selected = [outcome for outcome in outcomes if outcome.group == group]
            yield f"| {row(f'{name}: {group}', selected)} |"
        yield f"| **{row(name, outcomes).replace(' | ', '** | **')}** |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen parts. Returns 0 if no trial has failed, otherwise 1."""
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=list(PARTS), help="default: all")
    parser.add_argument("--seed", type=integer(0), default=1)
    parser.add_argument(
        "--count", type=integer(1), help="inputs, or kills, of each part (default: 2000, 1000, 500)"
    )
    parser.add_argument(
        "--minutes", type=number(0), default=float("inf"), help="stop each part after this time"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only kinds of trials whose name contains TEXT"
    )
    parser.add_argument(
        "--output", type=Path, default=forks.ROOT / "runs" / "soak", help="default: runs/soak"
    )
    options = parser.parse_args(argv)
    options.output = options.output.absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    forks.import_modules()
    forks.adopt_orphans()
    results = {name: run_part(name, options) for name in options.parts or PARTS}
    print("\n".join(table(results)))
    return int(any(not outcome.is_good for outcomes in results.values() for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(run_main(main))
