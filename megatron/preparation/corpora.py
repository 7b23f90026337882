"""Corpora that are not files: documents in memory (Python's standard library), and datasets of the
Hugging Face hub.
"""

import hashlib
import json
import sysconfig
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from megatron.data.splits import split_spans
from megatron.preparation.readers import START, ChunkSource, ReadPosition, TextChunk
from megatron.utils.errors import UserError, first_line, import_package

# Tests are as large as everything else together and some interpreters come without them. Installed
# packages are not part of the standard library. `encodings` is mostly tables of characters,
# `pydoc_data` prose: their losses are so different that a sample of the corpus would need many more
# documents for the same standard error.
_EXCLUDED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
}

PIECE_BYTES = 1000
# Enough text for a vocabulary of some thousand ids.
TOKENIZER_BYTES = 50_000_000
_HUB_CHUNK_BYTES = 1 << 20


def source_pieces(content: bytes, limit: int = PIECE_BYTES) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, text) of consecutive pieces of a source file, each of about
    `limit` bytes at most, or of a single longer line. Pieces begin at top-level statements after a
    blank line if possible, otherwise at any line. Pieces without text are left out.
    """
    lines = content.splitlines(keepends=True)
    starts = [0]  # index of the first line of each piece
    size, boundary = 0, 0
    for index, line in enumerate(lines):
        if index and line[:1].strip() and not lines[index - 1].strip():
            boundary = index
        size += len(line)
        if size > limit and index > starts[-1]:
            cut = boundary if boundary > starts[-1] else index
            starts.append(cut)
            size = sum(map(len, lines[starts[-1] : index + 1]))
    for first, last in zip(starts, [*starts[1:], len(lines)], strict=True):
        piece = b"".join(lines[first:last])
        if piece.strip():
            yield first + 1, piece


class DocumentCorpus(ChunkSource):
    """Documents in memory: pairs of a name and a UTF-8 text, read when first needed."""

    @cached_property
    def documents(self) -> list[tuple[str, bytes]]:
        documents = self._read()
        self.total_bytes = sum(len(content) for _, content in documents)
        return documents

    @abstractmethod
    def _read(self) -> list[tuple[str, bytes]]: ...

    def tokenizer_texts(self) -> list[str]:
        """Return the documents to train a tokenizer on."""
        return [content.decode("utf-8") for _, content in self.documents]

    def chunks(self, start: ReadPosition = START) -> Iterator[TextChunk]:
        for count, (name, content) in enumerate(self.documents, start=1):
            self.bytes_read += len(content)
            if count > start.chunk:
                self.position = ReadPosition(0, count)
                yield TextChunk(name, "text", 1, content)


def first_training_texts(documents: Sequence[tuple[str, bytes]], split: str) -> list[str]:
    """Return the documents to train a tokenizer on: the first ones of the training split, about
    `TOKENIZER_BYTES`.
    """
    spans = split_spans(split, len(documents))
    assert spans[0] is not None
    texts, size = [], 0
    for _, content in documents[: spans[0][1]]:
        texts.append(content.decode("utf-8"))
        size += len(content)
        if size >= TOKENIZER_BYTES:
            break
    return texts


def documents_checksum(documents: Iterable[tuple[str, bytes]]) -> str:
    """Return the SHA-256 (hexadecimal) of all names and contents."""
    digest = hashlib.sha256()
    for name, content in documents:
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


class StdlibCorpus(DocumentCorpus):
    """The Python sources of the running interpreter's standard library, in pieces.

    A document is a piece of a file of about PIECE_BYTES at most, so that no file dominates a part
    of the corpus. Pieces are ordered by a hash of their names: a split cuts the corpus in this
    order, and in alphabetical order validation and test would consist of a few modules (the last
    twentieth is `xml` to `zipfile`).

    Attributes:
        documents: name (file:line) and content of each piece.
    """

    def __init__(self) -> None:
        self.root = Path(sysconfig.get_paths()["stdlib"])
        if not self.documents:
            raise UserError(
                f"{self.root} contains no Python sources: this interpreter is installed without "
                "them"
            )

    def _read(self) -> list[tuple[str, bytes]]:
        documents: list[tuple[str, bytes]] = []
        for path in self.root.rglob("*.py"):
            relative = path.relative_to(self.root)
            if not _EXCLUDED_FOLDERS.isdisjoint(relative.parts):
                continue
            content = path.read_bytes()
            try:
                content.decode("utf-8")
            except UnicodeDecodeError:
                continue  # the text must be UTF-8
            for line, piece in source_pieces(content):
                documents.append((f"{relative.as_posix()}:{line}", piece))
        return sorted(documents, key=lambda document: hashlib.sha256(document[0].encode()).digest())

    def identity(self) -> str:
        return documents_checksum(self.documents)


class HubCorpus(ChunkSource):
    """A split of a dataset on the Hugging Face hub, one document per row.

    The dataset is streamed by the optional package `datasets`; nothing is stored on disk.

    Args:
        name: the dataset on the hub, e.g. "owner/name", or a local folder that `datasets` can load.
        config: its configuration, if it has several.
        columns: columns to read. The first one must exist.

    Raises UserError if `datasets` is not installed, the dataset, split or column does not exist, or
    there is no connection.
    """

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        columns: Sequence[str] = ("text", "meta"),
    ):
        datasets = import_package("datasets", "data", f"--hf {name}")
        self.name = name
        self._source = f"{name} ({split})"
        try:
            builder = datasets.load_dataset_builder(name, config)
            dataset = builder.as_streaming_dataset(split=split)
        except Exception as error:  # the package raises many types of exceptions
            raise UserError(
                f"cannot open the Hugging Face dataset {name}: {first_line(error)}"
            ) from error

        # Read only the columns in use.
        present = dataset.column_names
        if present is not None:
            if columns[0] not in present:
                raise UserError(
                    f"{self._source} has no column {columns[0]!r}; its columns: "
                    f"{', '.join(present)}"
                )
            dataset = dataset.select_columns([column for column in columns if column in present])
        self._dataset = dataset

        # Resuming and rebuilding depend on the versions of the files.
        data_files = builder.config.data_files or {}
        versions = [
            [str(file) for file in data_files.get(split, ())],
            getattr(data_files.get(split), "origin_metadata", None),
        ]

        # The base path of a dataset on the hub contains its revision.
        identity = json.dumps(
            [name, config, split, list(columns), builder.base_path, versions], default=str
        )
        self._identity = hashlib.sha256(identity.encode()).hexdigest()

        # The size is for progress, and may be unknown.
        sizes = builder.info.splits or {}
        self.total_bytes = sizes[split].num_bytes if split in sizes else None

    def identity(self) -> str:
        return self._identity

    def chunks(self, start: ReadPosition = START) -> Iterator[TextChunk]:
        """Yield rows as JSON lines. Positions count rows. Raises UserError if the connection
        breaks.
        """
        lines: list[bytes] = []
        size, rows, first_row = 0, start.chunk, start.chunk + 1
        self.position = start
        dataset = self._dataset.skip(rows) if rows else self._dataset
        stream = iter(dataset)
        while True:
            try:
                row = next(stream, None)
            except Exception as error:
                raise UserError(f"{self._source}, row {rows + 1}: {first_line(error)}") from error
            if row is not None:
                line = json.dumps(row, default=str).encode() + b"\n"
                lines.append(line)
                size += len(line)
                rows += 1
            if lines and (row is None or size >= _HUB_CHUNK_BYTES):
                self.bytes_read += size
                self.position = ReadPosition(0, rows)
                yield TextChunk(self._source, "lines", first_row, b"".join(lines), "row")
                lines, size, first_row = [], 0, rows + 1
            if row is None:
                return
