"""A folder of checkpoints: `latest`, and one `global_stepN` for each.

What is being written, replaced or deleted has another name: `global_stepN.unfinished`, `.global_stepN.replaced`,
`.global_stepN.deleted`. A process that is killed leaves such folders behind; `tidy` finishes or undoes its work.
"""

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint.manifest import find_damage
from megatron.checkpoint.storage import CheckpointError, write_text
from megatron.utils.files import sync_folder

STEP = re.compile(r"global_step(\d+)")
UNFINISHED = re.compile(r"global_step\d+\.unfinished")
REPLACED = re.compile(r"\.(global_step\d+)\.replaced")
DELETED = re.compile(r"\.global_step\d+\.deleted")
HALF_WRITTEN = re.compile(r"latest\.partial-\d+")


def tag_for(iteration: int) -> str:
    return f"global_step{iteration}"


def saved_iterations(directory: Path) -> list[int]:
    """Iterations whose folders are there, oldest first; folders of unfinished saves have other names."""
    if not directory.is_dir():
        return []
    names = [path.name for path in directory.iterdir() if path.is_dir()]
    matches = (STEP.fullmatch(match[1] if (match := REPLACED.fullmatch(name)) else name) for name in names)
    return sorted({int(match[1]) for match in matches if match})


def step_folder(directory: Path, tag: str) -> Path:
    """The checkpoint's folder. A process killed while it replaced a checkpoint may have left the old one under the
    other name.
    """
    set_aside = directory / f".{tag}.replaced"
    return directory / tag if (directory / tag).is_dir() or not set_aside.is_dir() else set_aside


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
        return step_folder(directory, tag_for(iteration))
    latest = directory / "latest"
    if not latest.is_file():
        raise CheckpointError(
            f"{directory}: has no file `latest`; iterations there: {listed}. Name one with `iteration`"
        )
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not STEP.fullmatch(tag) or not step_folder(directory, tag).is_dir():
        raise CheckpointError(f"{latest}: names {tag!r}, which is not there; iterations there: {listed}")
    return step_folder(directory, tag)


def find_whole_step(
    directory: str | Path,
    iteration: int | None = None,
    *,
    fallback: bool = False,
    report: Callable[[str], None] = print,
    check: Callable[[Path], str | None] = find_damage,
) -> Path:
    """`find_step`, with every file checked against the manifest.

    fallback: where the checkpoint is damaged, take the newest whole one and report it. Otherwise CheckpointError names
    the damage and that checkpoint. `check` gives what is wrong with a checkpoint, or None.
    """
    directory = Path(directory)
    try:
        step = find_step(directory, iteration)
        damage = check(step)
    except CheckpointError as error:
        if not saved_iterations(directory):
            raise
        step, damage = None, str(error)
    if damage is None:
        return step
    others = (step_folder(directory, tag_for(other)) for other in reversed(saved_iterations(directory)))
    whole = next((other for other in others if other != step and check(other) is None), None)
    if whole is None:
        raise CheckpointError(f"the checkpoint is damaged. {damage}; {directory} holds no other whole checkpoint")
    if not fallback:
        raise CheckpointError(
            f"the checkpoint is damaged. {damage}. The newest whole one in {directory} is that of iteration "
            f"{iteration_of(whole)}: take it with --fallback"
        )
    report(f"fallback: the checkpoint is damaged. {damage}. Taking the newest whole one, {whole}")
    return whole


def iteration_of(step: Path) -> int:
    """The iteration that a checkpoint's folder is named after."""
    return int(re.search(STEP, step.name)[1])


def has_checkpoint(directory: str | Path) -> bool:
    return (Path(directory) / "latest").is_file()


def point_latest(directory: Path, tag: str) -> None:
    write_text(directory / "latest", tag)


def tidy(directory: Path) -> None:
    """Remove what a killed process left, and put back a checkpoint that it had set aside to replace. Only for a folder
    to which no other process is saving.
    """
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if UNFINISHED.fullmatch(path.name) or DELETED.fullmatch(path.name):
            shutil.rmtree(path)
        elif HALF_WRITTEN.fullmatch(path.name):
            path.unlink()
        elif match := REPLACED.fullmatch(path.name):
            if (directory / match[1]).exists():
                shutil.rmtree(path)
            else:
                path.rename(directory / match[1])
    sync_folder(directory)


def publish(directory: Path, unfinished: Path, tag: str) -> None:
    """Give a whole checkpoint its name, and point `latest` at it.

    After every single step the folder holds a checkpoint that `find_step` finds: a folder cannot be renamed onto
    another, so the one that is replaced is set aside under a name that `step_folder` knows.
    """
    final, set_aside = directory / tag, directory / f".{tag}.replaced"
    sync_folder(unfinished)
    if final.exists():
        final.rename(set_aside)
    unfinished.rename(final)
    sync_folder(directory)
    point_latest(directory, tag)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(set_aside)


def remove_older(directory: Path, keep: int, newest: int) -> list[int]:
    """Delete all but the last `keep` checkpoints up to iteration `newest`; returns the iterations deleted.

    Never the one that `latest` names; and nothing at all unless a checkpoint that stays has all its files at their full
    size.
    """
    latest = directory / "latest"
    named = latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
    # Checkpoints of later iterations are of a run that went another way; they say nothing of this one's.
    mine = [iteration for iteration in saved_iterations(directory) if iteration <= newest]
    kept = [directory / tag_for(iteration) for iteration in mine[-keep:]]
    if all(find_damage(step, contents=False) is not None for step in kept):
        return []
    removed = []
    for iteration in mine[:-keep]:
        if tag_for(iteration) != named:
            # Renamed first: a half-deleted folder must not look like a checkpoint.
            doomed = directory / f".{tag_for(iteration)}.deleted"
            (directory / tag_for(iteration)).rename(doomed)
            shutil.rmtree(doomed)
            removed.append(iteration)
    return removed
