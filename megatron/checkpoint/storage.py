"""Read and write checkpoint files. Reading never executes a pickle; writing is durable when it returns.

Untrusted torch files are checked before and after `torch.load(weights_only=True)`, which executes no code from the
file, but trusts its sizes: it inflates compressed records, builds `bytearray(10**12)`, and returns sparse, meta and
expanded tensors, whose size in memory differs from that in the file. The format is a zip archive of uncompressed
records: `NAME/data.pkl`, a pickle of protocol 2, and `NAME/data/KEY`, one per storage. A file written before torch 1.6
is a sequence of five pickles and the storages.
"""

import contextlib
import io
import json
import os
import pickle
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from megatron.utils.errors import UserError, first_line, is_library_error
from megatron.utils.files import open_file, read_file, write_atomically

# Largest manifest, config.json or index of a checkpoint. The parsed objects take about 10 times as much memory.
JSON_LIMIT = 16 << 20

_NO_NAME = re.compile("(?!)")


class CheckpointError(UserError):
    """A checkpoint cannot be read or written. The message names the file and says how to fix it."""


class FileRecord(NamedTuple):
    """Size in bytes and CRC-32 of a file's contents."""

    size: int
    crc32: int


class _ChecksumWriter:
    """A binary file that records the size and CRC-32 of everything written to it."""

    def __init__(self, handle: BinaryIO):
        self._handle = handle
        self.size = self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += memoryview(data).nbytes
        try:
            return self._handle.write(data)
        except OSError as error:
            self.error = error  # torch.save raises its own RuntimeError instead
            raise

    def flush(self) -> None:
        self._handle.flush()


def save_file(
    path: str | Path, value: Any, *, zip_checksums: bool = True, sync: Callable[[int], object] = os.fsync
) -> FileRecord:
    """`torch.save`, flushed to disk. Raises OSError or RuntimeError if the file cannot be written.

    Args:
        zip_checksums: False omits the checksums inside the zip archive, which take half of torch.save's time.
            torch.load does not check them.
        sync: called with the file descriptor to flush it to disk. To flush later, duplicate the descriptor.
    """
    zip_checksums_before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(zip_checksums)
    try:
        with open(path, "wb") as handle:
            writer = _ChecksumWriter(handle)
            try:
                torch.save(value, writer)  # type: ignore[arg-type]  # it needs write and flush only
            except RuntimeError as error:
                raise writer.error or error from error
            handle.flush()
            sync(handle.fileno())
    finally:
        torch.serialization.set_crc32_options(zip_checksums_before)
    return FileRecord(writer.size, writer.crc32)


def file_record(path: str | Path, chunk_size: int = 1 << 22) -> FileRecord:
    """Size and CRC-32 of a file on disk. Raises UserError or OSError if it cannot be read."""
    size = crc32 = 0
    with open_file(path) as handle:
        buffer = bytearray(chunk_size)
        view = memoryview(buffer)
        while count := handle.readinto(buffer):
            crc32 = zlib.crc32(view[:count], crc32)
            size += count
    return FileRecord(size, crc32)


def load_tensors(path: str | Path) -> Any:
    """Load a file of tensors and plain Python values to the CPU. Raises CheckpointError as `load_file` does.

    The tensors are memory-mapped, so that only those that are used are read. Do not write to them.
    """
    return _load(path, [])


def load_file(path: str | Path) -> Any:
    """Load a file of tensors, plain Python values and a fixed set of data classes (NumPy arrays, DeepSpeed's loss
    scalers) to the CPU, as `load_tensors` does.

    Raises CheckpointError if the file is missing, damaged, or contains any other object.
    """
    reconstruct = np._core.multiarray._reconstruct  # type: ignore[attr-defined]  # private, named in pickles
    # A pickled NumPy random state, under the names of NumPy 1 and 2.
    allowed: list[Any] = [np.ndarray, np.dtype, reconstruct, (reconstruct, "numpy.core.multiarray._reconstruct")]
    allowed += [type(np.dtype(name)) for name in ("uint32", "uint64", "int64", "float64")]
    try:
        return _load(path, allowed)
    except CheckpointError as error:
        if "contains deepspeed." not in str(error):
            raise
    # Data classes in the optimizer state of checkpoints that DeepSpeed wrote. None of them runs code when built.
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return _load(path, [*allowed, LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])


def _load(path: str | Path, allowed: list[Any]) -> Any:
    names = set()
    for item in allowed:
        names.add(item[1] if isinstance(item, tuple) else f"{item.__module__}.{item.__qualname__}")
    with _errors_of(path):
        with open_file(path) as stream:
            check_file(stream, frozenset(names))
            mapped = is_zip(stream)
        with torch.serialization.safe_globals(allowed):
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        check_tensors(value)
        return value


