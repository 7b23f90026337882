"""Commands that are killed and resumed until they finish: `Kills`.

After every kill, no process of the command may remain, and what it has acknowledged must still be there. At the end,
its results must equal those of an uninterrupted run, bit for bit.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from megatron.checkpoint.directory import find_damage, find_step, has_checkpoint, iteration_of, read_manifest
from megatron.checkpoint.storage import CheckpointError
from megatron.utils.errors import UserError
from tests.soak.cases import LAST_RESORT, MEMORY_ALLOWANCE, TRACEBACK, Outcome, draw_seeded, pick, remove
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.forks import Run, start_run
from tests.support.runs import training_settings
from tests.support.sweeps import write_sweep

# After a kill; what is left then is an orphan. A process that was just starting ends after its imports, which take long
# on a busy machine.
SECONDS_TO_EXIT = 120.0
SECONDS_TO_FINISH = 300.0

# -- commands ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command that can be killed and repeated. Patterns of paths are relative to its folder.

    Attributes:
        prepare: writes the input files to a folder, and returns the script and its options.
        saved: files and folders whose times change whenever something is saved.
        checkpoints: folders of checkpoints of training runs.
        files: files that must be those of an uninterrupted run.
        constants: "module:NAME" -> value, replaced in the process and its forks.
        logged: the losses in the training log that must be those of an uninterrupted run. The demo does not repeat the
            validation after the last step, because it does not train again.
    """

    prepare: Callable[[Path], list[str]]
    saved: Sequence[str]
    checkpoints: str = "nothing"
    files: str = "nothing"
    constants: Mapping[str, object] = field(default_factory=dict)
    logged: frozenset[str] = frozenset({"train/loss", "validation/loss", "test/loss"})

    def state(self, folder: Path) -> object:
        """Changes whenever something is saved."""
        times = {}
        for path in (path for pattern in self.saved for path in folder.glob(pattern)):
            with contextlib.suppress(FileNotFoundError):
                times[path] = path.stat().st_mtime_ns
        return times

    def losses(self, folder: Path, output: str) -> list[str]:
        """What is damaged, or missing although `output`, that of all runs so far, acknowledges it."""
        acknowledged: dict[Path, int] = {}
        for directory, number in re.findall(r"saved (\S+)/global_step(\d+)", output):
            acknowledged[folder / directory] = max(int(number), acknowledged.get(folder / directory, 0))
        losses = []
        for directory in {*acknowledged, *folder.glob(self.checkpoints)}:
            losses += checkpoint_losses(directory, acknowledged.get(directory))
        for part in output.split(".bin/.idx: "):  # after it has finished, preprocessing starts over
            resumed = [int(count.replace(",", "")) for count in re.findall(r"resuming after ([\d,]+) documents", part)]
            losses += [] if resumed == sorted(resumed) else [f"documents at each resume: {resumed}"]
        return losses

    def result(self, folder: Path) -> str:
        """The results of the finished command, for a comparison."""
        runs = [trained(directory, self.logged) for directory in sorted(folder.glob(self.checkpoints))]
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob(self.files))}
        leftover = sorted(path.name for path in folder.iterdir() if {"partial", "progress"} & set(path.name.split(".")))
        return json.dumps([runs, files, leftover, evaluated(record_lines(folder))])


def training(ranks: int = 1, **keys: object) -> Command:
    """train.py on one rank, or deepy.py with several; it saves at every iteration. keys: configuration keys."""

    def prepare(folder: Path) -> list[str]:
        lengths = {"train_iters": 24, "lr_decay_iters": 24, "save_interval": 1, "keep_last_n_checkpoints": 2}
        settings = {"eval_iters": 0, "hidden_dropout": 0.1, "num_gpus": ranks, **lengths, **keys}
        data = write_corpus(folder, documents=80)
        (folder / "config.yml").write_text(json.dumps(training_settings(folder, data, **settings)))
        return ["train.py", "config.yml"] if ranks == 1 else ["deepy.py", "train.py", "config.yml"]

    return Command(prepare, ["checkpoints"], "checkpoints")


