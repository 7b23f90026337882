"""Reading and writing checkpoint files: no pickle is executed, and no file is seen half-written."""

import contextlib
import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from megatron.config import UserError
from megatron.utils.files import write_atomically


class CheckpointError(UserError):
    """A checkpoint cannot be read or written; the message names the file and what to do."""


def _deepspeed_globals() -> list[Any]:
    """Classes that the states of DeepSpeed's optimizers hold beside tensors and plain values, in files that others
    wrote: all are data, none runs code when built.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def _numpy_globals() -> list[Any]:
    """What a pickled NumPy random state is made of, under the names of NumPy 1 and 2."""
    reconstruct = np._core.multiarray._reconstruct
    dtype_classes = [type(np.dtype(name)) for name in ("uint32", "uint64", "int64", "float64")]
    return [np.ndarray, np.dtype, reconstruct, (reconstruct, "numpy.core.multiarray._reconstruct"), *dtype_classes]


@dataclass(frozen=True)
class FileRecord:
    """What is known of a file that was written: its size in bytes and the CRC-32 of its contents."""

    size: int
    crc32: int


class _Recorded:
    """A binary file that counts and sums up what is written to it."""

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
            self.error = error  # torch.save raises another in its place
            raise

    def flush(self) -> None:
        self._handle.flush()


def save_file(
    path: str | Path, value: Any, *, zip_checksums: bool = True, sync: Callable[[int], object] = os.fsync
) -> FileRecord:
    """`torch.save`, on the disk when it returns. Raises OSError or RuntimeError when it cannot be written.

    zip_checksums: False leaves out the checksums that torch.save puts into its zip archive, and takes half of its time
    with them: for files that nothing but torch.load is meant to read, which does not look at them. sync: is given the
    file's descriptor to send it to the disk, and may do so later, on a duplicate.
    """
    with open(path, "wb") as handle, _zip_checksums(zip_checksums):
        recorded = _Recorded(handle)
        try:
            torch.save(value, recorded)
        except RuntimeError as error:
            raise recorded.error or error from error
        handle.flush()
        sync(handle.fileno())
    return FileRecord(recorded.size, recorded.crc32)


@contextlib.contextmanager
def _zip_checksums(wanted: bool) -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(wanted)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def record_of(path: str | Path, chunk: int = 1 << 22) -> FileRecord:
    """Size and checksum of a file as it is on the disk. Raises OSError when it cannot be read."""
    size = crc32 = 0
    with open(path, "rb", buffering=0) as handle:
        buffer = bytearray(chunk)
        view = memoryview(buffer)
        while count := handle.readinto(buffer):
            crc32 = zlib.crc32(view[:count], crc32)
            size += count
    return FileRecord(size, crc32)


def load_tensors(path: str | Path, *, mapped: bool = False) -> Any:
    """`torch.load`, to the CPU, of a file of tensors and plain values. Raises as `load_file` does.

    mapped: the tensors stay in the file until they are read, so that what is not needed is not read; they must not be
    written to.
    """
    return _load(path, [], "cpu", mapped)


def load_file(path: str | Path, *, map_location: Any = "cpu") -> Any:
    """`torch.load` that builds tensors, plain containers and an allow-list of data classes, and nothing else.

    Raises CheckpointError when the file is missing, damaged, or holds anything else.
    """
    try:
        return _load(path, _numpy_globals(), map_location)
    except CheckpointError as error:
        if "GLOBAL deepspeed." not in str(error):
            raise
    return _load(path, _numpy_globals() + _deepspeed_globals(), map_location)


def _load(path: str | Path, allowed: list[Any], map_location: Any, mapped: bool = False) -> Any:
    try:
        with torch.serialization.safe_globals(allowed):
            # Files of torch before 1.6 are no zip archives, and cannot be mapped.
            mapped = mapped and zipfile.is_zipfile(path)
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; the checkpoint is not whole") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: refused, it holds objects other than tensors and plain values ({_first_line(error)})"
        ) from error
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read, the file is damaged ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    text = str(error)
    marker = "Unsupported global: GLOBAL "
    if marker in text:
        return "GLOBAL " + text.split(marker)[1].split()[0]
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


def write_text(path: str | Path, text: str) -> None:
    """Whole or not at all, as `write_atomically`. Raises UserError."""
    write_atomically(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Whole or not at all, as `write_atomically`. Raises UserError."""
    write_text(path, json.dumps(value, indent=2) + "\n")
