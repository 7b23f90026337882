"""The embedded corpus: the Python sources of the running interpreter's standard library. Nothing is downloaded."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megatron.data.chunks import START, Chunk, Position
from megatron.utils.errors import UserError

# Tests are as large as all the rest, some interpreters come without them; packages are not the standard library.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class StdlibCorpus:
    """One document per source file, the same order on every run.

    Files are ordered by a digest of their names rather than by name: the parts of a split are cut from the order of the
    file, and alphabetical ones would differ in kind (the last twentieth would be all of `xml` and `zipfile`).

    Attributes:
        total_bytes, bytes_read, position: as in `megatron.data.chunks.ChunkSource`.
        skipped: files left out because they are not UTF-8.
    """

    def __init__(self):
        self.root = Path(sysconfig.get_paths()["stdlib"])
        self.documents: list[tuple[str, bytes]] = []
        self.skipped = 0
        for path in self.root.rglob("*.py"):
            name = path.relative_to(self.root)
            if _LEFT_OUT.isdisjoint(name.parts):
                self._add(name.as_posix(), path)
        if not self.documents:
            raise UserError(
                f"{self.root} holds no Python sources: this interpreter comes without its library's sources"
            )
        self.documents.sort(key=lambda document: hashlib.sha256(document[0].encode()).digest())
        digest = hashlib.sha256()
        for name, content in self.documents:
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self._identity = digest.hexdigest()
        self.total_bytes = sum(len(content) for _, content in self.documents)
        self.bytes_read = 0
        self.position = START

    def identity(self) -> str:
        """sha256 over names and contents."""
        return self._identity

    def _add(self, name: str, path: Path) -> None:
        content = path.read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            self.skipped += 1
            return
        self.documents.append((name, content))

    def texts(self) -> Iterator[str]:
        for _, content in self.documents:
            yield content.decode("utf-8")

    def chunks(self, start: Position = START) -> Iterator[Chunk]:
        for number, (name, content) in enumerate(self.documents, start=1):
            self.bytes_read += len(content)
            if number > start.chunk:
                self.position = Position(0, number)
                yield Chunk(name, "text", 1, content)
