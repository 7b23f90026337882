"""The checkpoint directory: `latest`, one `global_stepN` per checkpoint, and the manifest that
verifies its files.

A checkpoint that is being written, replaced or deleted has another name: `global_stepN.unfinished`,
`.global_stepN.replaced`, `.global_stepN.deleted`. A killed process leaves such directories behind;
`clean_up` completes or reverts what it was doing.

`manifest.json`: {"format": 1, "iteration": N, "checksum": "crc32", "files": {NAME: {"size": BYTES,
"crc32": HEX}}}, with names relative to `global_stepN`. It is written after all other files are on
disk. Checkpoints of the KERPLE release have no manifest. A checkpoint saved by this project that
lost its manifest counts as damaged.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.checkpoint.storage import (
    CheckpointError,
    FileRecord,
    file_record,
    load_file,
    load_tensors,
    read_json,
    write_json,
)
from megatron.utils.errors import UserError, first_line
from megatron.utils.files import open_file, read_file, sync_folder, write_atomically

# Files of a checkpoint.
LAYER_FILE = re.compile(r"layer_([0-9]{1,9})-model_([0-9]{1,9})-model_states\.pt")
STATE_FILE = "mp_rank_00_model_states.pt"
OPTIMIZER_FILES = "optimizer_rank_*.pt"
RANDOM_STATE_FILES = "random_rank_*.pt"
CONFIG_FILE = "configs/config.yml"
MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
LATEST_LIMIT = 1000

STEP = re.compile(r"global_step([0-9]{1,18})")
UNFINISHED = re.compile(r"global_step\d+\.unfinished")
REPLACED = re.compile(r"\.(global_step\d+)\.replaced")
DELETED = re.compile(r"\.global_step\d+\.deleted")
PARTIAL_LATEST = re.compile(r"latest\.partial-\d+")
PROBE = re.compile(
    r"\.shared-.+"
)  # file with which training checks that all hosts share the folder


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
    by_layer: dict[int, dict[int, Path]] = {}
    for path in _list(step):
        if match := LAYER_FILE.fullmatch(path.name):
            by_layer.setdefault(int(match[1]), {})[int(match[2])] = path
    if not by_layer:
        raise CheckpointError(
            f"{step}: is not a checkpoint, it has no layer_XX-model_YY-model_states.pt"
        )
    ranks = range(max(len(files) for files in by_layer.values()))
    for index, files in sorted(by_layer.items()):
        for rank in ranks:
            if rank not in files:
                raise CheckpointError(
                    f"{layer_file(step, index, rank)}: no such file; the checkpoint is incomplete"
                )
    return {index: [files[rank] for rank in ranks] for index, files in sorted(by_layer.items())}


def has_checkpoint(directory: str | Path) -> bool:
    """Whether the folder has a `latest`, which may still be unreadable: `find_step`
    reports that.
    """
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
    replaced = directory / f".{tag}.replaced"
    return directory / tag if (directory / tag).is_dir() or not replaced.is_dir() else replaced


def find_step(directory: str | Path, iteration: int | None = None) -> Path:
    """The global_stepN directory to load: that of `iteration`, or the one `latest` names.

    Raises CheckpointError if it does not exist, listing the checkpoints that do.
    """
    directory = Path(directory)
    if not os.path.isdir(directory):  # unlike Path.is_dir, False for an invalid name
        raise CheckpointError(
            f"{directory}: no such folder; give the folder that contains `latest` and global_stepN"
        )
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
    latest = directory / "latest"
    if not os.path.lexists(latest):
        raise CheckpointError(
            f"{directory}: has no file `latest`; choose a checkpoint with `iteration` (available: "
            f"{available})"
        )
    try:
        tag = read_file(latest, LATEST_LIMIT).decode(errors="replace").strip()
    except UserError as error:
        raise CheckpointError(
            f"{error}; choose a checkpoint with `iteration` (available: {available})"
        ) from error
    if not STEP.fullmatch(tag) or not step_folder(directory, tag).is_dir():
        raise CheckpointError(
            f"{latest}: names {tag[:80]!r}, which does not exist; available iterations: {available}"
        )
    return step_folder(directory, tag)


def find_valid_step(
    directory: str | Path,
    iteration: int | None = None,
    *,
    fallback: bool = False,
    report: Callable[[str], None] = print,
    check: Callable[[Path], str | None] | None = None,
) -> Path:
    """`find_step`, and verify every file against the manifest.

    fallback: if the checkpoint is damaged, report it and return the newest valid one that its run
    saved before it. Otherwise raise CheckpointError, naming the damage and that checkpoint; also if
    there is none of `iteration`. check: returns what is wrong with a checkpoint, or None;
    `find_damage` by default.
    """
    directory, check = Path(directory), check or find_damage
    step: Path | None = None
    try:
        step = find_step(directory, iteration)
    except CheckpointError as error:
        iterations = saved_iterations(directory)
        if not iterations or (iteration is not None and iteration not in iterations):
            raise
        damage: str | None = str(error)
    else:
        damage = check(step)
        if damage is None:
            return step
    newest = next((saved for saved in _saved_before(directory, step) if check(saved) is None), None)
    if newest is None:
        available = ", ".join(map(str, saved_iterations(directory)))
        raise CheckpointError(
            f"the checkpoint is damaged: {damage}; {directory} contains no valid earlier "
            f"checkpoint of its run (choose another one with `iteration`; available: {available})"
        )
    if not fallback:
        raise CheckpointError(
            f"the checkpoint is damaged: {damage}. The newest valid one before it in {directory} "
            f"is iteration {iteration_of(newest)}; use it with --fallback"
        )
    report(
        f"fallback: the checkpoint is damaged: {damage}. Using the newest valid one before it, "
        f"{newest}"
    )
    return newest


def _saved_before(directory: Path, step: Path | None) -> list[Path]:
    """The checkpoints that may replace a damaged one, newest first: those that its run saved before
    it, as far as its files tell. `step` is None if the one that `latest` names does not exist.
    """
    iteration = lineage = None
    if step is not None:
        iteration, lineage = iteration_of(step), ancestor_iterations(step)
    else:
        with contextlib.suppress(UserError):
            match = STEP.fullmatch(
                read_file(directory / "latest", LATEST_LIMIT).decode(errors="replace").strip()
            )
            iteration = int(match[1]) if match else None
    earlier = [
        saved for saved in saved_iterations(directory) if iteration is None or saved < iteration
    ]
    if lineage is not None:
        earlier = [saved for saved in earlier if saved in lineage]
    return [step_folder(directory, tag_for(saved)) for saved in reversed(earlier)]


def ancestor_iterations(step: Path) -> list[int] | None:
    """`TrainingState.lineage` of a checkpoint; None if its files do not contain it or cannot be
    read.
    """
    try:
        lineage: list[int] | None = read_state_file(step).get("training", {}).get("lineage")
    except CheckpointError:
        return None
    return lineage


def check_replaced(
    directory: Path, saves: Callable[[int], bool], lineage: Collection[int] | None
) -> list[int]:
    """The iterations of checkpoints that a run will replace. Raises CheckpointError if one is of
    another run.

    saves: whether the run saves at an iteration. lineage: `TrainingState.lineage` at its start;
    None for a run that starts from weights only. A checkpoint that descends from the same ones is
    an abandoned branch of this run.
    """
    replaced = list(filter(saves, saved_iterations(directory)))
    for iteration in replaced:
        other = ancestor_iterations(step_folder(directory, tag_for(iteration)))
        if lineage is None or (other is not None and not set(lineage) <= set(other)):
            raise CheckpointError(
                f"save: {directory} contains {tag_for(iteration)} of another run, which this run "
                f"would replace at iteration {iteration:,}; choose another save"
            )
    return replaced


def update_latest(directory: Path, tag: str) -> None:
    write_atomically(directory / "latest", tag.encode())


def clean_up(directory: Path) -> None:
    """Remove files that a killed process left behind, restore a checkpoint that it was replacing,
    and point `latest` at the first checkpoint if it was killed just before that. Call this only if
    no other process is saving to the directory.
    """
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if DELETED.fullmatch(path.name):
            with contextlib.suppress(OSError):  # `remove_older` has reported it
                _delete(path)
        elif UNFINISHED.fullmatch(path.name):
            _delete(path)
        elif PARTIAL_LATEST.fullmatch(path.name) or PROBE.fullmatch(path.name):
            path.unlink()
        elif match := REPLACED.fullmatch(path.name):
            if (directory / match[1]).exists():
                _delete(path)
            else:
                path.rename(directory / match[1])
    if not has_checkpoint(directory) and len(iterations := saved_iterations(directory)) == 1:
        update_latest(directory, tag_for(iterations[0]))
    sync_folder(directory)


def _delete(path: Path) -> None:
    """Delete a checkpoint; of a link, only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def publish(directory: Path, unfinished: Path, tag: str) -> None:
    """Give a completely written checkpoint its name, and point `latest` at it.

    `find_step` finds a checkpoint after each of these system calls. A directory cannot be renamed
    onto an existing one, so a replaced checkpoint is first renamed to a name that `step_folder`
    knows.
    """
    final, replaced = directory / tag, directory / f".{tag}.replaced"
    sync_folder(unfinished)
    if os.path.lexists(final):
        final.rename(replaced)
    unfinished.rename(final)
    sync_folder(directory)
    update_latest(directory, tag)
    with contextlib.suppress(FileNotFoundError):
        _delete(replaced)


