"""Parquet tables to chunks, with the optional package pyarrow."""

import json
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from megatron.data.chunks import Chunk
from megatron.utils.errors import UserError

# Rows turned into one chunk at a time: their texts, some kilobytes each, are in memory together.
_ROWS = 256


def parquet_chunks(raw: BinaryIO, source: str, columns: Sequence[str]) -> Iterator[Chunk]:
    """The rows as JSON lines, with those of `columns` that the table has.

    Raises:
        UserError: pyarrow is not installed, not a Parquet file, a column that is no text.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"reading {source} needs the package pyarrow, which is not installed: pip install -r requirements/data.txt"
        ) from error
    try:
        table = pyarrow.parquet.ParquetFile(raw)
        schema = table.schema_arrow
        present = [name for name in columns if name in schema.names]
        if not present:
            raise UserError(f"{source} has no column {columns[0]!r}; its columns: {', '.join(schema.names[:20])}")
        for name in present:
            if pyarrow.types.is_binary(schema.field(name).type) or pyarrow.types.is_large_binary(
                schema.field(name).type
            ):
                raise UserError(f"{source}: column {name!r} is binary, not text")
        rows = 0
        for batch in table.iter_batches(batch_size=_ROWS, columns=present):
            values = batch.to_pylist()
            lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in values)
            first, rows = rows + 1, rows + len(values)
            content = lines.encode("utf-8", "surrogatepass")
            yield Chunk(source, "lines", first, content, "row", rows / table.metadata.num_rows)
    except pyarrow.ArrowException as error:
        raise UserError(f"{source} is damaged, or no Parquet file: {str(error).splitlines()[0]}") from error
