"""The `.bin/.idx` format of Megatron's IndexedDataset, its validation, and the manifest beside it.

`PREFIX.bin` holds token ids, sequence after sequence. `PREFIX.idx`, all little-endian:

    9 bytes   "MMIDIDX" and two NULs
    uint64    version, 1
    uint8     type code of the token ids
    uint64    number of sequences S
    uint64    number of entries in the document index D
    int32[S]  tokens in each sequence
    int64[S]  byte offset of each sequence in the .bin
    int64[D]  document index: first sequence of each document, followed by S

`PREFIX.json` is the manifest that preprocessing writes. Preprocessing stores each document as one
sequence. This module needs only NumPy and pydantic, because preprocessing workers must not import
torch.
"""

import hashlib
import itertools
import json
import os
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from megatron.utils.errors import UserError, visible
from megatron.utils.files import open_file, read_errors, read_file, write_atomically
from megatron.utils.typed_json import Count

if TYPE_CHECKING:
    from megatron.tokenizer.interface import Tokenizer

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

# Type code in the header -> dtype of the ids. Codes 6 and 7 are floating-point types, which cannot
# hold token ids.
ID_TYPES: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    8: np.dtype(np.uint16),
}
ID_TYPE_CODES = {dtype: code for code, dtype in ID_TYPES.items()}

# The .idx is validated in blocks: the full Pile has 200 million documents.
_VALIDATION_BLOCK = 1 << 20

# Parts of a file that `file_sample` reads. Together they cover files of up to 4 MiB.
_SAMPLES, _SAMPLE_BYTES = 32, 1 << 17
# Bytes of a .bin that is read completely if its manifest has no sample.
_MAX_READ = 1 << 30

_BUILD_COMMANDS = "kerple prepare (prepare_data.py) or tools/datasets/preprocess_data.py"
_REBUILD_HINT = f"rebuild it with {_BUILD_COMMANDS}"


def id_type_for(vocab_size: int) -> np.dtype:
    """The dtype in which Megatron stores ids: uint16 for vocabularies below 65,500, else int32."""
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


@dataclass(frozen=True)
class IndexedFiles:
    """A validated `.bin/.idx` pair.

    Attributes:
        prefix: path without `.bin` and `.idx`.
        manifest: None for data from other software.
        dtype: type of the token ids in the .bin.
        lengths: int32 [sequences], tokens in each sequence; a view of the memory-mapped .idx.
        document_index: int64 [documents + 1], first sequence of each document, followed by the
            number of sequences.
        tokens: number of tokens.
    """

    prefix: str
    manifest: "Manifest | None"
    dtype: np.dtype
    lengths: np.ndarray
    document_index: np.ndarray
    tokens: int

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def documents(self) -> int:
        return len(self.document_index) - 1

    def open_tokens(self, first: int = 0, last: int | None = None) -> "TokenFile":
        """Open the .bin to read the ids of sequences `first` to `last - 1`; by default, of all."""
        start = int(self.lengths[:first].sum(dtype=np.int64))
        tokens = int(self.lengths[first:last].sum(dtype=np.int64))
        return TokenFile(bin_path(self.prefix), self.dtype, start, tokens)

    def offsets(self) -> np.ndarray:
        """The first token of each sequence, then the number of tokens: int64 [sequences + 1]."""
        return np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))


class TokenFile:
    """Token ids in a .bin, [tokens]. Reads the file on each access.

    The file is not memory-mapped: if a mapped file is truncated, reading a page beyond its new end
    kills the process with SIGBUS. Here, it raises a UserError. Each call takes 0.3 us longer.

    Args:
        first: index in the file of the first token.
        tokens: number of tokens.
    """

    def __init__(self, path: str | Path, dtype: np.dtype, first: int, tokens: int):
        self.dtype = dtype
        self._path = path
        self._first = first
        self._tokens = tokens
        with read_errors(path):
            self._stream = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with this object)

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        """Ids of a slice without a step, or at int64 indices >= 0 of any shape, in that shape and
        the file's dtype.
        """
        if isinstance(index, slice):
            start, end, _ = index.indices(self._tokens)
            offset = (self._first + start) * self.dtype.itemsize
            return self.read(self.dtype, max(end - start, 0), offset)

        # Runs of consecutive indices are read at once.
        flat = index.ravel()
        ids = np.empty(len(flat), self.dtype)
        runs = [0, *(np.flatnonzero(np.diff(flat) != 1) + 1).tolist(), len(flat)]
        for start, end in itertools.pairwise(runs):
            if end > start:
                ids[start:end] = self[int(flat[start]) : int(flat[start]) + end - start]
        return ids.reshape(index.shape)

    def read(self, dtype: type | np.dtype, count: int, offset: int) -> np.ndarray:
        """`count` ids from byte `offset` of the file on. The interface of megatron-core's readers.

        Raises UserError if the file has become shorter, or cannot be read.
        """
        # The system may return less than was asked for.
        size = int(count) * np.dtype(dtype).itemsize
        content, position = b"", int(offset)
        try:
            while missing := size - len(content):
                block = os.pread(self._stream.fileno(), missing, position + len(content))
                if not block:
                    raise UserError(
                        f"{self._path} was truncated while it was in use: it ends before byte "
                        f"{position + size:,}; {_REBUILD_HINT}"
                    )
                if content:
                    block = content + block
                content = block
        except OSError as error:
            raise UserError(f"cannot read {self._path}: {error.strerror}") from error
        return np.frombuffer(content, dtype)


