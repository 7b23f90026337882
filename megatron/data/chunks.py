"""What travels from the one process that reads to those that tokenize."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol


@dataclass(frozen=True)
class Chunk:
    """A piece of input, not yet parsed.

    Attributes:
        source: the file, and the member or record of an archive.
        kind: "lines": whole JSON lines; "list": a JSON list of texts; "text": one document.
        first_line: number, from 1, of its first line in the source.
        unit: what those lines are in the source, for messages: "line", or "row" of a table.
        share: how much of its file is read with it, 0 to 1, where the reader knows better than the file's position.
    """

    source: str
    kind: Literal["lines", "list", "text"]
    first_line: int
    content: bytes
    unit: str = "line"
    share: float | None = None


class Position(NamedTuple):
    """A place between two chunks: so many files are read to the end, and so many chunks (or rows) of the next one."""

    file: int = 0
    chunk: int = 0


START = Position()


class ChunkSource(Protocol):
    """A corpus that can be read from any place that it was at before.

    Attributes:
        total_bytes: of the input; None where that is not known.
        bytes_read: of that, how much `chunks` has gone through so far.
        position: behind the chunk that `chunks` gave last.
    """

    total_bytes: int | None
    bytes_read: int
    position: Position

    def chunks(self, start: Position = START) -> Iterator[Chunk]:
        """The chunks from `start` on; the same ones whenever `identity` is the same."""

    def identity(self) -> str:
        """sha256 (hexadecimal) of whatever tells this input from another, or from itself after a change."""
