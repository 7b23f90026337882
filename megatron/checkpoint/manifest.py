"""The manifest: what belongs to a checkpoint, so that a file that is missing, cut short or altered by the disk is
noticed before it is used.

`manifest.json`: {"format": 1, "iteration": N, "checksum": "crc32", "files": {NAME: {"size": BYTES, "crc32": HEX}}}, the
names relative to the checkpoint's folder. It is written when all the files are on the disk. The release's checkpoints
have none; one of this project without it is not taken for whole.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.checkpoint.optimizer import FILES as OPTIMIZER_FILES
from megatron.checkpoint.random_state import FILES as RANDOM_FILES
from megatron.checkpoint.state import STATE_FILE
from megatron.checkpoint.storage import CheckpointError, FileRecord, load_tensors, record_of, write_json

MANIFEST = "manifest.json"
FORMAT = 1


def write_manifest(step: Path, iteration: int, records: Mapping[str, FileRecord]) -> None:
    files = {name: {"size": record.size, "crc32": f"{record.crc32:08x}"} for name, record in sorted(records.items())}
    write_json(step / MANIFEST, {"format": FORMAT, "iteration": iteration, "checksum": "crc32", "files": files})


def write_manifest_of_folder(step: Path, iteration: int) -> None:
    """A manifest of the files as they are on the disk: for what others wrote, or what lost its manifest."""
    paths = (path for path in step.rglob("*") if path.is_file() and path != step / MANIFEST)
    write_manifest(step, iteration, {path.relative_to(step).as_posix(): record_of(path) for path in paths})


def read_manifest(step: Path) -> dict[str, FileRecord] | None:
    """File name -> record, or None where there is no manifest. Raises CheckpointError if it cannot be understood."""
    path = step / MANIFEST
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read, the file is damaged ({error})") from error
    try:
        if value["format"] != FORMAT or value["checksum"] != "crc32":
            raise CheckpointError(
                f"{path}: is of format {value['format']} with {value['checksum']} checksums; "
                f"this version reads format {FORMAT} with crc32"
            )
        return {name: FileRecord(int(file["size"]), int(file["crc32"], 16)) for name, file in value["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not a checkpoint's manifest; the file is damaged") from error


def find_damage(
    step: Path, *, contents: bool = True, share: tuple[int, int] = (0, 1), threads: int | None = None
) -> str | None:
    """What is wrong with the first file that is not as the manifest says, as `FILE: what`; None for a whole checkpoint,
    and for one without a manifest that this project did not save.

    contents: read the files and compare checksums; otherwise sizes alone. share: (rank, ranks): check this part of the
    files, so that ranks can divide the work.
    """
    try:
        records = read_manifest(step)
    except CheckpointError as error:
        return str(error)
    if records is None:
        if not saved_by_this_project(step):
            return None
        return (
            f"{step / MANIFEST}: is missing, so the files cannot be checked (if you trust them: "
            f"python tools/ckpts/inspect.py {step} --accept)"
        )
    unlisted = sorted(path.name for path in step.glob("*.pt") if path.name not in records)
    if unlisted:
        return f"{step / unlisted[0]}: is not in the manifest; it does not belong to this checkpoint"
    # The largest first, so that equal shares are about equal work.
    names = sorted(records, key=lambda name: -records[name].size)[share[0] :: share[1]]
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: _damage(step / name, records[name], contents), names)
        return next((damage for damage in found if damage), None)


def saved_by_this_project(step: Path) -> bool:
    """Whether a checkpoint is of this project's own saves, by the files that no other program writes."""
    if any(any(step.glob(pattern)) for pattern in (OPTIMIZER_FILES, RANDOM_FILES)):
        return True
    try:
        state = load_tensors(step / STATE_FILE, mapped=True)
    except CheckpointError:
        return False
    return isinstance(state, dict) and "training" in state


def _damage(path: Path, record: FileRecord, contents: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{path}: has {size:,} bytes instead of {record.size:,}"
        if contents and record_of(path) != record:
            return f"{path}: its contents are not what was saved (checksum differs)"
    except FileNotFoundError:
        return f"{path}: is missing"
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    return None