def remove_older(directory: Path, keep: int, lineage: Collection[int]) -> Iterator[int]:
    """Delete all but the last `keep` checkpoints of a run; yields the iteration of each deleted
    one.

    lineage: those of `TrainingState.lineage` of the newest one that may be deleted. Other
        checkpoints do not count and
    stay: those from which the run was finetuned, and those of a run that was resumed at an earlier
    iteration. Never deletes the checkpoint that `latest` names. Deletes nothing unless at least one
    of the remaining checkpoints has all its files at their full size.
    """
    latest = directory / "latest"
    latest_tag = latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
    iterations = [iteration for iteration in saved_iterations(directory) if iteration in lineage]
    remaining = [directory / tag_for(iteration) for iteration in iterations[-keep:]]
    if all(find_damage(step, contents=False) is not None for step in remaining):
        return
    for iteration in iterations[:-keep]:
        if tag_for(iteration) != latest_tag:
            # Rename first: a half-deleted directory must not look like a checkpoint.
            deleted = directory / f".{tag_for(iteration)}.deleted"
            (directory / tag_for(iteration)).rename(deleted)
            _delete(deleted)
            yield iteration


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


# -- manifest
# --------------------------------------------------------------------------------------------------


def write_manifest(step: Path, iteration: int, records: Mapping[str, FileRecord]) -> None:
    files = {
        name: {"size": record.size, "crc32": f"{record.crc32:08x}"}
        for name, record in sorted(records.items())
    }
    manifest = {
        "format": MANIFEST_FORMAT,
        "iteration": iteration,
        "checksum": "crc32",
        "files": files,
    }
    write_json(step / MANIFEST, manifest)