def preprocessing(workers: int = 1) -> Command:
    """preprocess_data.py, which commits after every work item."""

    def prepare(folder: Path) -> list[str]:
        texts = [f"document {number} " * (number % 23 + 1) for number in range(4000)]
        lines = [json.dumps({"text": text, "title": f"title {number}"}) + "\n" for number, text in enumerate(texts)]
        (folder / "input").mkdir()
        for shard in range(4):
            (folder / f"input/{shard}.jsonl").write_text("".join(lines[shard * 1000 : (shard + 1) * 1000]))
        words = ["tools/datasets/preprocess_data.py", "--input", "input", "--output-prefix", "out", "--append-eod"]
        words += ["--jsonl-keys", "text", "title", "--tokenizer-type", "CharLevelTokenizer"]
        return [*words, "--workers", str(workers)]

    constants = {
        "megatron.preparation.preprocessing:COMMIT_INTERVAL_SECONDS": 0.0,
        "megatron.preparation.readers:BLOCK": 4000,
        "megatron.preparation.encoding:WORK_ITEM_BYTES": 8000,
    }
    return Command(prepare, ["out.progress.json"], files="out_*.[bi][id][nx]", constants=constants)


def evaluation(ranks: int = 1) -> Command:
    """evaluate.py on one rank, or deepy.py with several."""

    def prepare(folder: Path) -> list[str]:
        data = write_corpus(folder)
        torch.manual_seed(0)  # of the weights that write_checkpoint does not seed
        write_checkpoint(folder / "checkpoints", "kerple_log", data, iteration=6)
        (folder / "config.yml").write_text(json.dumps(training_settings(folder, data, num_gpus=ranks)))
        words = ["evaluate.py", "config.yml", "--output", "report", "--tokens", "1024", "--by-position", "4"]
        words += ["--lengths", "32", "64", "128", "256", "512", "--modes", "full", "window@32"]
        words += ["--protocol", "non-overlapping", "sliding@16"]
        return words if ranks == 1 else ["deepy.py", *words]

    return Command(prepare, ["report/results.jsonl"])


def sweep() -> Command:
    """tools/sweep.py with two short runs."""

    def prepare(folder: Path) -> list[str]:
        return ["tools/sweep.py", str(write_sweep(folder, set={"eval-iters": 0, "save-interval": 2}))]

    runs = "out/runs/*/*"
    saved = [runs, f"{runs}/checkpoints", f"{runs}/evaluation"]
    return Command(prepare, saved, saved[1], constants={"megatron.sweep.runner:POLL_INTERVAL": 0.02})


def demo(corpus: Path | None = None) -> Command:
    """tools/demo.py with one method. corpus: a finished one to copy; None: the demo prepares it."""

    def prepare(folder: Path) -> list[str]:
        if corpus is not None:
            shutil.copytree(corpus, folder / "data")
        # The demo takes relative paths from the root of the project.
        words = ["tools/demo.py", "--output", str(folder / "runs"), "--data", str(folder / "data")]
        return [*words, "--methods", "kerple_log", "--iterations", "6", "--tokens", "2048"]

    saved = ["data/python_stdlib", "runs", "runs/kerple_log/checkpoints"]
    return Command(prepare, saved, saved[2], files="data/python_stdlib/*.bin", logged=frozenset({"train/loss"}))


# -- what a command has saved ------------------------------------------------------------------------------------------


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