def open_indexed_files(prefix: str | Path) -> IndexedFiles:
    """Open a `.bin/.idx` pair and validate it: the whole .idx, the size of the .bin and, if the
    manifest has their hashes, the .idx and parts of the .bin.

    Raises UserError if a file is missing, truncated or damaged, the two do not belong together,
    they are not those that the manifest describes, or there are no tokens.
    """
    # A manifest that cannot be read would hide that the files are others.
    binary, index = find_files(prefix)
    manifest = read_manifest(prefix)
    if manifest is None and os.path.lexists(manifest_path(prefix)):
        raise UserError(
            f"{manifest_path(prefix)} is damaged, or not the manifest of these data: "
            f"{_REBUILD_HINT}. If other software has built them, remove or rename it"
        )
    files = IndexedFiles(str(prefix), manifest, *_validate(index, binary))
    if manifest is not None and (changed := _changed_file(files, manifest)):
        raise changed_file_error(changed, prefix)
    return files


def changed_file_error(changed: Path, prefix: str | Path) -> UserError:
    """The error that a file of a dataset is not the one that its manifest describes."""
    return UserError(
        f"{changed} is not the file that {manifest_path(prefix)} describes: restore the file, or "
        f"{_REBUILD_HINT}. If other software has built these data, remove {manifest_path(prefix)}"
    )


def _changed_file(files: IndexedFiles, manifest: "Manifest") -> Path | None:
    """The .idx or .bin, if it is certainly not the one that the manifest describes."""
    # What costs nothing first. The .bin is too large to read all of it.
    binary, index = bin_path(files.prefix), idx_path(files.prefix)
    described = (manifest.tokens, manifest.documents, manifest.dtype)
    if described != (files.tokens, files.documents, files.dtype.name):
        return index
    if manifest.idx_sha256 is not None and manifest.idx_sha256 != file_sha256(index):
        return index
    if manifest.bin_sample is None:  # of an earlier version
        is_other = files.tokens * files.dtype.itemsize <= _MAX_READ and (
            manifest.sha256 != file_sha256(binary)
        )
    else:
        is_other = manifest.bin_sample != file_sample(binary)
    return binary if is_other else None


def find_files(prefix: str | Path) -> tuple[Path, Path]:
    """The paths of the .bin and .idx of a prefix. Raises UserError if one is missing."""
    # Say what is probably wrong with the prefix.
    binary, index = bin_path(prefix), idx_path(prefix)
    missing = [path for path in (binary, index) if not path.is_file()]
    if missing:
        if str(prefix).endswith((".bin", ".idx")):
            hint = f"give the prefix without the extension: {str(prefix)[:-4]}"
        elif len(missing) == 1:
            hint = f"the other file of the pair exists, so writing was interrupted; {_REBUILD_HINT}"
        else:
            hint = f"build it with {_BUILD_COMMANDS}"
            stems = [path.stem for path in binary.parent.glob("*.idx")]
            nearby = sorted(stem for stem in stems if not stem.endswith(".partial"))
            if nearby:
                hint = f"datasets in that folder: {', '.join(nearby[:5])}"
            if not Path(prefix).is_absolute():
                hint += (
                    ". The path is that of the configuration (with --checkpoint, of the run that "
                    f"saved it), relative to the working folder, {Path.cwd()}; --set "
                    "data-path=PREFIX names another"
                )
        raise UserError(
            f"no data at {prefix}: {' and '.join(str(path) for path in missing)} missing; {hint}"
        )
    return binary, index


