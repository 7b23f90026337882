"""Finds input files (paths and folders) and determines their format by name.

    .jsonl .ndjson           one JSON value per line
    .json                    the same, or a single JSON list (lm-dataformat's JSONArchive)
    .txt .md .rst .tex       one document; also .text, .markdown and names without extension
    .parquet                 a table, one document per row (needs pyarrow)
    .tar .zip                members of the types above except .parquet, in archive order; no
                             archives inside archives
    .gz .zst .xz             compression of any of the above except .zip and .parquet

In folders and archives, hidden files, files in hidden folders and unfinished archives of
lm-dataformat are skipped. In folders, files of other types, those named README and those that
preprocessing writes are skipped as well, and counted in the log.

With `suffixes` (for trees of source code), files with these extensions, also compressed, are one
document each; hidden files and others are skipped.
"""

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megatron.utils.errors import UserError, visible
from megatron.utils.progress import readable_size

_FORMATS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst", ".tex", ""), "text"),
    ".parquet": "parquet",
    ".tar": "tar",
    ".zip": "zip",
}
ARCHIVE_FORMATS = ("tar", "zip")
_COMPRESSIONS = (".gz", ".zst", ".xz")
# Reading these needs a seekable file, so they cannot be compressed.
_SEEKABLE_FORMATS = ("zip", "parquet")

# lm-dataformat writes its current archive under a name that starts with this.
_UNFINISHED = "current_chunk"

READABLE = (
    ".jsonl, .json, .txt, .md, .rst, .tex, .tar (each also .gz, .zst, .xz), .parquet and .zip"
)


def file_format(name: str, suffixes: Sequence[str] = ()) -> str | None:
    """The format of a file after decompression (a value above); None if it is not supported."""
    plain = PurePosixPath(name)
    if name.endswith(_COMPRESSIONS):
        plain = plain.with_suffix("")
    if suffixes and plain.suffix in suffixes:
        return "text"
    path = PurePosixPath(name.lower())
    if path.suffix == ".tgz":
        return "tar"
    if path.suffix in _COMPRESSIONS:
        path = path.with_suffix("")
        if _FORMATS.get(path.suffix) in _SEEKABLE_FORMATS:
            return None
    format_name = _FORMATS.get(path.suffix)
    return format_name if not suffixes or format_name in ARCHIVE_FORMATS else None


def is_hidden(path: str) -> bool:
    """Whether a file is skipped for its name or folders. path: in the input folder or archive."""
    plain = PurePosixPath(path)
    if plain.name.startswith(_UNFINISHED):
        return True
    return any(part.startswith(".") and part != ".." for part in plain.parts)


@dataclass(frozen=True)
class InputFile:
    """A file to read. `version` changes when the file changes."""

    name: str
    size: int
    version: str


def find_files(inputs: Sequence[str | Path], suffixes: Sequence[str] = ()) -> list[InputFile]:
    """Return the files that `inputs` name. A folder contributes every readable file below it,
    sorted by path.

    With `suffixes` the files of a folder are instead ordered by a hash of their paths: a split cuts
    the corpus in this order, and in alphabetical order validation and test would consist of a few
    folders. Symbolic links are then skipped.

    Args:
        suffixes: file extensions such as ".c"; case-sensitive.

    Raises UserError if a path does not exist, a file has an unsupported type or is given twice, or
    a folder contains no readable file.
    """
    for suffix in suffixes:
        if not suffix.startswith(".") or len(suffix) < 2 or "." in suffix[1:] or "/" in suffix:
            raise UserError(f"suffix {suffix!r} is not a file extension such as .py")
    if not inputs:
        raise UserError("no input files given")
    files: list[InputFile] = []
    for name in map(str, inputs):
        if "://" in name:
            raise UserError(
                "an input is a URL; download the file first, for example with prepare_data.py --url"
            )
        try:
            files += _files(Path(name), suffixes)
        except (OSError, ValueError) as error:  # ValueError: a null character in the name
            raise UserError(
                f"cannot read input {name}: {getattr(error, 'strerror', None) or error}"
            ) from error

    # Of two copies, one could be in the training data and the other in the validation data.
    present: set[str] = set()
    for file in files:
        path = os.path.abspath(file.name)
        if path in present:
            raise UserError(
                f"input {file.name} is given twice, or with a folder that contains it; remove one "
                "of them. To read a dataset more often than others, set train-data-weights"
            )
        present.add(path)
    _note(f"input: {_count(len(files))}, {readable_size(sum(file.size for file in files))}")
    return files


