"""The manifest of a checkpoint: size and CRC-32 of its files, and their verification.

`manifest.json`: {"format": 1, "iteration": N, "checksum": "crc32", "files": {NAME: {"size": BYTES,
"crc32": HEX}}}, with names relative to `global_stepN`. It is written after all other files are on
disk. Checkpoints of the KERPLE release have no manifest. A checkpoint saved by this project that
lost its manifest counts as damaged.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.checkpoint.directory import (
    MANIFEST,
    STEP,
    ancestor_iterations,
    find_step,
    iteration_of,
    latest_tag,
    layer_files,
    saved_by_this_project,
    saved_iterations,
    step_folder,
    tag_for,
)
from megatron.checkpoint.storage import (
    CheckpointError,
    FileRecord,
    file_record,
    read_json,
    write_json,
)
from megatron.utils.errors import UserError, first_line
from megatron.utils.files import open_file

MANIFEST_FORMAT = 1


def write_manifest(step: Path, iteration: int, records: Mapping[str, FileRecord]) -> None:
    files = {}
    for name, record in sorted(records.items()):
        files[name] = {"size": record.size, "crc32": f"{record.crc32:08x}"}
    manifest = {"format": MANIFEST_FORMAT, "iteration": iteration, "checksum": "crc32"}
    write_json(step / MANIFEST, manifest | {"files": files})


def write_manifest_of_folder(step: Path, iteration: int) -> None:
    """Write a manifest of the files now on disk, without hidden ones: for imported checkpoints, or
    one that lost its manifest.
    """
    records = {}
    for path in step.rglob("[!.]*"):
        if path.is_file() and path != step / MANIFEST:
            records[path.relative_to(step).as_posix()] = file_record(path)
    write_manifest(step, iteration, records)


def read_manifest(step: Path) -> dict[str, FileRecord] | None:
    """File name -> record; None without a manifest. Raises CheckpointError if it is damaged."""
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
    step: Path,
    *,
    contents: bool = True,
    names: re.Pattern[str] | None = None,
    share: tuple[int, int] = (0, 1),
) -> str | None:
    """The first file that does not match the manifest, as `FILE: what is wrong`. None for a valid
    checkpoint, and for one without a manifest that another program saved.

    contents: read the files and compare checksums; if False, compare only sizes. names: check only
    the files with such names. share: (rank, ranks), to check only this rank's part of the files.
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

    # The name of the folder says where a run continues, and of which iteration results are.
    name = STEP.search(step.name)
    saved = read_json(step / MANIFEST).get("iteration")
    if name is not None and isinstance(saved, int) and saved != int(name[1]):
        return (
            f"{step / MANIFEST}: is of iteration {saved}; the folder was renamed, or is a copy: "
            f"rename it to {tag_for(saved)}"
        )

    # A file that is not in the manifest may be from another checkpoint.
    for pattern in ("[!.]*.pt", "configs/[!.]*.yml", "configs/[!.]*.yaml"):
        for file in sorted(step.glob(pattern)):
            if file.relative_to(step).as_posix() not in records:
                return f"{file}: is not in the manifest, so it does not belong to this checkpoint"

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
            reason = getattr(error, "strerror", None) or first_line(error)
            return f"{path}: cannot be read ({reason})"
        except UserError as error:
            return str(error)
        return None

    # Largest first, so that equal numbers of files are roughly equal work.
    rank, ranks = share
    checked = sorted(records, key=lambda name: -records[name].size)
    if names is not None:
        checked = [name for name in checked if names.fullmatch(name)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return next(
            (damage for damage in pool.map(damage_of, checked[rank::ranks]) if damage), None
        )


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
    # The checkpoint itself. A `latest` that names none is damage, too.
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

    # The newest valid one before it.
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
    # How far the damaged checkpoint was, and those that it continues.
    iteration = lineage = None
    if step is not None:
        iteration, lineage = iteration_of(step), ancestor_iterations(step)
    else:
        with contextlib.suppress(UserError):
            if match := STEP.fullmatch(latest_tag(directory)):
                iteration = int(match[1])
    earlier = saved_iterations(directory)
    if iteration is not None:
        earlier = [saved for saved in earlier if saved < iteration]
    if lineage is not None:
        earlier = [saved for saved in earlier if saved in lineage]
    return [step_folder(directory, tag_for(saved)) for saved in reversed(earlier)]


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
