"""A folder of checkpoints: `latest`, and one `global_stepN` for each."""

import re
import shutil
from pathlib import Path

from megatron.checkpoint.storage import CheckpointError, write_text

STEP = re.compile(r"global_step(\d+)")


def tag_for(iteration: int) -> str:
    return f"global_step{iteration}"


def saved_iterations(directory: Path) -> list[int]:
    """Iterations whose folders are there, oldest first; folders of unfinished saves have other names."""
    if not directory.is_dir():
        return []
    matches = (STEP.fullmatch(path.name) for path in directory.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def find_step(directory: str | Path, iteration: int | None = None) -> Path:
    """The folder of the checkpoint to load: that of `iteration`, or the one that `latest` names.

    Raises CheckpointError when it is not there, with what is.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such folder; give the folder that holds `latest` and global_stepN")
    there = saved_iterations(directory)
    listed = ", ".join(str(step) for step in there) or "none"
    if iteration is not None:
        if iteration not in there:
            raise CheckpointError(f"{directory}: has no checkpoint of iteration {iteration}; it has {listed}")
        return directory / tag_for(iteration)
    latest = directory / "latest"
    if not latest.is_file():
        raise CheckpointError(
            f"{directory}: has no file `latest`; iterations there: {listed}. Name one with `iteration`"
        )
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not STEP.fullmatch(tag) or not (directory / tag).is_dir():
        raise CheckpointError(f"{latest}: names {tag!r}, which is not there; iterations there: {listed}")
    return directory / tag


def has_checkpoint(directory: str | Path) -> bool:
    return (Path(directory) / "latest").is_file()


def point_latest(directory: Path, tag: str) -> None:
    write_text(directory / "latest", tag)


def remove_older(directory: Path, keep: int) -> list[int]:
    """Delete all but the newest `keep` checkpoints; never the one that `latest` names. Returns the iterations
    deleted.
    """
    latest = directory / "latest"
    named = latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
    removed = []
    for iteration in saved_iterations(directory)[:-keep]:
        if tag_for(iteration) != named:
            # Renamed first: a half-deleted folder must not look like a checkpoint.
            doomed = directory / f".{tag_for(iteration)}.deleted"
            (directory / tag_for(iteration)).rename(doomed)
            shutil.rmtree(doomed)
            removed.append(iteration)
    return removed