def _validate(index: Path, binary: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, int]:
    """Returns dtype, lengths, document_index and tokens of `IndexedFiles`. Raises UserError if the
    .idx is damaged, or the .bin is not the one it describes.
    """
    # The header.
    with open_file(index) as stream:
        header = stream.read(HEADER.size)
    if not header.startswith(MAGIC) or len(header) < HEADER.size:
        raise UserError(
            f"{index} is not a Megatron index (MMIDIDX), or it is truncated; {_REBUILD_HINT}"
        )
    version, code, sequences, entries = (int(field) for field in HEADER.unpack(header)[1:])
    if version != VERSION:
        raise UserError(f"{index} has format version {version}; only version {VERSION} exists")
    if code not in ID_TYPES:
        known = ", ".join(f"{code} {dtype}" for code, dtype in ID_TYPES.items())
        raise UserError(
            f"{index} has id type code {code}, which is not an integer type (known: {known})"
        )
    dtype = ID_TYPES[code]

    # The arrays after it. The header determines their size.
    raw = np.memmap(index, dtype=np.uint8, mode="r")
    lengths_at = HEADER.size
    offsets_at = lengths_at + 4 * sequences
    documents_at = offsets_at + 8 * sequences
    end = documents_at + 8 * entries

    # megatron-core appends one int8 mode per sequence to multimodal files; text files have none.
    if raw.size not in (end, end + sequences):
        problem = "truncated" if raw.size < end else "damaged"
        raise UserError(
            f"{index} is {problem}: its header declares {sequences:,} sequences and {entries:,} "
            f"document entries, which take {end:,} bytes, but it has {raw.size:,}; {_REBUILD_HINT}"
        )
    lengths = raw[lengths_at:offsets_at].view("<i4")
    offsets = raw[offsets_at:documents_at].view("<i8")
    document_index = raw[documents_at:end].view("<i8")

    # Offsets and documents, in blocks, because the arrays can be larger than memory.
    tokens = 0
    for start in range(0, sequences, _VALIDATION_BLOCK):
        block = lengths[start : start + _VALIDATION_BLOCK]
        if int(block.min()) < 0:
            raise UserError(
                f"{index} is damaged: a sequence has {int(block.min())} tokens; {_REBUILD_HINT}"
            )
        ends = tokens + np.cumsum(block, dtype=np.int64)
        if not np.array_equal(offsets[start : start + len(block)], (ends - block) * dtype.itemsize):
            raise UserError(
                f"{index} is damaged: sequence offsets do not match the lengths; {_REBUILD_HINT}"
            )
        tokens = int(ends[-1])
    covers_sequences = entries > 0 and document_index[0] == 0 and document_index[-1] == sequences
    for start in range(0, entries, _VALIDATION_BLOCK):
        block = document_index[start : start + _VALIDATION_BLOCK + 1]
        covers_sequences = covers_sequences and bool(np.all(block[1:] >= block[:-1]))
    if not covers_sequences:
        raise UserError(
            f"{index} is damaged: its document index does not cover the sequences; {_REBUILD_HINT}"
        )

    # The .bin.
    expected_size, binary_size = tokens * dtype.itemsize, binary.stat().st_size
    if binary_size != expected_size:
        raise UserError(
            f"{binary} is truncated, or {index} belongs to another file: the .idx describes "
            f"{expected_size:,} bytes, but the .bin has {binary_size:,}; {_REBUILD_HINT}"
        )
    if tokens == 0:
        raise UserError(
            f"{str(binary)[:-4]} is empty: its .idx lists {sequences:,} sequences and no tokens"
        )
    return dtype, lengths, document_index, tokens


