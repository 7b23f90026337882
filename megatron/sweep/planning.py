"""What is left to do of a sweep: the state of every run, from what lies in its folder.

A run's folder: `config.yml` (the merged configuration), `checkpoints/`, `logs/`, `output.log` (what its processes
printed), and `evaluation/` with the results and `evaluated.json`: of which checkpoint they are, with which options.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.checkpoint.configuration import evaluated_method
from megatron.checkpoint.directory import find_damage, find_step, has_checkpoint, iteration_of, tag_for
from megatron.config import Config, UserError
from megatron.config.yaml_files import read_file
from megatron.evaluation.records import has_results
from megatron.reporting.speed import METRICS, read_log
from megatron.sweep.definition import Choice, Sweep, run_name
from megatron.utils.files import write_atomically

EVALUATED = "evaluated.json"
# Where a run writes; the same run in another folder is the same run.
FOLDERS = ("save", "load", "log_dir", "tensorboard_dir", "eval_results_prefix")


class State(Enum):
    """What is next for a run."""

    TRAIN = "to train"
    RESUME = "to resume"
    EVALUATE = "to evaluate"
    FINISHED = "finished"


@dataclass(frozen=True)
class Run:
    """One combination of a sweep. Everything about its progress is read from its folder, each time anew."""

    name: str
    folder: Path
    config: Config
    evaluation: tuple[str, ...]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def results(self) -> Path:
        return self.folder / "evaluation"

    @property
    def steps(self) -> int:
        return self.config.schedule.train_iters

    @cached_property
    def tokens_per_step(self) -> int:
        return self.config.batch.resolve(self._copies)[2] * self.config.model.seq_length

    @cached_property
    def devices(self) -> int:
        """GPUs that the run takes, where there are any."""
        parallel = self.config.parallel
        return self.config.launcher.num_gpus or parallel.model_parallel_size * max(1, parallel.pipe_parallel_size)

    def devices_of(self, free: Sequence[str]) -> list[str] | None:
        """Those of the free devices that the run would take; None if they are too few. On the CPU it takes one."""
        wanted = self.devices if free and free[0] else 1
        return list(free[:wanted]) if len(free) >= wanted else None

    @property
    def _copies(self) -> int:
        return self.config.parallel.data_parallel_size(self.devices)

    def saved(self) -> int:
        """The iteration of the checkpoint that training would go on from; 0 if there is none."""
        return iteration_of(find_step(self.checkpoints)) if has_checkpoint(self.checkpoints) else 0

    def trained(self) -> bool:
        """Whether the last checkpoint is there, every file at its full size (evaluating it compares checksums)."""
        step = self.checkpoints / tag_for(self.steps)
        return step.is_dir() and find_damage(step, contents=False) is None

    def evaluated(self) -> bool:
        """Whether results of the last checkpoint, with the options of now, are stored."""
        try:
            stamp = json.loads((self.results / EVALUATED).read_bytes())
        except (OSError, ValueError):
            return False
        return stamp == self._stamp() and has_results(self.results)

    def note_evaluated(self) -> None:
        write_atomically(self.results / EVALUATED, (json.dumps(self._stamp()) + "\n").encode())

    def _stamp(self) -> dict[str, Any]:
        return {"iteration": self.steps, "options": list(self.evaluation)}

    def state(self) -> State:
        if not self.trained():
            return State.RESUME if self.saved() else State.TRAIN
        return State.FINISHED if self.evaluated() else State.EVALUATE

    def steps_left(self) -> int:
        return 0 if self.trained() else self.steps - min(self.saved(), self.steps)

    def steps_logged(self) -> int:
        """The last iteration in the log of the run: how far a training that is going on has come."""
        try:
            with open(self.folder / "logs" / METRICS, "rb") as stream:
                stream.seek(max(0, stream.seek(0, 2) - 4096))
                lines = stream.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return 0
        for text in reversed(lines):
            try:
                return int(json.loads(text)["iteration"])
            except (ValueError, KeyError, TypeError):
                continue
        return 0

    def rate(self) -> float | None:
        """Tokens per second that its training has reached; None where it has not logged any."""
        log = self.folder / "logs" / METRICS
        found = read_log(log) if log.is_file() else None
        return found[1] if found else None

    def write_config(self) -> Path:
        """The configuration as a file for the run's processes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "config.yml"
        write_atomically(path, (json.dumps(self.config.to_flat(), indent=1) + "\n").encode())
        return path


