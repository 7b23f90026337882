"""The files that inputs name: local paths, folders, and URLs of object stores; and what a file's name says it holds.

    .jsonl .ndjson         one JSON value per line
    .json                  the same, or one JSON list (lm-dataformat's JSONArchive)
    .txt, no ending        one document
    .parquet               a table, one document per row (needs pyarrow)
    .dat                   lm-dataformat's DatArchive: 16 decimal digits, then so many bytes of text, and again
    .tar .zip              members of the kinds above, in the order of the archive
    .gz .zst .xz           around any of the above but .zip and .parquet

In folders and archives hidden files and lm-dataformat's unfinished ones are passed over; in folders also files of
unknown kinds, and those that preprocessing itself leaves there.

With `suffixes` (a tree of source files) the files of these endings are one document each, and no other is read.
"""

import hashlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from megatron.data.decompression import COMPRESSIONS
from megatron.utils.errors import UserError

_KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".txt": "text",
    "": "text",
    ".parquet": "parquet",
    ".dat": "dat",
    ".tar": "tar",
    ".zip": "zip",
}
_ARCHIVES = ("tar", "zip")
SEEKING = ("zip", "parquet")  # these need a file in which they can seek, so no compression around them

READABLE = ".jsonl, .json, .txt, .dat, .tar (each also .gz, .zst, .xz), .parquet and .zip"


def kind_of(name: str, suffixes: Sequence[str] = ()) -> str | None:
    """What a file of this name holds once its compression is undone; None if nothing that is read here."""
    path = PurePosixPath(name.lower())
    if suffixes and PurePosixPath(name).suffix in suffixes:
        return "text"
    if path.suffix == ".tgz":
        return "tar"
    if path.suffix in COMPRESSIONS:
        path = path.with_suffix("")
        if _KINDS.get(path.suffix) in SEEKING:
            return None
    kind = _KINDS.get(path.suffix)
    return kind if not suffixes or kind in _ARCHIVES else None


@dataclass(frozen=True)
class InputFile:
    """A file to read.

    Attributes:
        name: its path, or its URL on an object store.
        version: changes when the file does.
    """

    name: str
    size: int
    version: str

    @property
    def base_name(self) -> str:
        return PurePosixPath(self.name).name

    @property
    def is_remote(self) -> bool:
        return "://" in self.name

    def open(self) -> BinaryIO:
        if not self.is_remote:
            return open(self.name, "rb")
        filesystem, path = _filesystem(self.name)
        return filesystem.open(path, "rb")


def find_files(inputs: Sequence[str | Path], suffixes: Sequence[str] = ()) -> list[InputFile]:
    """The files that `inputs` name: files as they are, and for a folder every readable file below it, sorted by path.

    A tree of source files (`suffixes`) is ordered by a digest of the paths instead: the parts of a split are cut from
    the order of the corpus, and alphabetical ones would differ in kind. Links in such a tree are passed over.

    Args:
        inputs: paths, or URLs that fsspec knows (s3://bucket/folder, gs://..., memory://...).
        suffixes: endings with their dot, e.g. ".c"; compared with regard to case.

    Raises:
        UserError: a path that does not exist, a file of unknown kind, a folder without a readable file, an object store
            whose package is not installed.
    """
    for suffix in suffixes:
        if not suffix.startswith(".") or len(suffix) < 2 or "." in suffix[1:] or "/" in suffix:
            raise UserError(f"suffix {suffix!r} is not an ending with its dot, such as .py")
    if not inputs:
        raise UserError("no input is named")
    files: list[InputFile] = []
    for given in map(str, inputs):
        found = _remote_files(given, suffixes) if "://" in given else _local_files(Path(given), suffixes)
        files.extend(found)
    return files


def _local_files(path: Path, suffixes: Sequence[str]) -> list[InputFile]:
    if path.is_dir():
        names = [name.relative_to(path).as_posix() for name in path.rglob("*") if _is_wanted_file(name, suffixes)]
        return [_local_file(path / name) for name in _choose(str(path), names, suffixes)]
    if not path.exists():
        raise UserError(f"input {path} does not exist")
    _check_kind(str(path), suffixes)
    return [_local_file(path)]


