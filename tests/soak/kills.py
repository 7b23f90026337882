"""Commands that are killed and resumed until they finish: `run_chain`.

After every kill, no process of the command may remain, and what it has acknowledged must still be there. At the end,
its results must equal those of an uninterrupted run, bit for bit. `python -m tests.soak kills` runs many chains.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron.checkpoint.directory import find_damage, find_step, has_checkpoint, iteration_of, read_manifest
from megatron.checkpoint.storage import CheckpointError
from megatron.utils.errors import UserError
from tests.soak.cases import LAST_RESORT, MEMORY_ALLOWANCE, TRACEBACK, Outcome, remove, replace_constants
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.forks import Run, start_run
from tests.support.runs import environment, training_settings
from tests.support.sweeps import write_sweep

SECONDS_TO_EXIT = 30.0  # after a kill; what is left then is an orphan
SECONDS_TO_FINISH = 300.0
# SIGINT and SIGHUP go to the process group, as from a terminal; SIGKILL and SIGTERM to one process.
SIGNALS = {signal.SIGKILL: 70, signal.SIGTERM: 10, signal.SIGINT: 10, signal.SIGHUP: 10}


# -- commands ----------------------------------------------------------------------------------------------------------


@dataclass
class Command:
    """A command that can be killed and repeated.

    Attributes:
        folder: where it writes.
        ranks: number of its ranks.
        constants: "module:NAME" -> value, replaced in the process and its forks.
    """

    folder: Path
    ranks: int = 1
    constants: dict[str, object] = field(default_factory=dict)

    def prepare(self) -> list[str]:
        """Write the input files and return the words after `python`."""
        raise NotImplementedError

    def state(self) -> object:
        """Changes whenever something is saved. Reading it is fast."""
        raise NotImplementedError

    def losses(self, output: str) -> list[str]:
        """What is missing or damaged although the command has acknowledged it. `output`: of all its runs so far."""
        raise NotImplementedError

    def result(self) -> object:
        """The results of the finished command, for a comparison."""
        raise NotImplementedError


@dataclass
class Training(Command):
    """train.py on one rank, or deepy.py with several; it saves at every iteration.

    keys: configuration keys. Without `eval_iters` there is no validation.
    """

    iterations: int = 40
    keys: dict[str, object] = field(default_factory=dict)

    def prepare(self) -> list[str]:
        lengths = {"train_iters": self.iterations, "lr_decay_iters": self.iterations}
        saving = {"save_interval": 1, "keep_last_n_checkpoints": 2}
        keys = {"eval_iters": 0, "hidden_dropout": 0.1, "num_gpus": self.ranks, **lengths, **saving, **self.keys}
        config = self.folder / "config.yml"
        data = write_corpus(self.folder, documents=80)
        config.write_text(json.dumps(training_settings(self.folder, data, **keys)))
        return ["train.py", str(config)] if self.ranks == 1 else ["deepy.py", "train.py", str(config)]

    def state(self) -> object:
        return names(self.folder / "checkpoints")

    def losses(self, output: str) -> list[str]:
        saved = [int(number) for number in re.findall(r"saved \S+global_step(\d+)", output)]
        return checkpoint_losses(self.folder / "checkpoints", max(saved, default=None))

    def result(self) -> object:
        return trained(self.folder, self.iterations)


@dataclass
class Preprocessing(Command):
    """preprocess_data.py, which commits after every work item."""

    workers: int = 1
    constants: dict[str, object] = field(
        default_factory=lambda: {
            "megatron.preparation.preprocessing:COMMIT_INTERVAL_SECONDS": 0.0,
            "megatron.preparation.readers:BLOCK": 4000,
            "megatron.preparation.encoding:WORK_ITEM_BYTES": 8000,
        }
    )

    def prepare(self) -> list[str]:
        source = self.folder / "input"
        source.mkdir()
        texts = [f"document {number} " * (number % 23 + 1) for number in range(4000)]
        lines = [json.dumps({"text": text, "title": f"title {number}"}) + "\n" for number, text in enumerate(texts)]
        for shard in range(4):
            (source / f"{shard}.jsonl").write_text("".join(lines[shard * 1000 : (shard + 1) * 1000]))
        words = ["tools/datasets/preprocess_data.py", "--input", str(source)]
        words += ["--output-prefix", str(self.folder / "out"), "--jsonl-keys", "text", "title"]
        return [*words, "--append-eod", "--tokenizer-type", "CharLevelTokenizer", "--workers", str(self.workers)]

    def state(self) -> object:
        journal = self.folder / "out.progress.json"
        return journal.stat().st_mtime_ns if journal.exists() else None

    def losses(self, output: str) -> list[str]:
        losses = []
        for part in output.split("out_title_document.bin/.idx: "):  # after it has finished, the command starts over
            resumed = [int(count.replace(",", "")) for count in re.findall(r"resuming after ([\d,]+) documents", part)]
            if resumed != sorted(resumed):
                losses.append(f"documents at each resume: {resumed}")
        return losses

    def result(self) -> object:
        leftover = [name for name in names(self.folder) if "partial" in name or "progress" in name]
        return {path.name: digest(path) for path in self.folder.glob("out_*") if path.suffix != ".json"}, leftover


@dataclass
class Evaluation(Command):
    """evaluate.py on one rank, or deepy.py with several."""

    _records: list[str] = field(default_factory=list)

    def prepare(self) -> list[str]:
        data = write_corpus(self.folder)
        torch.manual_seed(0)
        write_checkpoint(self.folder / "checkpoints", "kerple_log", data, iteration=6)
        config = self.folder / "config.yml"
        config.write_text(json.dumps(training_settings(self.folder, data, num_gpus=self.ranks)))
        words = ["evaluate.py", str(config), "--output", str(self.folder / "report"), "--tokens", "1024"]
        words += ["--lengths", "32", "64", "128", "256", "512", "--modes", "full", "window@32"]
        words += ["--protocol", "non-overlapping", "sliding@16", "--by-position", "4"]
        return words if self.ranks == 1 else ["deepy.py", *words]

    def state(self) -> object:
        results = self.folder / "report" / "results.jsonl"
        return results.stat().st_size if results.exists() else None

    def losses(self, output: str) -> list[str]:
        before, self._records = self._records, record_lines(self.folder / "report")
        return [f"a record is missing: {line[:200]}" for line in before if line not in self._records]

    def result(self) -> object:
        return records(self.folder / "report")


@dataclass
class SweepCommand(Command):
    """tools/sweep.py with two short runs."""

    constants: dict[str, object] = field(default_factory=lambda: {"megatron.sweep.runner:POLL_INTERVAL": 0.02})
    _records: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[Path]:
        return sorted((self.folder / "out" / "runs").glob("*/*"))

    def prepare(self) -> list[str]:
        return ["tools/sweep.py", str(write_sweep(self.folder, set={"eval-iters": 0, "save-interval": 2}))]

    def state(self) -> object:
        return [(names(run), names(run / "checkpoints"), names(run / "evaluation")) for run in self.runs]

    def losses(self, output: str) -> list[str]:
        before, self._records = self._records, [line for run in self.runs for line in record_lines(run)]
        lost = [f"a record is missing: {line[:200]}" for line in before if line not in self._records]
        return lost + [loss for run in self.runs for loss in checkpoint_losses(run / "checkpoints")]

    def result(self) -> object:
        return {f"{run.parent.name}/{run.name}": (trained(run, 6), records(run)) for run in self.runs}


@dataclass
class Demo(Command):
    """tools/demo.py with one method and a few iterations.

    corpus: a finished one to copy; None prepares it, which takes longer.
    """

    corpus: Path | None = None
    iterations: int = 6

    def prepare(self) -> list[str]:
        if self.corpus is not None:
            shutil.copytree(self.corpus, self.folder / "data")
        words = ["tools/demo.py", "--output", str(self.folder / "runs"), "--data", str(self.folder / "data")]
        return [*words, "--methods", "kerple_log", "--iterations", str(self.iterations), "--tokens", "2048"]

    def state(self) -> object:
        runs = self.folder / "runs"
        return [
            names(path) for path in (self.folder / "data" / "python_stdlib", runs, runs / "kerple_log" / "checkpoints")
        ]

    def losses(self, output: str) -> list[str]:
        return checkpoint_losses(self.folder / "runs" / "kerple_log" / "checkpoints")

    def result(self) -> object:
        corpus = {path.name: digest(path) for path in (self.folder / "data" / "python_stdlib").glob("*.bin")}
        return (
            corpus,
            trained(self.folder / "runs" / "kerple_log", self.iterations),
            records(self.folder / "runs" / "report"),
        )


# -- what a command has saved ------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def checkpoint_losses(directory: Path, acknowledged: int | None = None) -> list[str]:
    """Problems with the checkpoint that `latest` names, which must be that of iteration `acknowledged` or later."""
    if not has_checkpoint(directory):
        return [] if acknowledged is None else [f"{directory}: no checkpoint, although {acknowledged} was saved"]
    try:
        step = find_step(directory)
    except CheckpointError as error:
        return [str(error)]
    damage = find_damage(step) or ("no manifest" if read_manifest(step) is None else None)
    if damage is None and acknowledged is not None and iteration_of(step) < acknowledged:
        damage = f"{directory}: `latest` names {step.name}, although {acknowledged} was saved"
    return [damage] if damage else []


def trained(run: Path, iterations: int) -> object:
    """The losses of all iterations, for training and validation, and the tensors of the last checkpoint of a run.

    A value that was measured again must be the same each time.
    """
    losses: dict[str, list[float]] = {}
    for path in (run / "logs").glob("metrics.jsonl"):
        for values in map(json.loads, path.read_text().splitlines()):
            for name in ("train/loss", "validation/loss", "test/loss"):
                found = losses.setdefault(f"{name} {values['iteration']:06}", []) if name in values else []
                if name in values and values[name] not in found:
                    found.append(values[name])
    step = run / "checkpoints" / f"global_step{iterations}"
    tensors = {path.name: tensor_digests(torch.load(path, weights_only=True)) for path in sorted(step.glob("*.pt"))}
    leftover = [name for name in names(step.parent) if name.startswith(".") or name.endswith(".unfinished")]
    return dict(sorted(losses.items())), tensors, leftover


def tensor_digests(value: object) -> object:
    """Nested containers with a digest in place of each tensor; without `lineage`: stopping saves a checkpoint, too."""
    if isinstance(value, torch.Tensor):
        content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
    if isinstance(value, Mapping):
        return {str(name): tensor_digests(item) for name, item in value.items() if name != "lineage"}
    if isinstance(value, list | tuple):
        return [tensor_digests(item) for item in value]
    return repr(value)


def record_lines(folder: Path) -> list[str]:
    """The complete lines of all results.jsonl below a folder."""
    lines = [path.read_text().split("\n")[:-1] for path in sorted(folder.rglob("results.jsonl"))]
    return [line for file in lines for line in file]


def records(folder: Path) -> list[str]:
    """The evaluation records below a folder in a fixed order, without the paths of their checkpoints.

    A kill between two records of a measurement repeats both, so the file may contain a record twice.
    """
    found = [json.loads(line) for line in record_lines(folder)]
    for record in found:
        record["checkpoint"] = {**record["checkpoint"], "path": None}
    return sorted({json.dumps(record, sort_keys=True) for record in found})


# -- chains ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its result, its duration in seconds, and its largest resident memory in bytes."""

    result: str
    seconds: float
    peak: int