def trained(directory: Path, logged: frozenset[str]) -> object:
    """The losses `logged` of a run and the tensors of its last checkpoint, in `directory`.

    A value that was measured again must be the same each time.
    """
    losses: dict[str, list[float]] = {}
    for values in map(json.loads, (directory.parent / "logs" / "metrics.jsonl").read_text().splitlines()):
        for name in logged & values.keys():
            found = losses.setdefault(f"{name} {values['iteration']:06}", [])
            found += [] if values[name] in found else [values[name]]
    step = find_step(directory)
    tensors = {path.name: tensor_digests(torch.load(path, weights_only=True)) for path in sorted(step.glob("*.pt"))}
    leftover = [path.name for path in directory.iterdir() if path.name[0] == "." or path.suffix == ".unfinished"]
    return step.name, dict(sorted(losses.items())), tensors, leftover


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
    texts = [path.read_text().rpartition("\n")[0] for path in sorted(folder.rglob("results.jsonl"))]
    return "\n".join(texts).splitlines()


def evaluated(lines: list[str]) -> list[str]:
    """Evaluation records in a fixed order, without the paths of their checkpoints.

    A kill between two records of a measurement repeats both, so the file may contain a record twice.
    """
    found = [json.loads(line) for line in lines]
    for record in found:
        record["checkpoint"]["path"] = None
    return sorted({json.dumps(record, sort_keys=True) for record in found})


# -- kills -------------------------------------------------------------------------------------------------------------


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
PLANS = st.lists(
    st.builds(
        Kill,
        saves=st.just(0) | st.integers(1, 6),
        delay=st.floats(0, 0.8),
        number=st.sampled_from(SIGNALS),
        child=st.none() | st.integers(0, 9),
    ),
    min_size=1,
    max_size=12,
)


class Uninterrupted(NamedTuple):
    """An uninterrupted run: its result, its duration in seconds, and its largest resident memory in bytes."""

    result: str
    seconds: float
    peak: int


VALIDATION = {"eval_interval": 2, "eval_iters": 2, "log_interval": 3}


class Kills:
    """Trials that kill a command and resume it, in folders below `folder`."""

    def __init__(self, folder: Path, only: str):
        self._folder, self._references = folder, dict[str, Uninterrupted]()
        # Group -> how often it is chosen, and its command.
        self._all: dict[str, tuple[int, Command]] = {
            "training": (4, training()),
            "training, async save": (4, training(async_save=True)),
            "training, workers, validation": (6, training(num_workers=2, **VALIDATION)),
            "training, 2 ranks, async save": (3, training(2, async_save=True)),
            "preprocessing": (5, preprocessing()),
            "preprocessing, 2 workers": (3, preprocessing(2)),
            "evaluation": (5, evaluation()),
            "evaluation, 2 ranks": (3, evaluation(2)),
            "sweep": (4, sweep()),
            "demo": (2, demo()),
            "demo, with its corpus": (3, demo(folder / "corpus")),
        }
        for stage in range(4):
            zero = training(2, zero_optimization={"stage": stage}, num_workers=1, **VALIDATION)
            self._all[f"training, 2 ranks, ZeRO {stage}, worker, validation"] = (3, zero)
        self.commands = {group: value for group, value in self._all.items() if only in group}

    def trial(self, seed: str, folder: Path, limit: int) -> Outcome:
        """Kill a command as planned by `seed`, at most `limit` times, and resume it until it finishes; then compare its
        results with those of an uninterrupted run, which precedes the first trial of a group.
        """
        groups = [group for group, (weight, _) in self.commands.items() for _ in range(weight)]
        group, plan = draw_seeded(lambda draw: (pick(draw, groups), draw(PLANS)), seed)
        command, reference = self.commands[group][1], self._reference(group)
        outcome, peak = run_to_end(group, command, folder, plan[:limit], reference.seconds)
        if outcome.is_good and (result := command.result(folder)) != reference.result:
            pairs = zip(f"{result} ", f"{reference.result} ", strict=False)
            start = max(0, next(index for index, (a, b) in enumerate(pairs) if a != b) - 60)
            first, second = result[start : start + 120], reference.result[start : start + 120]
            outcome.losses.append(f"not the result of an uninterrupted run: {first!r} instead of {second!r}")
        outcome.memory_ratio = round(peak / (reference.peak + MEMORY_ALLOWANCE), 3)
        return outcome

    def _reference(self, group: str) -> Uninterrupted:
        if group not in self._references:
            if group == "demo, with its corpus":
                self._reference("demo")
            folder = self._folder / f"reference{len(self._references)}"
            command = self._all[group][1]
            outcome, peak = run_to_end(group, command, folder, (), 0.0)
            if not outcome.is_good:
                raise UserError(f"{folder} fails without a kill: {outcome}")
            self._references[group] = Uninterrupted(command.result(folder), outcome.seconds, peak)
            if group == "demo":
                (folder / "data").rename(self._folder / "corpus")
            remove(folder)
        return self._references[group]


