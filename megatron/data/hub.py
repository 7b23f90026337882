"""Datasets of the Hugging Face hub, streamed with the optional package `datasets`: nothing is kept on disk."""

import hashlib
import json
from collections.abc import Iterator, Sequence

from megatron.data.chunks import START, Chunk, Position
from megatron.utils.errors import UserError

_CHUNK_BYTES = 1 << 20


class HubCorpus:
    """The rows of one split, each a document: a `megatron.data.chunks.ChunkSource`.

    Args:
        name: of the dataset on the hub, e.g. "owner/name", or a local folder that `datasets` can load.
        config: its configuration, where it has several.
        columns: to read; the first must be there.

    Raises:
        UserError: `datasets` is not installed, no such dataset or split, no connection.
    """

    def __init__(
        self, name: str, config: str | None = None, split: str = "train", columns: Sequence[str] = ("text", "meta")
    ):
        try:
            import datasets
        except ImportError as error:
            raise UserError(
                f"--hf {name} needs the package datasets, which is not installed: pip install -r requirements/data.txt"
            ) from error
        self.name = name
        self._source = f"{name} ({split})"
        try:
            builder = datasets.load_dataset_builder(name, config)
            dataset = builder.as_streaming_dataset(split=split)
        except Exception as error:  # the package raises errors of many kinds
            raise UserError(f"cannot open the Hugging Face dataset {name}: {_first_line(error)}") from error
        present = dataset.column_names
        if present is not None:
            if columns[0] not in present:
                raise UserError(f"{self._source} has no column {columns[0]!r}; its columns: {', '.join(present)}")
            dataset = dataset.select_columns([column for column in columns if column in present])
        self._dataset = dataset
        files = builder.config.data_files or {}
        origin = [[str(file) for file in files.get(split, ())], getattr(files.get(split), "origin_metadata", None)]
        # The base path of a dataset on the hub holds its revision.
        identity = json.dumps([name, config, split, list(columns), builder.base_path, origin], default=str)
        self._identity = hashlib.sha256(identity.encode()).hexdigest()
        sizes = builder.info.splits or {}
        self.total_bytes = sizes[split].num_bytes if split in sizes else None
        self.bytes_read = 0
        self.position = START

    def identity(self) -> str:
        return self._identity

    def chunks(self, start: Position = START) -> Iterator[Chunk]:
        """Rows as JSON lines; a position counts rows. Raises UserError when the connection breaks."""
        lines: list[bytes] = []
        size, rows, first = 0, start.chunk, start.chunk + 1
        self.position = start
        stream = iter(self._dataset.skip(rows) if rows else self._dataset)
        while True:
            try:
                row = next(stream, None)
            except Exception as error:
                raise UserError(f"{self._source}, row {rows + 1}: {_first_line(error)}") from error
            if row is not None:
                line = json.dumps(row, default=str).encode() + b"\n"
                lines.append(line)
                size += len(line)
                rows += 1
            if lines and (row is None or size >= _CHUNK_BYTES):
                self.bytes_read += size
                self.position = Position(0, rows)
                yield Chunk(self._source, "lines", first, b"".join(lines), "row")
                lines, size, first = [], 0, rows + 1
            if row is None:
                return


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
