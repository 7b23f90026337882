"""Replacing and deleting checkpoints, so that a killed process loses none.

A checkpoint that is being written, replaced or deleted has another name: `global_stepN.unfinished`,
`.global_stepN.replaced`, `.global_stepN.deleted`. A killed process leaves such directories behind;
`clean_up` completes or reverts what it was doing.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from megatron.checkpoint.directory import (
    REPLACED,
    ancestor_iterations,
    has_checkpoint,
    latest_tag,
    saved_iterations,
    step_folder,
    tag_for,
)
from megatron.checkpoint.manifest import find_damage
from megatron.checkpoint.storage import CheckpointError
from megatron.utils.files import sync_folder, write_atomically

UNFINISHED = re.compile(r"global_step\d+\.unfinished")
DELETED = re.compile(r"\.global_step\d+\.deleted")
PARTIAL_LATEST = re.compile(r"latest\.partial-\d+")
# The file with which training checks that all hosts share the folder.
PROBE = re.compile(r"\.shared-.+")


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
    # A checkpoint that was being replaced gets its name back, unless the new one is complete.
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

    # `publish` gives a checkpoint its name before `latest` exists.
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
    """Delete all but the last `keep` checkpoints of a run; yields the deleted iterations.

    lineage: those of `TrainingState.lineage` of the newest one that may be deleted. Other
    checkpoints do not count and stay: those from which the run was finetuned, and those of a run
    that was resumed at an earlier iteration. Never deletes the checkpoint that `latest` names, and
    nothing unless at least one of the remaining checkpoints has all its files at their full size.
    """
    # The checkpoints of this run, and what remains of them.
    named = ""
    if (directory / "latest").is_file():
        named = latest_tag(directory)
    iterations = [iteration for iteration in saved_iterations(directory) if iteration in lineage]
    remaining = [directory / tag_for(iteration) for iteration in iterations[-keep:]]
    if all(find_damage(step, contents=False) is not None for step in remaining):
        return

    # Each of the others has its name until the moment it is deleted.
    for iteration in iterations[:-keep]:
        if tag_for(iteration) != named:
            # Rename first: a half-deleted directory must not look like a checkpoint.
            deleted = directory / f".{tag_for(iteration)}.deleted"
            (directory / tag_for(iteration)).rename(deleted)
            _delete(deleted)
            yield iteration