def _is_wanted_file(path: Path, suffixes: Sequence[str]) -> bool:
    return path.is_file() and not (suffixes and path.is_symlink())


def _local_file(path: Path) -> InputFile:
    status = path.stat()
    return InputFile(str(path), status.st_size, str(status.st_mtime_ns))


def _choose(folder: str, names: Iterable[str], suffixes: Sequence[str]) -> list[str]:
    """Of the names below a folder those to read, in the order to read them in."""
    if suffixes:
        chosen = [name for name in names if PurePosixPath(name).suffix in suffixes]
        chosen.sort(key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())
        what = f"whose name ends in {' or '.join(suffixes)}"
    else:
        present = set(names)
        wanted = (name for name in present if _is_corpus_file(name) and not _is_of_a_dataset(name, present))
        chosen = sorted(wanted, key=lambda name: PurePosixPath(name).parts)
        what = f"of a kind read here: {READABLE}; for a tree of source files pass --suffixes"
    if not chosen:
        raise UserError(f"{folder} holds no file {what}")
    return chosen


def _is_corpus_file(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.suffix) and not is_hidden(path.name) and kind_of(path.name) is not None


def is_hidden(name: str) -> bool:
    """Whether a file of this name is not meant to be read, whatever its kind."""
    # lm-dataformat keeps the archive it is still writing under a name that begins with this word.
    return name.startswith((".", "current_chunk"))


def _is_of_a_dataset(name: str, present: Container[str]) -> bool:
    """Whether preprocessing or a download left this file in the folder: a manifest, or notes on what is unfinished."""
    return name.endswith((".progress.json", ".partial.json")) or f"{name.removesuffix('.json')}.idx" in present


def _check_kind(name: str, suffixes: Sequence[str]) -> None:
    if kind_of(PurePosixPath(name).name, suffixes) is None:
        wanted = f"a folder or an archive, or a file ending in {' or '.join(suffixes)}" if suffixes else READABLE
        raise UserError(f"input {name} is of no kind read here: {wanted}")


def _remote_files(url: str, suffixes: Sequence[str]) -> list[InputFile]:
    if url.startswith(("http://", "https://")):
        raise UserError(f"input {url} is to be downloaded first: prepare_data.py does it with --url {url}")
    filesystem, path = _filesystem(url)
    try:
        if "*" in path:
            paths = sorted(filesystem.glob(path))
        elif filesystem.isdir(path):
            below = {name.removeprefix(path).lstrip("/"): name for name in filesystem.find(path)}
            paths = [below[name] for name in _choose(url, below, suffixes)]
        else:
            paths = [path]
        files = [_remote_file(filesystem, name) for name in paths]
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"input {url} does not exist") from error
    except Exception as error:  # every store has errors of its own: credentials, network, permissions
        raise UserError(f"cannot read {url}: {_first_line(error)}") from error
    if not files:
        raise UserError(f"input {url} matches no file")
    for file in files:
        _check_kind(file.name, suffixes)
    return files


def _remote_file(filesystem, path: str) -> InputFile:
    size = filesystem.info(path)["size"]
    return InputFile(filesystem.unstrip_protocol(path), size, str(filesystem.ukey(path)))


def _filesystem(url: str):
    """fsspec's file system for a URL, and the path in it."""
    try:
        import fsspec
    except ImportError as error:
        raise UserError(f"reading {url} needs the package fsspec: pip install -r requirements/data.txt") from error
    protocol = url.split("://")[0]
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(
            f"reading {protocol}:// needs a package that is not installed: {_first_line(error)} "
            "(pip install -r requirements/data.txt has the one for s3)"
        ) from error
    except ValueError as error:
        raise UserError(f"input {url}: fsspec knows no {protocol}:// ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