def read_weights(
    path: Path, ignored: re.Pattern[str] = _NO_NAME, any_dtype: re.Pattern[str] = _NO_NAME
) -> dict[str, Tensor]:
    """Tensor name -> tensor of a floating-point dtype, from a torch or .safetensors file.

    Tensors of a torch file are memory-mapped. Omits names that match `ignored`. Names that match `any_dtype` need not
    be floating-point. Raises CheckpointError if the file is missing, damaged or contains anything else.
    """
    if path.suffix == ".safetensors":
        with _errors_of(path):
            open_file(path).close()
            state: Any = safetensors.torch.load_file(path)
    else:
        state = load_tensors(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: contains a {type(state).__name__} instead of named tensors")
    weights = {name: tensor for name, tensor in state.items() if not ignored.fullmatch(str(name))}
    with _errors_of(path):
        check_weights(weights, any_dtype)
    return weights


@contextlib.contextmanager
def _errors_of(path: str | Path) -> Iterator[None]:
    """Turn every error that a damaged file can cause into a one-line CheckpointError."""
    try:
        yield
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CheckpointError(f"{path}: no such file; the checkpoint is incomplete") from error
        raise CheckpointError(str(error)) from error
    except RejectedFile as error:
        raise CheckpointError(f"{path}: rejected because it {error}") from error
    except pickle.UnpicklingError as error:
        # torch's own message advises weights_only=False, which would execute the file.
        raise CheckpointError(
            f"{path}: rejected because it is damaged or contains objects other than tensors and plain Python values"
        ) from error
    except BaseException as error:  # damaged data can make the unpickler raise anything
        if not is_library_error(error):
            raise
        reason = next((line for line in str(error).splitlines() if line and "weights_only" not in line), "")
        raise CheckpointError(
            f"{path}: cannot be read, the file is damaged ({reason or type(error).__name__})"
        ) from error


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if the file is missing, too large, or is not a JSON object."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError(f"one of these keys appears twice: {', '.join(map(repr, values))[:80]}")
        return values

    try:
        value = json.loads(read_file(path, limit), object_pairs_hook=without_duplicates)
    except UserError as error:
        raise CheckpointError(str(error)) from error
    except ValueError as error:
        problem = first_line(error).partition("; use sys.")[0]  # advice to Python programmers about long numbers
        raise CheckpointError(f"{path}: is not valid JSON ({problem})") from error
    except RecursionError as error:
        raise CheckpointError(f"{path}: is nested too deeply") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return value


def write_json(path: str | Path, value: Any) -> None:
    """Write atomically. Raises UserError if the file cannot be written."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


# An object in memory is up to 80 times larger than its opcode. Our pickles have about 1 KB per parameter.
PICKLE_LIMIT = 4 << 20
# A record in memory is up to 13 times larger than its entry in the zip directory.
DIRECTORY_LIMIT = 16 << 20

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_REBUILD = ("tensor_v2", "tensor_v3", "parameter", "sparse_tensor", "meta_tensor_no_storage")
GLOBALS = frozenset(
    {
        *(f"torch._utils._rebuild_{kind}" for kind in _REBUILD),
        *(f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
        *(f"{storage.__module__}.{storage.__name__}" for storage in torch._storage_classes),
        *("collections.OrderedDict", "torch.Size", "torch.device", "torch.serialization._get_layout"),
        *("__builtin__.set", "builtins.set", "_codecs.encode"),
    }
)


class RejectedFile(ValueError):
    """Why a file is not loaded. The message completes the sentence "rejected because it ..."."""


def is_zip(stream: BinaryIO) -> bool:
    """Whether torch.load reads the file as a zip archive."""
    stream.seek(0)
    return stream.read(4) == b"PK\3\4"


def check_file(stream: BinaryIO, allowed: frozenset[str] = frozenset()) -> None:
    """Check sizes, records and the names in the pickle. Raises RejectedFile, or ValueError for a damaged file.

    allowed: classes (as module.name) besides tensors and plain Python values.
    """
    if is_zip(stream):
        _check_pickle(io.BytesIO(_pickle_in_zip(stream)), allowed)
        return
    stream.seek(0)
    start = io.BytesIO(stream.read(PICKLE_LIMIT))
    for _ in range(5):
        _check_pickle(start, allowed)


def _check_pickle(stream: BinaryIO, allowed: frozenset[str]) -> None:
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "GLOBAL":
            name = str(argument).replace(" ", ".", 1)
            if name not in GLOBALS and name not in allowed:
                raise RejectedFile(f"contains {name}; only tensors and plain Python values are loaded")
        elif opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
            raise RejectedFile("contains objects other than tensors and plain Python values")


def _pickle_in_zip(stream: BinaryIO) -> bytes:
    """The contents of data.pkl. Raises RejectedFile for records that torch.save does not write."""
    check_zip_directory(stream)
    with zipfile.ZipFile(stream) as archive:
        records = archive.infolist()
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
            raise RejectedFile(f"has the compressed record {record.filename}; torch.save does not compress")
    # torch ignores the case of names.
    if len({record.filename.lower() for record in records}) != len(records):
        raise RejectedFile("has two records with the same name")
    folder = records[0].filename.partition("/")[0] if records else ""
    pickled = next((record for record in records if record.filename == f"{folder}/data.pkl"), None)
    if pickled is None:
        raise RejectedFile("has no record data.pkl")
    if pickled.file_size > PICKLE_LIMIT:
        raise RejectedFile(f"has a record data.pkl of {pickled.file_size:,} bytes; the limit is {PICKLE_LIMIT:,}")
    # Not archive.read: the record's checksum may have been left out (see `save_file`).
    stream.seek(pickled.header_offset + 26)
    name_size, extra_size = struct.unpack("<HH", stream.read(4))
    stream.seek(name_size + extra_size, io.SEEK_CUR)
    return stream.read(pickled.file_size)


def check_zip_directory(stream: BinaryIO) -> None:
    """Check that the directory of a zip file is small, and that every reader finds the same one. Raises RejectedFile.

    Format: APPNOTE.TXT of PKWARE, sections 4.3.14 to 4.3.16.
    """
    length = stream.seek(0, io.SEEK_END)
    stream.seek(max(0, length - (1 << 17)))
    tail = stream.read()
    start = length - len(tail)
    end = tail.rfind(b"PK\5\6")
    if end < 0 or end + 22 > len(tail):
        raise RejectedFile("is not a complete zip archive")
    size, offset, comment = struct.unpack("<IIH", tail[end + 12 : end + 22])
    expected_end = start + end
    if tail[end - 20 : end - 16] == b"PK\6\7" and end >= 76:  # zip64
        record = tail[end - 76 : end - 20]
        if record[:4] != b"PK\6\6" or struct.unpack("<Q", tail[end - 12 : end - 4])[0] != expected_end - 76:
            raise RejectedFile("has an ambiguous zip directory")
        size, offset = struct.unpack("<QQ", record[40:56])
        expected_end -= 76
    if end + 22 + comment != len(tail) or offset + size != expected_end:
        raise RejectedFile("has an ambiguous zip directory")
    if size > DIRECTORY_LIMIT:
        raise RejectedFile(f"has a zip directory of {size:,} bytes; the limit is {DIRECTORY_LIMIT:,}")


def check_tensors(value: Any) -> None:
    """Check that all tensors in nested containers are dense and lie within their storage. Raises RejectedFile."""
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Tensor):
            check_dense(name or "the tensor", value)
        elif isinstance(value, Mapping | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            prefix = f"{name}." if name else ""
            pending += [(f"{prefix}{key}", item) for key, item in items]


def check_dense(name: str, tensor: Tensor) -> None:
    """Raises RejectedFile unless the tensor is a dense CPU tensor with all its elements in its storage."""
    kind = str(tensor.layout) if tensor.layout != torch.strided else tensor.device.type
    if kind != "cpu":
        raise RejectedFile(f"has {name}, a {kind.removeprefix('torch.')} tensor of {tensor.dtype}; save dense tensors")
    if tensor.is_quantized or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise RejectedFile(f"has {name} of {tensor.dtype}, whose {tensor.numel():,} elements are not in the file")


def check_weights(tensors: Mapping[Any, Any], any_dtype: re.Pattern[str]) -> None:
    """Check that all values are dense tensors of a floating-point dtype that models use, except those whose names match
    `any_dtype`, and all keys are names. Raises RejectedFile.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise RejectedFile(f"has a tensor whose name is a {type(name).__name__}, not a string")
        if not isinstance(tensor, Tensor):
            raise RejectedFile(f"has {name} of type {type(tensor).__name__}, not a tensor")
        check_dense(name, tensor)
        if tensor.dtype not in WEIGHT_DTYPES and not any_dtype.fullmatch(name):
            raise RejectedFile(f"has {name} of {tensor.dtype}; weights are float32, bfloat16, float16 or float64")
