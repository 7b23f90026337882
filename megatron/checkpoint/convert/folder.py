"""A folder that appears whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.checkpoint.storage import CheckpointError
from megatron.utils.files import sync_folder


@contextmanager
def new_folder(output: str | Path) -> Iterator[Path]:
    """Gives an empty folder beside `output` to write into; it becomes `output` when the block ends without an error,
    and is removed otherwise.

    Raises CheckpointError if `output` is there already and not an empty folder, or cannot be written.
    """
    output = Path(output).absolute()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError(f"{output}: is there already; name a new folder, or remove this one")
    unfinished = output.with_name(f".{output.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        _sync(unfinished)
        if output.exists():
            output.rmdir()
        unfinished.rename(output)
        sync_folder(output.parent)
    except OSError as error:
        raise CheckpointError(f"{error.filename or output}: cannot be written or read ({error.strerror})") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            with open(Path(root) / name, "rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(root)