def plan(sweep: Sweep) -> list[Run]:
    """Every run of the sweep. Raises UserError if one cannot be, or its folder holds a run of another configuration."""
    combinations = list(sweep.combinations())
    runs = [_run(sweep, choices) for choices in combinations]
    for run in runs:
        _check_folder(run)
    told_by = _told_apart_by(runs, combinations)
    if not told_by or "--label" in sweep.evaluation:
        return runs
    labels = [", ".join(choices[axis].label for axis in told_by) for choices in combinations]
    return [
        replace(run, evaluation=(*run.evaluation, "--label", label)) for run, label in zip(runs, labels, strict=True)
    ]


def _told_apart_by(runs: Sequence[Run], combinations: Sequence[tuple[Choice, ...]]) -> list[int]:
    """The axes, by number, in which runs differ that a table would take for the same method and seed."""
    alike: dict[tuple, list[tuple[Choice, ...]]] = {}
    for run, choices in zip(runs, combinations, strict=True):
        model, data = run.config.model, run.config.data
        corpora = (data.data_path, data.train_data_paths, data.valid_data_paths, data.split)
        key = (evaluated_method(run.config), model.num_layers, model.hidden_size, model.seq_length, corpora)
        alike.setdefault((*map(repr, key), run.config.training.seed), []).append(choices)
    return [
        axis
        for axis in range(len(combinations[0]))
        if any(len({choices[axis].label for choices in group}) > 1 for group in alike.values())
    ]


def _run(sweep: Sweep, choices: tuple[Choice, ...]) -> Run:
    name = run_name(choices)
    folder = sweep.output / "runs" / name
    config = sweep.configuration(choices)
    keys = {"save": str(folder / "checkpoints"), "load": str(folder / "checkpoints"), "log_dir": str(folder / "logs")}
    if config.logging.tensorboard_dir is not None:
        keys["tensorboard_dir"] = str(folder / "tensorboard")
    return Run(name, folder, config.updated(**keys), sweep.evaluation)


def _check_folder(run: Run) -> None:
    path = run.folder / "config.yml"
    if not path.is_file():
        if has_checkpoint(run.checkpoints):
            raise UserError(f"{run.folder}: holds checkpoints but no config.yml, so what they are of is not known")
        return
    there = {entry.key: entry.value for entry in read_file(path)}
    # As JSON has it: a tuple is a list.
    here = json.loads(json.dumps(run.config.to_flat()))
    differences = [
        f"{key}: {there.get(key, 'not set')} there, {here.get(key, 'not set')} here"
        for key in dict.fromkeys([*there, *here])
        if key not in FOLDERS and there.get(key) != here.get(key)
    ]
    if differences:
        raise UserError(
            f"{run.folder}: the run there has another configuration than the sweep now gives it "
            f"({'; '.join(differences)}); give the sweep another `output`, or delete that folder"
        )


def missing_data(runs: Sequence[Run]) -> list[str]:
    """Prefixes of datasets that the runs need and that are not there."""
    found: dict[str, None] = {}
    for run in runs:
        data = run.config.data
        groups = (data.train_data_paths, data.valid_data_paths, data.test_data_paths)
        for prefix in [data.data_path, *(prefix for group in groups for prefix in group or ())]:
            if prefix is not None and "://" not in prefix and not Path(f"{prefix}.idx").is_file():
                found[prefix] = None
    return list(found)
