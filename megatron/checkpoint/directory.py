"""The checkpoint directory: `latest`, and one `global_stepN` per checkpoint with its files.

`manifest.py` verifies the files, `cleanup.py` replaces and deletes checkpoints.
"""

import os
import re
from pathlib import Path
from typing import Any

from megatron.checkpoint.storage import CheckpointError, load_file, load_tensors
from megatron.utils.errors import UserError
from megatron.utils.files import read_file

# Files of a checkpoint.
LAYER_FILE = re.compile(r"layer_([0-9]{1,9})-model_([0-9]{1,9})-model_states\.pt")
STATE_FILE = "mp_rank_00_model_states.pt"
OPTIMIZER_FILES = "optimizer_rank_*.pt"
RANDOM_STATE_FILES = "random_rank_*.pt"
CONFIG_FILE = "configs/config.yml"
MANIFEST = "manifest.json"
LATEST_LIMIT = 1000

STEP = re.compile(r"global_step([0-9]{1,18})")
REPLACED = re.compile(r"\.(global_step\d+)\.replaced")


def tag_for(iteration: int) -> str:
    return f"global_step{iteration}"


def iteration_of(step: Path) -> int:
    """The iteration in the name of a checkpoint's directory."""
    match = STEP.search(step.name)
    if match is None:
        raise CheckpointError(f"{step}: is not named global_stepN")
    return int(match[1])


def layer_file(step: Path, index: int, tensor_rank: int) -> Path:
    return step / f"layer_{index:02d}-model_{tensor_rank:02d}-model_states.pt"


def layer_files(step: Path) -> dict[int, list[Path]]:
    """Layer index -> its files in order of tensor-parallel rank. Raises CheckpointError if a rank's
    file is missing.
    """
    # Layer index -> rank -> file.
    by_layer: dict[int, dict[int, Path]] = {}
    for path in _list(step):
        if match := LAYER_FILE.fullmatch(path.name):
            by_layer.setdefault(int(match[1]), {})[int(match[2])] = path
    if not by_layer:
        raise CheckpointError(
            f"{step}: is not a checkpoint, it has no layer_XX-model_YY-model_states.pt"
        )

    # Each layer has a file of each rank.
    ranks = range(max(map(len, by_layer.values())))
    ordered: dict[int, list[Path]] = {}
    for index, files in sorted(by_layer.items()):
        for rank in ranks:
            if rank not in files:
                raise CheckpointError(
                    f"{layer_file(step, index, rank)}: no such file; the checkpoint is incomplete"
                )
        ordered[index] = [files[rank] for rank in ranks]
    return ordered


def has_checkpoint(directory: str | Path) -> bool:
    """Whether the folder has a `latest`. It may be unreadable: `find_step` reports that."""
    return os.path.lexists(Path(directory) / "latest")


def looks_like_checkpoint(directory: str | Path) -> bool:
    """Whether the folder has anything of a checkpoint: a `latest`, a global_stepN, or layer files,
    if it is a global_stepN itself. `find_step` reports what is missing.
    """
    directory = Path(directory)
    if not os.path.isdir(directory):  # unlike Path.is_dir, False for an invalid name
        return False
    return has_checkpoint(directory) or bool(saved_iterations(directory)) or _is_step(directory)


def _is_step(directory: Path) -> bool:
    return any(LAYER_FILE.fullmatch(path.name) for path in _list(directory))


def _list(directory: Path) -> list[Path]:
    """The files and folders in a folder. Raises CheckpointError if it cannot be read."""
    try:
        return list(directory.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}: {error.strerror}") from error


def saved_iterations(directory: Path) -> list[int]:
    """Iterations of the saved checkpoints, oldest first. Unfinished saves do not count."""
    if not os.path.isdir(directory):
        return []
    names = [path.name for path in _list(directory) if path.is_dir()]
    names += [match[1] for match in map(REPLACED.fullmatch, names) if match]
    return sorted({int(match[1]) for match in map(STEP.fullmatch, names) if match})


