"""The `.bin/.idx` format of Megatron's IndexedDataset: sizes, names and a thorough check.

`PREFIX.bin` holds token ids, sequence after sequence. `PREFIX.idx`, all little-endian:

    9 bytes   "MMIDIDX" and two NULs
    uint64    version, 1
    uint8     code of the ids' type
    uint64    number of sequences S
    uint64    number of entries in the document index D
    int32[S]  tokens in each sequence
    int64[S]  byte offset of each sequence in the .bin
    int64[D]  document index: first sequence of each document, and S at the end

Preprocessing makes each document one sequence. This file needs NumPy alone.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.utils.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

# Code in the header -> type of the ids. Codes 6 and 7 are floating-point types, which hold no token ids.
ID_TYPES = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    8: np.dtype(np.uint16),
}
ID_TYPE_CODES = {dtype: code for code, dtype in ID_TYPES.items()}

# The arrays of an .idx are looked at in pieces: the whole Pile has 200 million documents.
_SEQUENCES_AT_ONCE = 1 << 20

HOW_TO_MAKE = "make it with prepare_data.py or tools/datasets/preprocess_data.py"


def id_type_for(vocab_size: int) -> np.dtype:
    """The type Megatron stores ids of a vocabulary in: uint16 where it fits with some room, else int32."""
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


@dataclass(frozen=True)
class IndexedFiles:
    """A `.bin/.idx` pair that passed `check_indexed_files`.

    Attributes:
        lengths: int32 [sequences], tokens in each sequence; a view of the mapped .idx.
        document_index: int64 [documents + 1], first sequence of each document, and the number of sequences.
    """

    prefix: str
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

    def map_tokens(self) -> np.ndarray:
        """All ids as one read-only memory map, [tokens]."""
        return np.memmap(bin_path(self.prefix), dtype=self.dtype, mode="r", shape=(self.tokens,))

    def offsets(self) -> np.ndarray:
        """int64 [sequences + 1]: first token of each sequence in `map_tokens`, and the number of tokens."""
        return np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))


def check_indexed_files(prefix: str | Path) -> IndexedFiles:
    """Check that `prefix` names a whole `.bin/.idx` pair that belongs together and holds tokens.

    The .idx is read whole; of the .bin only its size is looked at.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    if is_remote(prefix):
        raise UserError(f"{prefix} is on an object store, from where training alone reads; copy its .bin and .idx here")
    binary, index = bin_path(prefix), idx_path(prefix)
    _check_present(prefix, binary, index)
    return IndexedFiles(str(prefix), *check_index(index, str(binary), binary.stat().st_size))


def is_remote(prefix: str | Path) -> bool:
    return "://" in str(prefix)


def check_index(index: Path, binary: str, binary_size: int) -> tuple[np.dtype, np.ndarray, np.ndarray, int]:
    """Check an .idx in itself and against the size in bytes of its .bin, which may be elsewhere.

    Returns:
        the dtype, lengths, document_index and tokens of IndexedFiles.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    dtype, sequences, entries = _read_header(index)
    raw = np.memmap(index, dtype=np.uint8, mode="r")
    lengths_at = HEADER.size
    pointers_at = lengths_at + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    end = documents_at + 8 * entries
    # megatron-core appends one int8 mode per sequence to multimodal files; text files have none.
    if raw.size not in (end, end + sequences):
        state = "truncated" if raw.size < end else "damaged"
        raise UserError(
            f"{index} is {state}: its header announces {sequences:,} sequences and {entries:,} document entries, "
            f"so {end:,} bytes, but it has {raw.size:,}; {HOW_TO_MAKE} again"
        )
    lengths = raw[lengths_at:pointers_at].view("<i4")
    pointers = raw[pointers_at:documents_at].view("<i8")
    document_index = raw[documents_at:end].view("<i8")
    tokens = _check_contents(index, dtype, lengths, pointers, document_index)
    _check_bin_size(binary, binary_size, index, tokens * dtype.itemsize)
    if tokens == 0:
        raise UserError(
            f"{binary.removesuffix('.bin')} is empty: its .idx lists {sequences:,} sequences without a single token"
        )
    return dtype, lengths, document_index, tokens


def _check_present(prefix: str | Path, binary: Path, index: Path) -> None:
    missing = [path for path in (binary, index) if not path.is_file()]
    if not missing:
        return
    if str(prefix).endswith((".bin", ".idx")):
        hint = f"give the prefix without the ending: {str(prefix)[:-4]}"
    elif len(missing) == 1:
        hint = f"the other file of the pair is there, so making it was interrupted; {HOW_TO_MAKE} again"
    else:
        near = sorted(path.stem for path in binary.parent.glob("*.idx") if not path.stem.endswith(".partial"))[:5]
        hint = f"in that folder there is: {', '.join(near)}" if near else HOW_TO_MAKE
    raise UserError(f"no data at {prefix}: {' and '.join(str(path) for path in missing)} missing; {hint}")


def _read_header(index: Path) -> tuple[np.dtype, int, int]:
    with open(index, "rb") as stream:
        header = stream.read(HEADER.size)
    if not header.startswith(MAGIC[: len(header)]) or not header:
        raise UserError(f"{index} is not a Megatron index: it does not begin with MMIDIDX; {HOW_TO_MAKE}")
    if len(header) < HEADER.size:
        raise UserError(f"{index} is truncated: {len(header)} bytes, shorter than its header; {HOW_TO_MAKE} again")
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != VERSION:
        raise UserError(f"{index} has format version {version}; only version {VERSION} exists for this format")
    if code not in ID_TYPES:
        known = ", ".join(f"{number} {dtype}" for number, dtype in ID_TYPES.items())
        raise UserError(f"{index} has id type code {code}, which stands for no integer type (known: {known})")
    return ID_TYPES[code], sequences, entries


def _check_contents(
    index: Path, dtype: np.dtype, lengths: np.ndarray, pointers: np.ndarray, document_index: np.ndarray
) -> int:
    """Check the three arrays against each other; return the number of tokens."""
    tokens = 0
    for start in range(0, len(lengths), _SEQUENCES_AT_ONCE):
        some = lengths[start : start + _SEQUENCES_AT_ONCE]
        if int(some.min()) < 0:
            raise UserError(f"{index} is damaged: a sequence has {int(some.min())} tokens; {HOW_TO_MAKE} again")
        ends = tokens + np.cumsum(some, dtype=np.int64)
        if not np.array_equal(pointers[start : start + len(some)], (ends - some) * dtype.itemsize):
            raise UserError(f"{index} is damaged: its sequence offsets do not add up; {HOW_TO_MAKE} again")
        tokens = int(ends[-1])
    whole = len(document_index) > 0 and document_index[0] == 0 and document_index[-1] == len(lengths)
    for start in range(0, len(document_index), _SEQUENCES_AT_ONCE):
        some = document_index[start : start + _SEQUENCES_AT_ONCE + 1]
        whole = whole and bool(np.all(some[1:] >= some[:-1]))
    if not whole:
        raise UserError(f"{index} is damaged: its document index does not cover the sequences; {HOW_TO_MAKE} again")
    return tokens


def _check_bin_size(binary: str, size: int, index: Path, expected: int) -> None:
    if size == expected:
        return
    if size < expected:
        what = f"{binary} is truncated (or {index.name} belongs to another file)"
    else:
        what = f"{index} belongs to another file (or was made from a part of {Path(binary).name})"
    raise UserError(f"{what}: the .idx describes {expected:,} bytes, the .bin has {size:,}; {HOW_TO_MAKE} again")
