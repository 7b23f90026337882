"""Writes a `.bin/.idx` pair: appends under temporary names, reads the result back, then renames it.

A writer can be closed and resumed, also by another process, from the last state it committed.
"""

import contextlib
import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.indexed_dataset import (
    HEADER,
    ID_TYPE_CODES,
    MAGIC,
    VERSION,
    bin_path,
    file_sample,
    file_sha256,
    id_type_for,
    idx_path,
    open_indexed_files,
)
from megatron.utils.errors import UserError
from megatron.utils.files import open_file, read_errors, sync_folder, write_errors
from megatron.utils.processes import Lock

_BLOCK = 1 << 22  # tokens in memory at a time while the result is read back


@dataclass(frozen=True)
class WrittenFiles:
    """The manifest's fields about what was written. largest_id: -1 if the .bin is empty."""

    dtype: str
    documents: int
    tokens: int
    largest_id: int
    sha256: str
    idx_sha256: str
    bin_sample: str


@dataclass(frozen=True)
class WriterState:
    """A state of the output that has been synced to disk. `checksum` and `lengths_checksum` are the
    CRC-32 of the .bin and of the file with the sequence lengths up to there.
    """

    documents: int = 0
    tokens: int = 0
    checksum: int = 0
    lengths_checksum: int = 0


class IndexedWriter:
    """Appends documents, one sequence each, to `PREFIX.bin` and `PREFIX.idx`. A context manager.

    The final names appear only in `finish` (or `publish`). Memory use does not grow with the
    corpus, because sequence lengths go to a temporary file. Leaving the context without `finish` or
    `close` removes the temporary files. Files left by a killed process are overwritten or resumed.
    Only one process can write a prefix at a time.

    Args:
        vocab_size: determines the dtype of the ids.
        state: what an earlier writer's `commit` returned; anything written after it is truncated.
    """

    def __init__(self, prefix: str | Path, vocab_size: int, state: WriterState | None = None):
        state = state or WriterState()
        self.prefix = str(prefix)
        self.vocab_size = vocab_size
        self.dtype = id_type_for(vocab_size)
        self.documents = state.documents
        self.tokens = state.tokens
        self._checksum, self._lengths_checksum = state.checksum, state.lengths_checksum
        self._closed = False
        self._bin, self._idx, self._lengths = _partial_files(prefix)
        self._lock = Lock(
            f"{prefix}.partial.lock",
            f"another process is writing {prefix}.bin; wait for it to finish, or choose another "
            "prefix",
        )
        self._lock.acquire()
        try:
            self._bin_stream = open(self._bin, "ab")  # noqa: SIM115 (closed by `close`)
            self._lengths_stream = open(self._lengths, "ab")  # noqa: SIM115
            bin_size, lengths_size = _committed_sizes(state, self.dtype)
            self._bin_stream.truncate(bin_size)
            self._lengths_stream.truncate(lengths_size)
        except OSError as error:
            self._lock.release()
            raise UserError(
                f"cannot write {error.filename or self._bin}: {error.strerror}"
            ) from error

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: their concatenated ids, `self.dtype` [sum of lengths], and the tokens
        in each, [documents]. Raises UserError if the disk is full.
        """
        content = np.ascontiguousarray(tokens).data  # not tobytes(), which copies
        lengths_content = np.ascontiguousarray(lengths, dtype="<i4").data
        with write_errors(bin_path(self.prefix)):
            self._bin_stream.write(content)
            self._lengths_stream.write(lengths_content)
        self._checksum = zlib.crc32(content, self._checksum)
        self._lengths_checksum = zlib.crc32(lengths_content, self._lengths_checksum)
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def commit(self) -> WriterState:
        """Sync all added documents to disk, so that a writer created with the returned state
        resumes after them.
        """
        with write_errors(bin_path(self.prefix)):
            for stream in (self._bin_stream, self._lengths_stream):
                stream.flush()
                os.fsync(stream.fileno())
        return WriterState(self.documents, self.tokens, self._checksum, self._lengths_checksum)

    def finalize(self) -> WrittenFiles:
        """Write the .idx and read both files back. Call `publish` next.

        Raises UserError if there are no tokens, the disk is full, the content read back differs
        from what was written, or an id exceeds the vocabulary.
        """
        # Lengths, offsets in bytes, and document boundaries, in the order of the .idx format.
        if self.tokens == 0:
            raise UserError(f"nothing to write to {self.prefix}.bin: the input contains no text")
        self.commit()
        with write_errors(idx_path(self.prefix)):
            with open(self._idx, "wb") as stream:
                stream.write(
                    HEADER.pack(
                        MAGIC,
                        VERSION,
                        ID_TYPE_CODES[self.dtype],
                        self.documents,
                        self.documents + 1,
                    )
                )
                for lengths in self._read_lengths():
                    stream.write(lengths.tobytes())
                offset = 0
                for lengths in self._read_lengths():
                    ends = offset + np.cumsum(lengths, dtype="<i8")
                    stream.write(
                        (np.concatenate(([offset], ends[:-1])) * self.dtype.itemsize)
                        .astype("<i8")
                        .tobytes()
                    )
                    offset = int(ends[-1])
                for start in range(0, self.documents + 1, _BLOCK):
                    stream.write(
                        np.arange(
                            start, min(start + _BLOCK, self.documents + 1), dtype="<i8"
                        ).tobytes()
                    )
                stream.flush()
                os.fsync(stream.fileno())
            # Read both files back, and compare the counts, the checksum and the largest id with
            # what was added.
            files = open_indexed_files(self._bin.with_suffix(""))
            checksum, tokens, largest, digest = 0, 0, -1, hashlib.sha256()
            with open(self._bin, "rb") as stream:
                while block := stream.read(_BLOCK * self.dtype.itemsize):
                    checksum = zlib.crc32(block, checksum)
                    digest.update(block)
                    ids = np.frombuffer(block, dtype=self.dtype)
                    tokens += len(ids)
                    largest = max(largest, int(ids.max()))

            # The first check finds a broken disk, the second a tokenizer with a wrong size.
            lengths_checksum = _crc32(self._lengths, 4 * self.documents)
            written = (self.documents, self.tokens, self._checksum, self._lengths_checksum)
            if (files.documents, tokens, checksum, lengths_checksum) != written:
                self.discard()
                raise UserError(
                    f"{self.prefix}.bin reads back differently from what was written ({tokens:,} "
                    f"of {self.tokens:,} tokens), so the output was discarded; check the disk and "
                    "the file system"
                )
            if largest >= self.vocab_size:
                raise UserError(
                    f"{self.prefix}.bin has token id {largest}, but the largest id of the "
                    f"vocabulary is {self.vocab_size - 1}"
                )
            return WrittenFiles(
                self.dtype.name,
                self.documents,
                self.tokens,
                largest,
                digest.hexdigest(),
                file_sha256(self._idx),
                file_sample(self._bin),
            )

    def finish(self) -> WrittenFiles:
        """`finalize`, `publish` and `close`. Raises what `finalize` raises."""
        written = self.finalize()
        publish(self.prefix)
        self.close()
        return written

    def close(self) -> None:
        """Close the files. The temporary ones stay, for `publish` or another writer."""
        if self._closed:
            return
        self._closed = True
        for stream in (self._bin_stream, self._lengths_stream):
            with contextlib.suppress(OSError):  # closing flushes, and the disk may be full
                stream.close()
        self._lock.release()

    def discard(self) -> None:
        """Remove the temporary files and close. Does nothing after `finish` or `close`."""
        if not self._closed:
            for path in (self._bin, self._idx, self._lengths):
                path.unlink(missing_ok=True)
            self.close()

    def _read_lengths(self) -> Iterator[np.ndarray]:
        with open(self._lengths, "rb") as stream:
            while block := stream.read(4 * _BLOCK):
                yield np.frombuffer(block, dtype="<i4")


def is_resumable(prefix: str | Path, vocab_size: int, state: WriterState) -> bool:
    """Whether an earlier writer's temporary files are long enough for what `state` committed."""
    binary, _, lengths = _partial_files(prefix)
    bin_size, lengths_size = _committed_sizes(state, id_type_for(vocab_size))
    committed = ((binary, bin_size), (lengths, lengths_size))
    return all(path.is_file() and path.stat().st_size >= size for path, size in committed)