def step_folder(directory: Path, tag: str) -> Path:
    """The checkpoint's directory: normally `directory / tag`. If a process was killed while
    replacing the checkpoint, only the previous one may exist, under its temporary name.
    """
    step, replaced = directory / tag, directory / f".{tag}.replaced"
    if replaced.is_dir() and not step.is_dir():
        return replaced
    return step


def latest_tag(directory: Path) -> str:
    """The contents of `latest`. Raises UserError if it cannot be read."""
    return read_file(directory / "latest", LATEST_LIMIT).decode(errors="replace").strip()


def find_step(directory: str | Path, iteration: int | None = None) -> Path:
    """The global_stepN directory to load: that of `iteration`, or the one `latest` names.

    Raises CheckpointError if it does not exist, listing the checkpoints that do.
    """
    directory = Path(directory)
    if not os.path.isdir(directory):  # unlike Path.is_dir, False for an invalid name
        raise CheckpointError(
            f"{directory}: no such folder; give the folder that contains `latest` and global_stepN"
        )

    # A named iteration must exist.
    iterations = saved_iterations(directory)
    available = ", ".join(map(str, iterations)) or "none"
    if not iterations and _is_step(directory):
        raise CheckpointError(
            f"{directory}: is a checkpoint itself; give the folder that contains it, and select it "
            "with `iteration`"
        )
    if iteration is not None:
        if iteration not in iterations:
            raise CheckpointError(
                f"{directory}: no checkpoint of iteration {iteration}; available: {available}"
            )
        return step_folder(directory, tag_for(iteration))

    # Without one, `latest` must name a checkpoint that exists.
    latest = directory / "latest"
    if not has_checkpoint(directory):
        raise CheckpointError(
            f"{directory}: has no file `latest`; choose a checkpoint with `iteration` (available: "
            f"{available})"
        )
    try:
        tag = latest_tag(directory)
    except UserError as error:
        raise CheckpointError(
            f"{error}; choose a checkpoint with `iteration` (available: {available})"
        ) from error
    if not STEP.fullmatch(tag) or not step_folder(directory, tag).is_dir():
        raise CheckpointError(
            f"{latest}: names {tag[:80]!r}, which does not exist; available iterations: {available}"
        )
    return step_folder(directory, tag)


def ancestor_iterations(step: Path) -> list[int] | None:
    """`TrainingState.lineage` of a checkpoint; None if its files do not contain it."""
    try:
        lineage: list[int] | None = read_state_file(step).get("training", {}).get("lineage")
    except CheckpointError:
        return None
    return lineage


def read_state_file(step: Path) -> dict[str, Any]:
    """The contents of `mp_rank_00_model_states.pt`, which the KERPLE release writes too; empty if
    there is none.

    Raises CheckpointError if it is damaged, or its iteration or samples are not numbers.
    """
    path = step / STATE_FILE
    if not os.path.lexists(path):
        return {}
    saved = load_file(path)
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"{path}: contains a {type(saved).__name__} instead of a dictionary; the file is "
            "damaged"
        )
    if not isinstance(saved.get("training", {}), dict):
        raise CheckpointError(f"{path}: training is not a dictionary; the file is damaged")
    for name in ("iteration", "global_samples"):
        count = saved.get(name)
        if count is not None and not (type(count) is int and 0 <= count < 2**63):
            raise CheckpointError(
                f"{path}: {name} is not a number of steps or samples; the file is damaged"
            )
    return saved


def saved_by_this_project(step: Path) -> bool:
    """Whether the checkpoint contains files that only this project writes."""
    if any(any(step.glob(pattern)) for pattern in (OPTIMIZER_FILES, RANDOM_STATE_FILES)):
        return True
    try:
        state = load_tensors(step / STATE_FILE)
    except CheckpointError:
        return False
    return isinstance(state, dict) and "training" in state