def write_manifest_of_folder(step: Path, iteration: int) -> None:
    """Write a manifest of the files now on disk, without hidden ones: for imported checkpoints, or
    one that lost its manifest.
    """
    paths = (path for path in step.rglob("[!.]*") if path.is_file() and path != step / MANIFEST)
    write_manifest(
        step, iteration, {path.relative_to(step).as_posix(): file_record(path) for path in paths}
    )


def read_manifest(step: Path) -> dict[str, FileRecord] | None:
    """File name -> record, or None if there is no manifest. Raises CheckpointError if it is
    damaged.
    """
    path = step / MANIFEST
    if not os.path.lexists(path):
        return None
    manifest = read_json(path)
    try:
        if manifest["format"] != MANIFEST_FORMAT:
            raise ValueError(f"format {manifest['format']!r}")
        records = {}
        for name, entry in manifest["files"].items():
            records[name] = FileRecord(int(entry["size"]), int(entry["crc32"], 16))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: is not a checkpoint manifest; the file is damaged ({error})"
        ) from error
    return records


def find_damage(
    step: Path, *, contents: bool = True, share: tuple[int, int] = (0, 1)
) -> str | None:
    """The first file that does not match the manifest, as `FILE: what is wrong`. None for a valid
    checkpoint, and for one without a manifest that another program saved.

    contents: read the files and compare checksums; if False, compare only sizes. share: (rank,
    ranks), to check only this rank's part of the files.
    """
    # Checkpoints of other programs have no manifest, which this project writes to all of its own.
    try:
        records = read_manifest(step)
    except CheckpointError as error:
        return str(error)
    if records is None:
        if not saved_by_this_project(step):
            return None
        return (
            f"{step / MANIFEST}: no such file, so the checkpoint cannot be verified (if you trust "
            f"its files: kerple inspect {step} --accept)"
        )

    # A file that is not in the manifest may be from another checkpoint.
    unlisted = sorted(path.name for path in step.glob("[!.]*.pt") if path.name not in records)
    if unlisted:
        return (
            f"{step / unlisted[0]}: is not in the manifest, so it does not belong to this "
            "checkpoint"
        )

    def damage_of(name: str) -> str | None:
        path, record = step / name, records[name]
        try:
            size = path.stat().st_size
            if size != record.size:
                return f"{path}: has {size:,} bytes instead of {record.size:,}"
            if contents and file_record(path) != record:
                return f"{path}: contents differ from what was saved (wrong checksum)"
        except FileNotFoundError:
            return f"{path}: no such file"
        except (OSError, ValueError) as error:  # ValueError: a null character in the name
            return (
                f"{path}: cannot be read ({getattr(error, 'strerror', None) or first_line(error)})"
            )
        except UserError as error:
            return str(error)
        return None

    # Largest first, so that equal numbers of files are roughly equal work.
    names = sorted(records, key=lambda name: -records[name].size)[share[0] :: share[1]]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return next((damage for damage in pool.map(damage_of, names) if damage), None)


def saved_by_this_project(step: Path) -> bool:
    """Whether the checkpoint contains files that only this project writes."""
    if any(any(step.glob(pattern)) for pattern in (OPTIMIZER_FILES, RANDOM_STATE_FILES)):
        return True
    try:
        state = load_tensors(step / STATE_FILE)
    except CheckpointError:
        return False
    return isinstance(state, dict) and "training" in state


def weights_fingerprint(step: Path) -> str:
    """16 hexadecimal digits that identify the weights, independent of the checkpoint's path.

    Computed from the layer files' sizes and checksums in the manifest, or from their contents if
    there is none. Raises CheckpointError if files are missing or cannot be read.
    """
    digest = hashlib.sha256()
    records = read_manifest(step)
    for paths in layer_files(step).values():
        for path in paths:
            if records is not None and path.name in records:
                record = records[path.name]
                digest.update(f"{path.name} {record.size} {record.crc32}\n".encode())
                continue
            contents = hashlib.sha256()
            with open_file(path) as file:
                while chunk := file.read(1 << 22):
                    contents.update(chunk)
            digest.update(f"{path.name} {contents.hexdigest()}\n".encode())
    return digest.hexdigest()[:16]
