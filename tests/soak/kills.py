"""Commands that are killed and resumed until they finish: `Kills`.

After every kill, no process of the command may remain, and what it has acknowledged must still be
there. At the end, its results must equal those of an uninterrupted run, bit for bit.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from megatron.checkpoint.directory import find_step, has_checkpoint, iteration_of
from megatron.checkpoint.manifest import find_damage, read_manifest
from megatron.checkpoint.storage import CheckpointError
from tests.soak.cases import MEMORY_ALLOWANCE, Outcome, Trial, command_line, draw_seeded
from tests.soak.files import PREPROCESS, small_work_items, write_lines
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.forks import Run, start_run
from tests.support.runs import training_settings
from tests.support.sweeps import write_sweep

# After a kill; what is left then is an orphan. A process that was just starting ends after its
# imports, which take long on a busy machine.
SECONDS_TO_EXIT = 120.0
SECONDS_TO_FINISH = 300.0


@dataclass(frozen=True)
class Command:
    """A command that can be killed and repeated.

    Attributes:
        prepare: writes the input files to a folder, and returns the script and its options.
        constants: "module:NAME" -> value, replaced in the process and the scripts that it starts.
    """

    prepare: Callable[[Path], list[str]]
    constants: Mapping[str, object] = field(default_factory=dict)

    def result(self, folder: Path) -> str:
        """The results of the finished command, for a comparison."""
        runs = [trained(directory) for directory in found(folder, CHECKPOINTS)]
        files = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in found(folder, FILES)
        }
        leftover = sorted(
            path.name
            for path in folder.iterdir()
            if {"partial", "progress"} & set(path.name.split("."))
        )
        return json.dumps(
            [runs, files, leftover, evaluated(record_lines(folder))], default=described
        )


def write_settings(folder: Path, data: str, **keys: object) -> None:
    (folder / "config.yml").write_text(json.dumps(training_settings(folder, data, **keys)))


def training(ranks: int = 1, **keys: object) -> Command:
    """train.py on one rank, or deepy.py with several; it saves at every iteration. keys:
    configuration keys.
    """

    def prepare(folder: Path) -> list[str]:
        settings = {
            "train_iters": 24,
            "lr_decay_iters": 24,
            "save_interval": 1,
            "keep_last_n_checkpoints": 2,
        }
        settings |= {"eval_iters": 0, "hidden_dropout": 0.1, "num_gpus": ranks, **keys}
        write_settings(folder, write_corpus(folder, documents=80), **settings)
        return ["train.py", "config.yml"] if ranks == 1 else ["deepy.py", "train.py", "config.yml"]

    return Command(prepare)


def preprocessing(workers: int = 1) -> Command:
    """preprocess_data.py, which commits after every work item."""

    def prepare(folder: Path) -> list[str]:
        for shard in range(4):
            numbers = range(shard * 1000, (shard + 1) * 1000)
            documents = [
                {"text": f"document {n} " * (n % 23 + 1), "title": f"title {n}"} for n in numbers
            ]
            write_lines(folder / f"input/{shard}.jsonl", *documents)
        words = [
            *PREPROCESS,
            "--input",
            "input",
            "--output-prefix",
            "out",
            "--jsonl-keys",
            "text",
            "title",
        ]
        return [*words, "--workers", str(workers)]

    return Command(prepare, small_work_items(8000))


def evaluation(ranks: int = 1) -> Command:
    """evaluate.py on one rank, or deepy.py with several."""

    def prepare(folder: Path) -> list[str]:
        data = write_corpus(folder)
        torch.manual_seed(0)  # of the weights that write_checkpoint does not seed
        write_checkpoint(folder / "model", "kerple_log", data, iteration=6)
        write_settings(folder, data, num_gpus=ranks, load=str(folder / "model"))
        words = (
            "evaluate.py config.yml --output report --tokens 1024 --by-position 4 --lengths 32 64 "
            "128 256 512"
        )
        words += " --modes full window@32 --protocol non-overlapping sliding@16"
        return words.split() if ranks == 1 else ["deepy.py", *words.split()]

    return Command(prepare)


def sweep() -> Command:
    """`kerple sweep` with two short runs."""

    def prepare(folder: Path) -> list[str]:
        return [
            "kerple_command.py",
            "sweep",
            str(write_sweep(folder, set={"eval-iters": 0, "save-interval": 2})),
        ]

    return Command(prepare, {"megatron.sweep.runner:POLL_INTERVAL": 0.02})


# Patterns of what the commands write to their folders: checkpoints of training runs, files that
# must be those of an uninterrupted run, and files and folders whose times change whenever something
# is saved.
CHECKPOINTS = ("checkpoints", "out/runs/*/*/checkpoints")
FILES = ("out_*.[bi][id][nx]",)
SAVED = (
    *CHECKPOINTS,
    "out/runs/*/*",
    "out/runs/*/*/evaluation",
    "report/results.jsonl",
    "out.progress.json",
)
# What a training log must have in common with that of an uninterrupted run.
LOSSES = {"train/loss", "validation/loss", "test/loss"}


def found(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def save_times(folder: Path) -> tuple[float, ...]:
    """Changes whenever something is saved."""
    times = []
    for path in found(folder, SAVED):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime_ns)
    return tuple(times)


def losses(folder: Path, output: str) -> Iterator[str]:
    """What is damaged, or missing although `output`, that of all runs so far, acknowledges it."""
    acknowledged: dict[Path, int] = defaultdict(int)
    for directory, number in re.findall(r"saved (\S+)/global_step(\d+)", output):
        acknowledged[folder / directory] = max(int(number), acknowledged[folder / directory])
    for directory in {*acknowledged, *found(folder, CHECKPOINTS)}:
        if directory in acknowledged or has_checkpoint(directory):
            step = find_step(directory)
            yield from filter(
                None, [find_damage(step), None if read_manifest(step) else f"{step}: no manifest"]
            )
            if iteration_of(step) < acknowledged[directory]:
                yield f"{step} is the latest, although {acknowledged[directory]} was saved"
    for part in output.split(".bin/.idx: "):  # after it has finished, preprocessing starts over
        resumed = [
            int(count.replace(",", ""))
            for count in re.findall(r"resuming after ([\d,]+) documents", part)
        ]
        if resumed != sorted(resumed):
            yield f"documents at each resume: {resumed}"


def trained(directory: Path) -> object:
    """The logged losses of a run and the states in the files of its last checkpoint, in
    `directory`.

    A value that was measured again must be the same each time.
    """
    measured: dict[str, set[float]] = defaultdict(set)
    for values in map(
        json.loads, (directory.parent / "logs" / "metrics.jsonl").read_text().splitlines()
    ):
        for name in LOSSES & values.keys():
            measured[f"{name} {values['iteration']:06}"].add(values[name])
    step = find_step(directory)
    states = {path.name: torch.load(path, weights_only=True) for path in sorted(step.glob("*.pt"))}
    for (
        state
    ) in states.values():  # stopping saves a checkpoint, too; each run has its own name and folder
        for key in ("lineage", "run", "folder", "inode", "data"):
            state.get("training", {}).pop(key, None)
    leftover = [
        path.name
        for path in directory.iterdir()
        if path.name[0] == "." or path.suffix == ".unfinished"
    ]
    return step.name, {name: sorted(measured[name]) for name in sorted(measured)}, states, leftover


def described(value: object) -> str:
    """A tensor's dtype, shape and digest; the text of another object that JSON cannot represent."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def record_lines(folder: Path) -> list[str]:
    """The complete lines of all results.jsonl below a folder."""
    texts = [path.read_text().rpartition("\n")[0] for path in sorted(folder.rglob("results.jsonl"))]
    return "\n".join(texts).splitlines()