@dataclass(frozen=True)
class Manifest:
    """The content of `PREFIX.json`: what a `.bin/.idx` pair was built from, and counts that are
    expensive to recompute.

    Attributes:
        text_bytes: UTF-8 bytes of the tokenized text (for bits per byte); None if unknown.
        largest_id: largest token id in the .bin.
        sha256: SHA-256 of the .bin, hexadecimal.
        tokenizer: its `tokenizer-type`.
        tokenizer_fingerprint: `Tokenizer.fingerprint`.
        skipped_empty, skipped_bad, skipped_other: documents skipped because they had no text, were
            unreadable, or belonged to another subset of the Pile.
        idx_sha256, bin_sample: `file_sha256` of the .idx and `file_sample` of the .bin, which are
            compared whenever the pair is opened; None in manifests of earlier versions.
        parts: of a merged dataset, the `data_fingerprint` and number of documents of each dataset
            that it consists of, in their order.
    """

    # A key with another name may be a damaged one, without which a check would be left out.
    __pydantic_config__ = ConfigDict(extra="forbid")

    documents: Count
    tokens: Count
    text_bytes: Count | None
    largest_id: Count
    sha256: str
    dtype: str
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: Count
    append_eod: bool
    ftfy: bool
    key: str
    inputs: list[str]
    skipped_empty: Count
    skipped_bad: Count
    skipped_other: Count
    idx_sha256: str | None = None
    bin_sample: str | None = None
    parts: list[tuple[str, Count]] = field(default_factory=list)


_MANIFEST = TypeAdapter(Manifest)


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def write_manifest(prefix: str | Path, manifest: Manifest) -> None:
    write_atomically(
        manifest_path(prefix), (json.dumps(asdict(manifest), indent=2) + "\n").encode()
    )


def read_manifest(prefix: str | Path) -> Manifest | None:
    """Read the manifest of `prefix`. Returns None if it is missing, as for data from other
    software, or unreadable, which `open_indexed_files` rejects.
    """
    try:
        return _MANIFEST.validate_json(read_file(manifest_path(prefix)), strict=True)
    except (UserError, ValueError):
        return None


def data_fingerprint(prefix: str | Path) -> str:
    """64 hexadecimal digits that identify the tokens of a dataset: a SHA-256 of the .idx, the size
    of the .bin, and parts of it. The same with and without a manifest, which has these hashes.

    Raises UserError if a file is missing or unreadable.
    """
    # Reading the manifest is faster than hashing the files.
    binary, index = find_files(prefix)
    manifest = read_manifest(prefix)
    if manifest is not None and manifest.idx_sha256 is not None and manifest.bin_sample is not None:
        of_index, of_binary = manifest.idx_sha256, manifest.bin_sample
    else:
        of_index, of_binary = file_sha256(index), file_sample(binary)
    return hashlib.sha256(f"{of_index} {of_binary}".encode()).hexdigest()


def merged_datasets(files: IndexedFiles) -> list[tuple[str, int]]:
    """The `data_fingerprint` and number of documents of each dataset that a merged one consists of,
    in their order; those of the dataset itself if it is not a merged one.
    """
    if files.manifest is not None and files.manifest.parts:
        return files.manifest.parts
    return [(data_fingerprint(files.prefix), files.sequences)]


def file_sha256(path: str | Path) -> str:
    """The SHA-256 of a file, hexadecimal. Raises UserError if it cannot be read."""
    digest = hashlib.sha256()
    with read_errors(path), open_file(path) as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def file_sample(path: str | Path) -> str:
    """A SHA-256 of the size of a file and of 32 parts of 128 KiB, evenly spread from its first to
    its last byte. Takes milliseconds for a file of any size. Raises UserError if it cannot be read.
    """
    digest = hashlib.sha256()
    with read_errors(path), open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(str(size).encode())
        last_start = max(size - _SAMPLE_BYTES, 0)
        for number in range(_SAMPLES):
            stream.seek(last_start * number // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def check_tokenizer(prefix: str | Path, tokenizer: "Tokenizer") -> Manifest | None:
    """The manifest, if there is one. Raises UserError if its tokenizer is not `tokenizer`."""
    # Without a manifest, the tokenizer of the data is not known.
    manifest = read_manifest(prefix)
    if manifest is not None and manifest.tokenizer_fingerprint != tokenizer.fingerprint:
        of_data = manifest.tokenizer, manifest.vocab_size, manifest.tokenizer_fingerprint
        given = tokenizer.name, tokenizer.vocab_size, tokenizer.fingerprint
        names = []
        for name, size, fingerprint in (of_data, given):
            digits = visible(fingerprint[:12])
            names.append(f"{visible(name[:40])} with {size:,} ids (fingerprint {digits})")
        raise UserError(
            f"{prefix} was tokenized with {' and not with '.join(names)}; set tokenizer-type, "
            "vocab-file and merge-file to the tokenizer of the data, or build the data again with "
            f"{_BUILD_COMMANDS}. If both tokenizers give the same ids, remove "
            f"{manifest_path(prefix)}"
        )
    return manifest