def is_intact(prefix: str | Path, vocab_size: int, state: WriterState) -> bool:
    """Whether the temporary files of an earlier writer still contain what was committed in `state`.
    Reads all of it. Raises UserError if a file cannot be read.
    """
    binary, _, lengths = _partial_files(prefix)
    bin_size, lengths_size = _committed_sizes(state, id_type_for(vocab_size))
    checksums = _crc32(binary, bin_size), _crc32(lengths, lengths_size)
    return checksums == (state.checksum, state.lengths_checksum)


def _crc32(path: Path, size: int) -> int:
    """The CRC-32 of the first `size` bytes of a file."""
    checksum = 0
    with read_errors(path), open_file(path) as stream:
        while block := stream.read(min(size, _BLOCK)):
            checksum = zlib.crc32(block, checksum)
            size -= len(block)
    return checksum


def publish(prefix: str | Path) -> None:
    """Rename finalized files to their final names, the .idx last. Can be repeated if it was killed
    halfway.

    At any moment the pair under the final names is the old one, the new one, or incomplete.

    Raises UserError if a file cannot be renamed.
    """
    binary, index, lengths = _partial_files(prefix)
    with write_errors(idx_path(prefix)):
        if binary.exists():
            idx_path(prefix).unlink(missing_ok=True)
            binary.replace(bin_path(prefix))
        if index.exists():
            index.replace(idx_path(prefix))
        lengths.unlink(missing_ok=True)
        sync_folder(binary.parent)


def _committed_sizes(state: WriterState, dtype: np.dtype) -> tuple[int, int]:
    """Bytes of the .bin and of the lengths file at `state`."""
    return state.tokens * dtype.itemsize, 4 * state.documents


def _partial_files(prefix: str | Path) -> tuple[Path, Path, Path]:
    """Temporary paths of the .bin, the .idx and the sequence lengths."""
    partial = f"{prefix}.partial"
    return bin_path(partial), idx_path(partial), Path(f"{partial}.lengths")