def evaluated(lines: list[str]) -> list[str]:
    """Evaluation records in a fixed order, without the paths of their checkpoints.

    A kill between two records of a measurement repeats both, so the file may contain a record
    twice.
    """
    records = [json.loads(line) for line in lines]
    for record in records:
        record["checkpoint"]["path"] = None
    return sorted({json.dumps(record, sort_keys=True) for record in records})


class Kill(NamedTuple):
    """When and how a run is killed.

    Attributes:
        saves: after the command has saved something this often; 0: at a random moment.
        delay: that moment as a fraction of an uninterrupted run; after saves, in units of 20 ms.
        number: the signal. SIGINT and SIGHUP go to the process group, as from a terminal.
        child: a SIGKILL hits the child of this index, modulo their number; None: the script itself.
    """

    saves: int
    delay: float
    number: signal.Signals
    child: int | None


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *[signal.SIGKILL] * 7)
KILLS = st.builds(
    Kill,
    saves=st.just(0) | st.integers(1, 6),
    delay=st.floats(0, 0.8),
    number=st.sampled_from(SIGNALS),
    child=st.none() | st.integers(0, 9),
)


def commands() -> dict[str, Command]:
    """The commands of all kinds of trials."""
    validation = {"eval_interval": 2, "eval_iters": 2, "log_interval": 3}
    named = {
        "training": training(),
        "training, workers, validation": training(num_workers=2, **validation),
        "preprocessing": preprocessing(),
        "preprocessing, 2 workers": preprocessing(2),
        "evaluation": evaluation(),
        "evaluation, 2 ranks": evaluation(2),
        "sweep": sweep(),
    }
    for stage in range(4):
        zero = training(2, zero_optimization={"stage": stage}, num_workers=1, **validation)
        named[f"training, 2 ranks, ZeRO {stage}, worker, validation"] = zero
    return named


