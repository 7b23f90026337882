"""Writing a `.bin/.idx` pair: appended to under temporary names, verified, then renamed into place.

A writer can be left and taken up again, in another process, at the last state it was asked to commit.
"""

import contextlib
import fcntl
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.indexed_format import (
    HEADER,
    ID_TYPE_CODES,
    MAGIC,
    VERSION,
    bin_path,
    check_indexed_files,
    id_type_for,
    idx_path,
)
from megatron.utils.errors import UserError
from megatron.utils.files import sync_folder

_BLOCK = 1 << 22  # tokens held in memory at a time while the result is read again


@dataclass(frozen=True)
class WrittenFiles:
    """What `IndexedWriter.finish` put in place.

    Attributes:
        largest_id: largest token id in the .bin, -1 if there is none.
        sha256: of the .bin, hexadecimal.
    """

    prefix: str
    dtype: str
    documents: int
    tokens: int
    largest_id: int
    sha256: str


@dataclass(frozen=True)
class WriterState:
    """What of a writer's work is on the disk for certain; `checksum` is the CRC-32 of the .bin so far."""

    documents: int = 0
    tokens: int = 0
    checksum: int = 0


NOTHING = WriterState()


class IndexedWriter:
    """Appends documents, one sequence each, to `PREFIX.bin` and `PREFIX.idx`.

    Nothing is at the final names until `finish`; memory does not grow with the corpus (lengths go to a file of their
    own on the way). Used as a context manager, it removes its temporary files when left without `finish` or `suspend`;
    what a killed process left is overwritten by the next one. Two processes cannot write the same prefix at once.

    Args:
        state: what `commit` returned in another process; whatever was written after it is cut off.
    """

    def __init__(self, prefix: str | Path, vocab_size: int, state: WriterState = NOTHING):
        self.prefix = str(prefix)
        self.vocab_size = vocab_size
        self.dtype = id_type_for(vocab_size)
        self.documents = state.documents
        self.tokens = state.tokens
        self._checksum = state.checksum
        self._left = False
        self._bin, self._idx, self._lengths = _partial_files(prefix)
        try:
            self._bin.parent.mkdir(parents=True, exist_ok=True)
            self._bin_stream = open(self._bin, "ab")  # noqa: SIM115 (closed by finish or discard)
            fcntl.flock(self._bin_stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._bin_stream.fileno()), self._bin.stat()):
                raise BlockingIOError  # the process that held the lock renamed the file in this very moment
            self._lengths_stream = open(self._lengths, "ab")  # noqa: SIM115
            for stream, size in zip((self._bin_stream, self._lengths_stream), _sizes(state, self.dtype), strict=True):
                stream.truncate(size)
        except BlockingIOError as error:
            raise UserError(
                f"another process is writing {prefix}.bin; wait for it, or choose another prefix"
            ) from error
        except OSError as error:
            raise UserError(f"cannot write {error.filename or self._bin}: {error.strerror}") from error

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.discard()

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents.

        Args:
            tokens: ids of all documents one after the other, [sum of lengths], of type `self.dtype`.
            lengths: tokens in each document, [documents].
        """
        if int(lengths.sum(dtype=np.int64)) != len(tokens):
            raise ValueError(f"lengths add up to {lengths.sum()}, but there are {len(tokens)} tokens")
        if tokens.dtype != self.dtype:
            raise ValueError(f"tokens are {tokens.dtype}, but this vocabulary is stored as {self.dtype}")
        content = tokens.tobytes()
        try:
            self._bin_stream.write(content)
            self._lengths_stream.write(np.ascontiguousarray(lengths, dtype="<i4").tobytes())
        except OSError as error:
            raise UserError(f"cannot write {self.prefix}.bin: {error.strerror}") from error
        self._checksum = zlib.crc32(content, self._checksum)
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def commit(self) -> WriterState:
        """Bring all that was added to the disk, so that a writer made with the returned state goes on from here."""
        try:
            for stream in (self._bin_stream, self._lengths_stream):
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.prefix}.bin: {error.strerror}") from error
        return WriterState(self.documents, self.tokens, self._checksum)

    def seal(self) -> WrittenFiles:
        """Write the .idx and read everything again; `put_in_place` is then all that is left to do.

        Raises:
            UserError: no tokens at all, a full disk, or what was read back is not what was written.
        """
        if self.tokens == 0:
            raise UserError(f"nothing to write to {self.prefix}.bin: the input holds no text")
        self.commit()
        try:
            self._write_idx()
            return self._verify()
        except OSError as error:
            raise UserError(f"cannot write {self.prefix}.idx: {error.strerror}") from error

    def finish(self) -> WrittenFiles:
        """`seal`, and rename both files into place. Raises what `seal` does."""
        written = self.seal()
        put_in_place(self.prefix)
        self.suspend()
        return written

    def suspend(self) -> None:
        """Leave the temporary files for another writer to go on with."""
        if not self._left:
            self._left = True
            self._close()

    def discard(self) -> None:
        """Remove the temporary files; without effect after `finish` or `suspend`."""
        if not self._left:
            for path in (self._bin, self._idx, self._lengths):
                path.unlink(missing_ok=True)
            self.suspend()

    def _close(self) -> None:
        """Closing the .bin gives up the lock on it."""
        for stream in (self._bin_stream, self._lengths_stream):
            with contextlib.suppress(OSError):  # closing flushes, and the disk may be full
                stream.close()

    def _write_idx(self) -> None:
        with open(self._idx, "wb") as stream:
            stream.write(HEADER.pack(MAGIC, VERSION, ID_TYPE_CODES[self.dtype], self.documents, self.documents + 1))
            for lengths in self._read_lengths():
                stream.write(lengths.tobytes())
            position = 0
            for lengths in self._read_lengths():
                ends = position + np.cumsum(lengths, dtype="<i8")
                stream.write((np.concatenate(([position], ends[:-1])) * self.dtype.itemsize).astype("<i8").tobytes())
                position = int(ends[-1])
            for start in range(0, self.documents + 1, _BLOCK):
                stream.write(np.arange(start, min(start + _BLOCK, self.documents + 1), dtype="<i8").tobytes())
            stream.flush()
            os.fsync(stream.fileno())

    def _read_lengths(self):
        with open(self._lengths, "rb") as stream:
            while block := stream.read(4 * _BLOCK):
                yield np.frombuffer(block, dtype="<i4")

    def _verify(self) -> WrittenFiles:
        """Read both files back: the counts and the checksum of what was handed over, no id beyond the vocabulary."""
        found = check_indexed_files(self._bin.with_suffix(""))
        checksum, tokens, largest, digest = 0, 0, -1, hashlib.sha256()
        with open(self._bin, "rb") as stream:
            while block := stream.read(_BLOCK * self.dtype.itemsize):
                checksum = zlib.crc32(block, checksum)
                digest.update(block)
                ids = np.frombuffer(block, dtype=self.dtype)
                tokens += len(ids)
                largest = max(largest, int(ids.max()))
        if (found.documents, tokens, checksum) != (self.documents, self.tokens, self._checksum):
            self.discard()
            raise UserError(
                f"{self.prefix}.bin reads back differently from what was written ({tokens:,} of {self.tokens:,} "
                "tokens): the disk or file system is at fault; nothing was put in place"
            )
        if largest >= self.vocab_size:
            raise UserError(
                f"{self.prefix}.bin has token id {largest}, but the vocabulary ends at {self.vocab_size - 1}"
            )
        return WrittenFiles(self.prefix, self.dtype.name, self.documents, self.tokens, largest, digest.hexdigest())


def is_resumable(prefix: str | Path, vocab_size: int, state: WriterState) -> bool:
    """Whether the temporary files of an earlier writer still hold all that it had committed in `state`."""
    binary, _, lengths = _partial_files(prefix)
    sizes = _sizes(state, id_type_for(vocab_size))
    return all(
        path.is_file() and path.stat().st_size >= size for path, size in zip((binary, lengths), sizes, strict=True)
    )


def put_in_place(prefix: str | Path) -> None:
    """Give sealed files their names, the .idx last; can be done again if a kill came between the two.

    At every moment the pair under the final names is the old one, the new one, or incomplete.

    Raises:
        UserError: from the OSError that says why they cannot be renamed.
    """
    binary, index, lengths = _partial_files(prefix)
    try:
        if binary.exists():
            idx_path(prefix).unlink(missing_ok=True)
            binary.replace(bin_path(prefix))
        if index.exists():
            index.replace(idx_path(prefix))
        lengths.unlink(missing_ok=True)
        sync_folder(binary.parent)
    except OSError as error:
        raise UserError(f"cannot write {prefix}.idx: {error.strerror}") from error


def _sizes(state: WriterState, dtype: np.dtype) -> tuple[int, int]:
    """Bytes of the .bin and of the lengths at `state`."""
    return state.tokens * dtype.itemsize, 4 * state.documents


def _partial_files(prefix: str | Path) -> tuple[Path, Path, Path]:
    """Where the .bin, the .idx and the lengths are while they are written."""
    partial = f"{prefix}.partial"
    return bin_path(partial), idx_path(partial), Path(f"{partial}.lengths")
