"""The runs of a sweep and what remains to be done of each, derived from the files in its folder.

The folder of a run contains `config.yml` (the merged configuration), `data.json` (what identifies
the data and the external method that the training started with), `checkpoints/`, `logs/`,
`output.log` (the output of its processes) and `evaluation/` with the results and `evaluated.json`,
which records the weights and options that produced them.
"""

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter
from typing_extensions import NotRequired, TypedDict

from megatron.checkpoint.configuration import (
    code_digests,
    evaluated_method,
    saved_config,
)
from megatron.checkpoint.directory import (
    find_step,
    has_checkpoint,
    iteration_of,
    read_state_file,
    tag_for,
)
from megatron.checkpoint.manifest import find_damage, weights_fingerprint
from megatron.checkpoint.recipe import same_training
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config, UserError
from megatron.config.schema.output import LoggingConfig
from megatron.config.yaml_files import read_file as read_yaml
from megatron.data.indexed_dataset import (
    bin_path,
    file_sample,
    file_sha256,
    idx_path,
    read_manifest,
)
from megatron.data.splits import dataset_prefixes
from megatron.data.streams import evaluation_corpora
from megatron.evaluation.records import RESULTS, has_results
from megatron.evaluation.text import corpus_name
from megatron.reporting.training_log import last_metrics
from megatron.sweep.definition import Choice, Sweep, run_name
from megatron.utils.files import METRICS, read_file, write_atomically
from megatron.utils.typed_json import Count, Name, parse_json

EVALUATED = "evaluated.json"
PREVIOUS_RESULTS = "results.previous-{}.jsonl"  # numbered from 1
# How the last failed training or evaluation exited; removed when the run is tried again.
FAILED = "failed.json"
# What identifies the datasets that the training started with, by prefix, and the external method,
# by its pos_emb_module. Runs of earlier versions do not have it.
DATA = "data.json"
MAX_JOURNAL_BYTES = 1 << 20
# Keys for output folders, which the sweep sets.
FOLDER_KEYS = ("save", "load", "log_dir", "tensorboard_dir", "eval_results_prefix")
# Keys that do not change what a run computes. They may differ between two configurations of the
# same run.
REPORTING_KEYS = {
    *FOLDER_KEYS,
    *LoggingConfig.model_fields,
    "log_interval",
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "keep_last_n_checkpoints",
}


class Evaluated(TypedDict):
    """The contents of `evaluated.json`.

    Attributes:
        options: of the calls of evaluate.py that `results.jsonl` may have results of.
        results: the SHA-256 of `results.jsonl` when the last call started or finished.
        fingerprint, finished: how many of these calls have finished for the weights with this
            fingerprint. Without these keys, no call has finished; evaluate.py does not measure
            again what is in `results.jsonl`.
    """

    options: list[list[str]]
    fingerprint: NotRequired[Name]
    finished: NotRequired[Count]
    results: NotRequired[str]


_EVALUATED = TypeAdapter(Evaluated)
_DATA = TypeAdapter(dict[str, dict[str, str]])


class State(Enum):
    """The next step of a run."""

    TRAIN = "to train"
    RESUME = "to resume"
    EVALUATE = "to evaluate"
    FINISHED = "finished"