def trials(folder: Path) -> dict[str, Trial]:
    """Trials that kill a command and resume it. The first one of a group also runs the command
    without a kill.
    """
    chosen = commands()

    @functools.cache
    def reference(group: str) -> tuple[str, Outcome]:
        """The result of an uninterrupted run, and its outcome."""
        place = folder / f"reference of {group}"
        outcome = run_to_end(group, chosen[group], place, (), 0.0)
        assert outcome.is_good, f"{place} fails without a kill: {outcome}"
        result = chosen[group].result(place)
        shutil.rmtree(place)
        return result, outcome

    def trial(group: str, seed: str, place: Path, limit: int) -> Outcome:
        """Kill a command as planned by `seed`, at most `limit` times, and compare the results of
        the last run.
        """
        plan = draw_seeded(lambda draw: draw(st.lists(KILLS, min_size=1, max_size=12)), seed)
        expected, usual = reference(group)
        outcome = run_to_end(group, chosen[group], place, plan[:limit], usual.seconds)
        if outcome.is_good and (result := chosen[group].result(place)) != expected:
            (place / "result.json").write_text(result)
            (place / "expected.json").write_text(expected)  # of an uninterrupted run
            outcome.problems["losses"].append("result.json differs from expected.json")
        outcome.memory_limit = usual.peak + MEMORY_ALLOWANCE
        return outcome

    return {group: functools.partial(trial, group) for group in chosen}


def run_to_end(
    group: str, command: Command, folder: Path, plan: Sequence[Kill], seconds: float
) -> Outcome:
    """Run a command, which takes about `seconds`, in a new folder, kill it as planned,
    and repeat.
    """
    outcome, started_at = Outcome(group), time.monotonic()
    folder.mkdir()
    log, words, records = folder / "output.log", command.prepare(folder), list[str]()
    done: list[dict[str, object]] = []
    killed = True
    while killed and outcome.is_good:
        run = start_run(words, log, constants=command.constants)
        killed = len(done) < len(plan) and wait_for_moment(run, folder, plan[len(done)], seconds)
        if killed:
            done.append(send(run, plan[len(done)]))

        # Wait for the script and its descendants.
        run.wait(SECONDS_TO_EXIT if killed else SECONDS_TO_FINISH)
        output = outcome.end(run, log, SECONDS_TO_EXIT)

        # Look for what is missing.
        earlier, records = records, record_lines(folder)
        lost = [f"a record is missing: {line[:200]}" for line in earlier if line not in records]
        try:
            outcome.problems["losses"] += [*losses(folder, output), *lost]
        except CheckpointError as error:
            outcome.problems["losses"].append(str(error))
        if killed:
            done[-1]["status"] = run.status
        elif run.status != 0:
            outcome.problems["other failures"].append(f"exit status {run.status}: {output[-1000:]}")
    outcome.count, outcome.seconds = len(done), round(time.monotonic() - started_at, 1)
    outcome.details = {"kills": done, "command": " ".join(words)}
    return outcome


def wait_for_moment(run: Run, folder: Path, kill: Kill, seconds: float) -> bool:
    """Wait for the moment of a kill. Returns False if the run has ended before."""
    times = [save_times(folder)]

    def saved() -> bool:
        times.extend({save_times(folder)} - {times[-1]})
        return len(times) > kill.saves

    if kill.saves:
        run.wait(2 * seconds, saved)
    run.wait(kill.delay * (0.02 if kill.saves else seconds))
    return run.poll() is None


def send(run: Run, kill: Kill) -> dict[str, object]:
    """Send the signal. Python's resource tracker, a helper of multiprocessing, is spared: the next
    one would print tracebacks of its own.
    """
    children = [
        pid
        for pid in run.processes()
        if pid != run.pid and "resource_tracker" not in command_line(pid)
    ]
    target = run.pid
    if kill.number == signal.SIGKILL and kill.child is not None and children:
        target = children[kill.child % len(children)]
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        (os.killpg if kill.number in (signal.SIGINT, signal.SIGHUP) else os.kill)(
            target, kill.number
        )
    return {"signal": kill.number.name, "target": "script" if target == run.pid else "child"}