def start(words: list[str], command: Command, log: Path, fork: bool) -> Run:
    variables = {**environment(), "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
    return start_run(
        words,
        log,
        cwd=command.folder,
        environment=variables,
        fork=fork,
        prepare=lambda: replace_constants(command.constants),
    )


def run_reference(command: Command, fork: bool = True) -> Reference:
    """Run the command without a kill. Raises UserError if it fails."""
    command.folder.mkdir(parents=True)
    log = command.folder / "output.log"
    run = start(command.prepare(), command, log, fork)
    status = run.wait(SECONDS_TO_FINISH)
    seconds = time.monotonic() - run.started_at
    orphans = run.wait_for_all(SECONDS_TO_EXIT)
    run.kill_all()
    output = log.read_text()
    if status != 0 or orphans or TRACEBACK in output:
        raise UserError(f"{command}: without a kill: status {status}, {len(orphans)} orphans\n{output[-4000:]}")
    return Reference(json.dumps(command.result()), seconds, run.peak)


def run_chain(
    group: str, command: Command, reference: Reference, generator: random.Random, kills: int, fork: bool = True
) -> Outcome:
    """Run the command, kill it at a random moment, and repeat, until it finishes or has been killed `kills` times; then
    let it finish and compare its results. `details["kills"]` lists each kill with its signal and its target, and the
    exit status of the script and the seconds until all processes had ended.
    """
    outcome, killings, peak, started_at = Outcome(group), [], 0, time.monotonic()
    command.folder.mkdir(parents=True)
    log = command.folder / "output.log"
    words = command.prepare()
    killed = True
    while killed and outcome.is_good:
        run = start(words, command, log, fork)
        killed = len(killings) < kills and wait_for_moment(run, command, generator, reference.seconds)
        if killed:
            killings.append(kill(run, generator))
        killed_at = time.monotonic()
        run.wait(SECONDS_TO_EXIT if killed else SECONDS_TO_FINISH)
        orphans = run.wait_for_all(SECONDS_TO_EXIT)
        if killed:
            killings[-1].update(status=run.status, seconds_to_exit=round(time.monotonic() - killed_at, 2))
        outcome.orphans += len(orphans)
        outcome.failures += [f"still running after {SECONDS_TO_EXIT:.0f} s: {command_line(pid)}" for pid in orphans]
        run.kill_all()
        peak = max(peak, run.peak)
        output = log.read_text(errors="replace")
        outcome.tracebacks = output.count(TRACEBACK) + output.count(LAST_RESORT)
        outcome.losses += command.losses(output)
        if not killed and run.status != 0:
            outcome.failures.append(f"exit status {run.status} without a kill: {output[-1000:]}")
    if outcome.is_good:
        result = json.dumps(command.result())
        if result != reference.result:
            outcome.losses.append(f"not the result of an uninterrupted run: {difference(result, reference.result)}")
    outcome.count = len(killings)
    outcome.memory_ratio = round(peak / (reference.peak + MEMORY_ALLOWANCE), 3)
    outcome.seconds = round(time.monotonic() - started_at, 1)
    outcome.details = {"kills": killings, "peak": peak, "command": " ".join(words)}
    return outcome


def wait_for_moment(run: Run, command: Command, generator: random.Random, seconds: float) -> bool:
    """Wait for a random moment of a run that takes `seconds`, or until it has saved something a few times and another
    moment has passed. Returns False if the run has ended before.
    """
    if generator.random() < 0.5:
        run.wait(generator.uniform(0.0, 0.8 * seconds))
    else:
        changes, state = generator.randint(1, 6), command.state()

        def saved() -> bool:
            nonlocal changes, state
            before, state = state, command.state()
            changes -= state != before
            return changes <= 0

        run.wait(2 * seconds, saved)
        run.wait(generator.uniform(0.0, 0.02))
    return run.poll() is None


def kill(run: Run, generator: random.Random) -> dict[str, object]:
    """Send a random signal. Two of five SIGKILLs hit a random process that the script has started, if there is one.

    Python's resource tracker, a helper of multiprocessing, is spared: the next one prints tracebacks of its own.
    """
    number = generator.choices(list(SIGNALS), list(SIGNALS.values()))[0]
    others = [pid for pid in run.processes() if pid != run.pid and "resource_tracker" not in command_line(pid)]
    target = generator.choice(others) if number == signal.SIGKILL and others and generator.random() < 0.4 else run.pid
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        (os.killpg if number in (signal.SIGINT, signal.SIGHUP) else os.kill)(target, number)
    return {"signal": number.name, "target": "script" if target == run.pid else "child"}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    except OSError:
        return str(pid)


def difference(first: str, second: str) -> str:
    """The first difference of two texts, with what precedes it."""
    index = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    start = max(0, index - 60)
    return f"{first[start : index + 60]!r} instead of {second[start : index + 60]!r}"


# -- the part ----------------------------------------------------------------------------------------------------------

KILLS_PER_CHAIN = 12
VALIDATION = {"eval_interval": 2, "eval_iters": 2, "log_interval": 3}


def training(ranks: int = 1, **keys: object) -> Callable[[Path], Command]:
    return lambda folder: Training(folder, ranks, iterations=40 if ranks == 1 else 20, keys=keys)


class Kills:
    """Trials that kill one command repeatedly. `commands`: name -> (weight, command that writes in a folder)."""

    def __init__(self, folder: Path, only: str):
        corpus = folder / "corpus"
        commands: dict[str, tuple[int, Callable[[Path], Command]]] = {
            "training": (8, training()),
            "training, async save": (8, training(async_save=True)),
            "training, workers, validation": (12, training(num_workers=2, **VALIDATION)),
            "training, 2 ranks, async save": (6, training(2, async_save=True)),
            "training, 2 ranks, new interpreters": (2, training(2)),
            **{
                f"training, 2 ranks, ZeRO {stage}, worker, validation": (
                    6,
                    training(2, zero_optimization={"stage": stage}, num_workers=1, **VALIDATION),
                )
                for stage in range(4)
            },
            "preprocessing": (10, Preprocessing),
            "preprocessing, 2 workers": (5, lambda path: Preprocessing(path, workers=2)),
            "evaluation": (10, Evaluation),
            "evaluation, 2 ranks": (6, lambda path: Evaluation(path, ranks=2)),
            "sweep": (8, SweepCommand),
            "demo": (5, Demo),
            "demo, with its corpus": (5, lambda path: Demo(path, corpus=corpus)),
        }
        self.commands = {name: value for name, value in commands.items() if only in name}
        self._all, self._folder, self._corpus = commands, folder, corpus
        self._references: dict[str, Reference] = {}

    def trial(self, seed: str, folder: Path, limit: int) -> Outcome:
        """One trial with at most `limit` kills."""
        generator = random.Random(seed)
        name = generator.choices(list(self.commands), [weight for weight, _ in self.commands.values()])[0]
        if "with its corpus" in name and not self._corpus.exists():
            self._reference("demo")
        reference, command = self._reference(name), self._all[name][1](folder)
        fork = "new interpreters" not in name
        return run_chain(name, command, reference, generator, min(limit, KILLS_PER_CHAIN), fork)

    def _reference(self, name: str) -> Reference:
        if name not in self._references:
            command = self._all[name][1](self._folder / f"reference{len(self._references)}")
            self._references[name] = run_reference(command, fork="new interpreters" not in name)
            if name == "demo":
                (command.folder / "data").rename(self._corpus)
            remove(command.folder)
        return self._references[name]