class Status(NamedTuple):
    """State of a run, the iteration of its last checkpoint (0: none), and iterations left."""

    state: State
    saved_iteration: int
    steps_left: int


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep: one combination of choices. Every call reads its state from its folder."""

    name: str
    folder: Path
    config: Config
    evaluation: tuple[tuple[str, ...], ...]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def _last_step(self) -> Path:
        return self.checkpoints / tag_for(self.steps)

    @property
    def results(self) -> Path:
        return self.folder / "evaluation"

    @property
    def metrics(self) -> Path:
        return self.folder / "logs" / METRICS

    @property
    def steps(self) -> int:
        return self.config.schedule.train_iters or 0

    @property
    def tokens_per_step(self) -> int:
        copies = self.config.parallel.data_parallel_size(self.num_gpus)
        return self.config.batch.resolve(copies)[2] * self.config.model.seq_length

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the run needs on a machine with GPUs."""
        parallel = self.config.parallel
        return self.config.launcher.num_gpus or parallel.model_parallel_size * max(
            1, parallel.pipe_parallel_size
        )

    def is_trained(self) -> bool:
        """Whether the last checkpoint is complete. Compares file sizes; the evaluation compares
        checksums.
        """
        return self._last_step.is_dir() and find_damage(self._last_step, contents=False) is None

    def evaluations_done(self) -> int:
        """How many calls of evaluate.py have finished for the weights of the last checkpoint, with
        the current options.

        Raises UserError if the run is not trained, or `evaluated.json` is not valid.
        """
        evaluated = self._evaluated()
        if evaluated is None or not self._has_current_options(evaluated):
            return 0
        # Results may have been lost since.
        digest = self._results_digest()
        if not digest or evaluated.get("results", digest) != digest:
            return 0
        if evaluated.get("fingerprint") != weights_fingerprint(self._last_step):
            return 0
        return evaluated.get("finished", 0)

    def start_evaluation(self) -> tuple[str, ...]:
        """The options of the next call of evaluate.py. Records that it starts.

        If `results.jsonl` may have results of options or labels that the sweep no longer has, it is
        renamed first.
        """
        done, evaluated = self.evaluations_done(), self._evaluated()
        started = done + 1
        if evaluated is not None and self._has_current_options(evaluated):
            started = max(started, len(evaluated["options"]))
        elif evaluated is not None and has_results(self.results):
            for number in itertools.count(1):
                path = self.results / PREVIOUS_RESULTS.format(number)
                if not path.exists():
                    (self.results / RESULTS).replace(path)
                    break
        self.results.mkdir(parents=True, exist_ok=True)
        self._write_evaluated(started, done)
        return self.evaluation[done]

    def mark_evaluated(self) -> None:
        """Record that the call of evaluate.py that was started last has finished."""
        evaluated = self._evaluated()
        assert evaluated is not None  # start_evaluation has written it
        self._write_evaluated(len(evaluated["options"]), evaluated.get("finished", 0) + 1)

    def _evaluated(self) -> Evaluated | None:
        path = self.results / EVALUATED
        if not path.exists():
            return None
        return parse_json(read_file(path, MAX_JOURNAL_BYTES), _EVALUATED, str(path))

    def _results_digest(self) -> str:
        """The SHA-256 of the results; empty without results."""
        path = self.results / RESULTS
        return file_sha256(path) if path.exists() else ""

    def _has_current_options(self, evaluated: Evaluated) -> bool:
        """Whether the sweep still has all calls that the results are of. New ones may follow."""
        current = list(map(list, self.evaluation))
        return evaluated["options"] == current[: len(evaluated["options"])]

    def _write_evaluated(self, started: int, finished: int) -> None:
        options = [list(words) for words in self.evaluation[:started]]
        fingerprint = weights_fingerprint(self._last_step)
        content = {
            "options": options,
            "fingerprint": fingerprint,
            "finished": finished,
            "results": self._results_digest(),
        }
        text = json.dumps(content) + "\n"
        write_atomically(self.results / EVALUATED, text.encode())

    def mark_failed(self, task: str, exit_status: int) -> None:
        content = json.dumps({"task": task, "exit_status": exit_status}) + "\n"
        write_atomically(self.folder / FAILED, content.encode())

    def forget_failure(self) -> None:
        """Delete the record of a failure, before the run is tried again."""
        (self.folder / FAILED).unlink(missing_ok=True)

    def failed_at(self) -> int | None:
        """Modification time in ns of the record of a failure; None without a failure."""
        try:
            return (self.folder / FAILED).stat().st_mtime_ns
        except OSError:
            return None

    def status(self) -> Status:
        if self.is_trained():
            if self.evaluations_done() == len(self.evaluation):
                return Status(State.FINISHED, self.steps, 0)
            return Status(State.EVALUATE, self.steps, 0)
        saved = 0
        if has_checkpoint(self.checkpoints):
            saved = iteration_of(find_step(self.checkpoints))
        state = State.RESUME if saved else State.TRAIN
        return Status(state, saved, max(0, self.steps - saved))

    def logged_iteration(self) -> int:
        """The last iteration in the metrics file: the progress of a running training."""
        last = last_metrics(self.metrics)
        return last["iteration"] if last else 0

    def check_folder(self) -> None:
        """Raise UserError if the folder contains a run with another configuration, or one that was
        trained on other data, or with another external method, in the same place.
        """
        path = self.folder / "config.yml"
        if not path.is_file():
            if has_checkpoint(self.checkpoints):
                raise UserError(
                    f"{self.folder}: contains checkpoints but no config.yml, so their "
                    "configuration is unknown"
                )
            return

        # The configuration, with tuples as lists as in the file.
        stored = {entry.key: entry.value for entry in read_yaml(path)}
        current = json.loads(json.dumps(self.config.to_flat()))
        differences = []
        for key in dict.fromkeys([*stored, *current]):
            if key not in REPORTING_KEYS and stored.get(key) != current.get(key):
                there, here = stored.get(key, "not set"), current.get(key, "not set")
                differences.append(f"{key}: {there} in the folder, {here} in the sweep")
        if differences:
            raise UserError(
                f"{self.folder}: contains a run with another configuration "
                f"({'; '.join(differences)}); change the sweep's `output`, or delete that folder"
            )

        # Checkpoints can be those of another run, whose folder was copied or moved.
        if not has_checkpoint(self.checkpoints):
            return
        if not self._has_own_checkpoint():
            raise UserError(
                f"{self.checkpoints}: was trained with another configuration than that of run "
                f"{self.name}; restore its checkpoints, or delete the folder of the run"
            )

        # The data and the external method that the checkpoints were trained with.
        path = self.folder / DATA
        if not path.is_file():
            return
        present = self._inputs()
        trained = parse_json(read_file(path, MAX_JOURNAL_BYTES), _DATA, str(path))
        for place, contents in trained.items():
            now = present.get(place, {})
            if any(now.get(name, value) != value for name, value in contents.items()):
                raise UserError(
                    f"{self.folder}: contains a run that was trained with other contents of "
                    f"{place} than it has now (in {Path.cwd()}); restore them, start the sweep in "
                    "the folder in which it was started, change its `output`, or delete the folder "
                    "of the run"
                )

    def _has_own_checkpoint(self) -> bool:
        """Whether the last checkpoint was trained as this run is. True if it is damaged: then only
        this run fails.
        """
        config = self.config
        try:
            step = find_step(self.checkpoints)
            saved = saved_config(step, config)
            precision = read_state_file(step).get("precision", config.precision.dtype)
        except CheckpointError:
            return True
        is_like_it = same_training(saved, config) and saved.batch == config.batch
        has_seed = saved.training.seed == config.training.seed
        return is_like_it and has_seed and precision == config.precision.dtype

    def _inputs(self) -> dict[str, dict[str, str]]:
        """What identifies the datasets and the code of an external method (see `DATA`)."""
        inputs = {prefix: _identify_dataset(prefix) for prefix in dataset_prefixes(self.config)}
        if module := self.config.model.pos_emb_module:
            inputs[module] = {"code": " ".join(code_digests(self.config.model))}
        return inputs

    def write_config(self) -> Path:
        """Write the configuration for the processes of the run, and before its first checkpoint
        what identifies its data and its external method.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not has_checkpoint(self.checkpoints):
            inputs = json.dumps(self._inputs(), indent=1)
            write_atomically(self.folder / DATA, f"{inputs}\n".encode())

        # YAML has no surrogate pairs.
        path = self.folder / "config.yml"
        content = json.dumps(self.config.to_flat(), indent=1, ensure_ascii=False)
        write_atomically(path, f"{content}\n".encode())
        return path


def plan(sweep: Sweep) -> list[SweepRun]:
    """All runs of a sweep. Raises UserError for an invalid configuration, if two runs have the same
    one, or if a folder contains another run.

    Runs that a table could not distinguish are evaluated with a `--label`.
    """
    # A run per combination of choices, with its own folders.
    combinations = list(sweep.combinations())
    runs = []
    for choices in combinations:
        name = run_name(choices)
        folder = sweep.output / "runs" / name
        try:
            run = SweepRun(name, folder, sweep.configuration(choices), ())
            _check_keys(run)
        except UserError as error:
            raise UserError(f"{sweep.path}: run {name}: {error}") from error
        folders = {
            "save": str(run.checkpoints),
            "load": str(run.checkpoints),
            "log_dir": str(folder / "logs"),
        }
        if run.config.logging.tensorboard_dir is not None:
            folders["tensorboard_dir"] = str(folder / "tensorboard")
        runs.append(replace(run, config=run.config.updated(**folders)))

    # Two runs with one configuration would be the same run.
    names: dict[str, str] = {}
    for run in runs:
        keys = {key: value for key, value in run.config.to_flat().items() if key not in FOLDER_KEYS}
        other = names.setdefault(json.dumps(keys, sort_keys=True), run.name)
        if other != run.name:
            raise UserError(
                f"{sweep.path}: runs {other} and {run.name} have the same configuration; remove a "
                "choice, or change its keys"
            )
        run.check_folder()

    # Label an evaluation if nothing else distinguishes its runs in a table. The label follows one
    # that it has.
    for options in sweep.evaluation:
        axes = _ambiguous_axes(runs, combinations, options)
        for index, choices in enumerate(combinations):
            words = options
            if axes:
                label = ", ".join(choices[axis].label for axis in axes)
                given = [f"{value}, {label}" for value in _values(options, "--label")]
                words = (*options, "--label", *(given or [label]))  # the last one counts
            runs[index] = replace(runs[index], evaluation=(*runs[index].evaluation, words))
    return runs


def _check_keys(run: SweepRun) -> None:
    """Raises UserError if a run has nothing to train or no valid batch size, if its ranks should be
    started by another program, or if it should start from another checkpoint than the last one in
    its folder.
    """
    if not run.steps:
        raise UserError(
            f"train_iters is {run.config.schedule.train_iters}; set it to the number of iterations"
        )
    run.config.batch.resolve(run.config.parallel.data_parallel_size(run.num_gpus))
    for key in ("deepspeed_slurm", "deepspeed_mpi"):
        if getattr(run.config.launcher, key):
            raise UserError(
                f"{key} cannot be used in a sweep, which starts the ranks of its runs; remove it"
            )
    settings = run.config.checkpoint
    if settings.finetune:
        raise UserError("finetune cannot be used in a sweep; remove it, or finetune with train.py")
    if settings.iteration is not None:
        raise UserError(
            "iteration cannot be used in a sweep, which resumes from the last checkpoint; remove it"
        )
    if settings.load not in (None, settings.save, str(run.checkpoints)):
        raise UserError(
            f"load is {settings.load}, but the runs of a sweep start from scratch, and resume from "
            "their own checkpoints; remove it (or set: {load: null})"
        )


def select(runs: Sequence[SweepRun], patterns: Sequence[str]) -> list[SweepRun]:
    """The runs whose names match a shell pattern. Raises UserError if a pattern matches none."""
    for pattern in patterns:
        if not any(fnmatchcase(run.name, pattern) for run in runs):
            raise UserError(
                f"--only {pattern}: matches no run; the first one is called {runs[0].name}"
            )
    return [run for run in runs if any(fnmatchcase(run.name, pattern) for pattern in patterns)]


def _ambiguous_axes(
    runs: Sequence[SweepRun], combinations: Sequence[tuple[Choice, ...]], options: Sequence[str]
) -> list[int]:
    """Indices of the axes that distinguish runs whose records of an evaluation with these options
    have the same method, model size, corpus and seed. Raises UserError that names the run if it has
    no data for the evaluation.
    """
    part = next(iter(_values(options, "--split")), "valid")
    groups: dict[tuple[object, ...], list[tuple[Choice, ...]]] = {}
    for run, choices in zip(runs, combinations, strict=True):
        model = run.config.model
        try:
            corpora, _ = evaluation_corpora(run.config, part)
        except UserError as error:
            raise UserError(f"run {run.name}: {error}") from error
        size = (model.num_layers, model.hidden_size, model.seq_length)
        method, corpus = evaluated_method(run.config), corpus_name(corpora)
        identity = (method, size, corpus, run.config.training.seed)
        groups.setdefault(identity, []).append(choices)
    ambiguous = []
    for axis in range(len(combinations[0])):
        if any(len({choices[axis].label for choices in group}) > 1 for group in groups.values()):
            ambiguous.append(axis)
    return ambiguous


def _values(options: Sequence[str], name: str) -> list[str]:
    """The values of an option of evaluate.py; empty without it."""
    if name not in options:
        return []
    following = options[options.index(name) + 1 :]
    return list(itertools.takewhile(lambda word: not word.startswith("--"), following))


def missing_data(runs: Sequence[SweepRun]) -> list[str]:
    """Prefixes of datasets that the runs need and that do not exist."""
    missing: dict[str, None] = {}  # as an ordered set
    for run in runs:
        for prefix in dataset_prefixes(run.config):
            if not idx_path(prefix).is_file():
                missing[prefix] = None
    return list(missing)


def _identify_dataset(prefix: str) -> dict[str, str]:
    """What identifies a dataset, as far as it is known: the SHA-256 of its .idx, a hash of parts of
    its .bin, and from its manifest the SHA-256 of its .bin and the fingerprint of its tokenizer.
    Empty if there is no dataset.
    """
    values = {}
    if (path := idx_path(prefix)).is_file():
        status = path.stat()
        values["idx"] = _sha256(path, status.st_size, status.st_mtime_ns)
        if (binary := bin_path(prefix)).is_file():
            values["bin_sample"] = file_sample(binary)
        if (manifest := read_manifest(prefix)) is not None:
            values |= {"bin": manifest.sha256, "tokenizer": manifest.tokenizer_fingerprint}
    return values


@functools.cache
def _sha256(path: Path, _size: int, _modified: int) -> str:
    """SHA-256 of a file, cached for its size and modification time."""
    return file_sha256(path)