def _files(path: Path, suffixes: Sequence[str]) -> list[InputFile]:
    if path.is_dir():
        names = _select_names(str(path), _names_below(path, suffixes), suffixes)
        paths = [path / name for name in names]
    elif not path.exists():
        raise UserError(f"input {path} does not exist")
    elif not path.is_file():
        raise UserError(
            f"input {path} is not a regular file or a folder; write its content to a file first"
        )
    else:
        if file_format(path.name, suffixes) is None:
            supported = READABLE
            if suffixes:
                supported = f"folders, archives, and files ending in {' or '.join(suffixes)}"
            raise UserError(f"input {path} has an unsupported file type; supported: {supported}")
        paths = [path]
    files = []
    for path in paths:
        status = path.stat()
        files.append(InputFile(str(path), status.st_size, str(status.st_mtime_ns)))
    return files


def _names_below(folder: Path, suffixes: Sequence[str]) -> list[str]:
    """The relative paths of all regular files below a folder. Raises UserError."""

    def fail(error: OSError) -> None:
        raise UserError(f"cannot read input {error.filename}: {error.strerror}") from error

    names, other = [], 0
    for parent, folders, files in os.walk(folder, onerror=fail):
        other += sum(os.path.islink(os.path.join(parent, name)) for name in folders)
        for name in files:
            path = Path(parent, name)
            if path.is_file() and not (suffixes and path.is_symlink()):
                names.append(path.relative_to(folder).as_posix())
            else:
                other += 1
    if other:
        _note(
            f"{folder}: skipped {other:,} links to folders, broken links, pipes, sockets or devices"
        )
    return names


def _note(line: str) -> None:
    print(visible(line), file=sys.stderr, flush=True)


def _count(files: int) -> str:
    return f"{files:,} file" + "s" * (files != 1)


def _select_names(folder: str, names: Collection[str], suffixes: Sequence[str]) -> list[str]:
    """Select the files to read among the names below a folder, in reading order."""
    # A tree of files with these suffixes is shuffled by hash, any other folder sorted.
    if suffixes:
        texts = [name for name in names if file_format(name, suffixes) == "text"]
        selected = [name for name in texts if not is_hidden(name)]
        selected.sort(
            key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        )
        expected = f"whose name ends in {' or '.join(suffixes)}"
    else:
        present = set(names)
        selected = []
        for name in present:
            path = PurePosixPath(name)
            is_text = path.suffix and not is_hidden(name) and file_format(name) is not None
            # Manifests, the URLs of downloads, and the state files of unfinished preprocessing.
            belongs_to_data = (
                f"{name.removesuffix('.json')}.idx" in present
                or (name.endswith(".source.json") and name.removesuffix(".source.json") in present)
                or name.endswith(".progress.json")
            )
            if is_text and path.stem != "README" and not belongs_to_data:
                selected.append(name)
        selected.sort(key=lambda name: PurePosixPath(name).parts)
        expected = f"of a supported type ({READABLE}); for a tree of source code pass --suffixes"

    # Name what was skipped.
    if not selected:
        raise UserError(f"{folder} contains no file {expected}")
    others = set(names) - set(selected)
    skipped = Counter(PurePosixPath(name).suffix[:20] or "no extension" for name in others)
    if skipped:
        types = ", ".join(f"{count:,} {suffix}" for suffix, count in skipped.most_common(10))
        _note(
            f"{folder}: skipped {_count(skipped.total())}: hidden, named README or of other types "
            f"({types})"
        )
    return selected