def run_to_end(group: str, command: Command, folder: Path, plan: Sequence[Kill], seconds: float) -> tuple[Outcome, int]:
    """Run a command, which takes about `seconds`, in a new folder, kill it as planned, and repeat. Returns the largest
    resident memory of a process, too. `details["kills"]` has the exit status and the seconds until all processes ended.
    """
    outcome, peak, started_at = Outcome(group), 0, time.monotonic()
    folder.mkdir()
    log, words, records = folder / "output.log", command.prepare(folder), list[str]()
    done: list[dict[str, object]] = []
    killed = True
    while killed and outcome.is_good:
        run = start_run(words, log, constants=command.constants)
        killed = len(done) < len(plan) and wait_for_moment(run, command, folder, plan[len(done)], seconds)
        if killed:
            done.append(send(run, plan[len(done)]))

        # Wait for the script and its descendants.
        killed_at = time.monotonic()
        run.wait(SECONDS_TO_EXIT if killed else SECONDS_TO_FINISH)
        left = run.wait_for_all(SECONDS_TO_EXIT)
        outcome.orphans += len(left)
        outcome.failures += [f"still running after {SECONDS_TO_EXIT:.0f} s: {command_line(pid)}" for pid in left]
        run.kill_all()
        peak = max(peak, run.peak)

        # Look for errors and for what is missing.
        output = log.read_text(errors="replace")
        outcome.tracebacks = output.count(TRACEBACK) + output.count(LAST_RESORT)
        earlier, records = records, record_lines(folder)
        lost = [line[:200] for line in earlier if line not in records]
        outcome.losses += command.losses(folder, output) + [f"a record is missing: {line}" for line in lost]
        if killed:
            done[-1].update(status=run.status, seconds_to_exit=round(time.monotonic() - killed_at, 2))
        elif run.status != 0:
            outcome.failures.append(f"exit status {run.status} without a kill: {output[-1000:]}")
    outcome.count, outcome.seconds = len(done), round(time.monotonic() - started_at, 1)
    outcome.details = {"kills": done, "command": " ".join(words)}
    return outcome, peak


def wait_for_moment(run: Run, command: Command, folder: Path, kill: Kill, seconds: float) -> bool:
    """Wait for the moment of a kill. Returns False if the run has ended before."""
    changes, state = kill.saves, command.state(folder)

    def saved() -> bool:
        nonlocal changes, state
        before, state = state, command.state(folder)
        changes -= state != before
        return changes <= 0

    if kill.saves:
        run.wait(2 * seconds, saved)
    run.wait(kill.delay * (0.02 if kill.saves else seconds))
    return run.poll() is None


def send(run: Run, kill: Kill) -> dict[str, object]:
    """Send the signal. Python's resource tracker, a helper of multiprocessing, is spared: the next one would print
    tracebacks of its own.
    """
    children = [pid for pid in run.processes() if pid != run.pid and "resource_tracker" not in command_line(pid)]
    target = run.pid
    if kill.number == signal.SIGKILL and kill.child is not None and children:
        target = children[kill.child % len(children)]
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        (os.killpg if kill.number in (signal.SIGINT, signal.SIGHUP) else os.kill)(target, kill.number)
    return {"signal": kill.number.name, "target": "script" if target == run.pid else "child"}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    except OSError:
        return str(pid)
