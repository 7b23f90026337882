"""Checkpoint files. Reading never executes a pickle; writing is durable when it returns."""

import contextlib
import json
import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from megatron.utils.errors import UserError, first_line, is_library_error
from megatron.utils.files import open_file, read_file, write_atomically

# Largest manifest, config.json or index of a checkpoint. The parsed objects take about 10 times as
# much memory.
JSON_LIMIT = 16 << 20

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

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
    path: str | Path,
    value: Any,
    *,
    zip_checksums: bool = True,
    sync: Callable[[int], object] = os.fsync,
) -> FileRecord:
    """`torch.save`, flushed to disk. Raises OSError or RuntimeError if the file cannot be written.

    Args:
        zip_checksums: False omits the checksums inside the zip archive, which take half of
            torch.save's time. torch.load does not check them.
        sync: called with the file descriptor to flush it to disk. To flush later, duplicate the
            descriptor.
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


def file_record(path: str | Path) -> FileRecord:
    """Size and CRC-32 of a file on disk. Raises UserError or OSError if it cannot be read."""
    size = crc32 = 0
    with open_file(path) as handle:
        while chunk := handle.read(1 << 22):
            crc32 = zlib.crc32(chunk, crc32)
            size += len(chunk)
    return FileRecord(size, crc32)


def load_tensors(path: str | Path) -> Any:
    """Load a file of tensors and plain Python values to the CPU. Raises CheckpointError as
    `load_file` does.

    The tensors are memory-mapped, so that only those that are used are read. Do not write to them.
    """
    return _load(path, [])


def load_file(path: str | Path) -> Any:
    """Load a file of tensors, plain Python values and a fixed set of data classes (NumPy arrays,
    DeepSpeed's loss scalers) to the CPU, as `load_tensors` does.

    Raises CheckpointError if the file is missing, damaged, or contains any other object.
    """
    # Pickles name this private function.
    reconstruct = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    # A pickled NumPy random state, under the names of NumPy 1 and 2.
    allowed: list[Any] = [
        np.ndarray,
        np.dtype,
        reconstruct,
        (reconstruct, "numpy.core.multiarray._reconstruct"),
    ]
    allowed += [type(np.dtype(name)) for name in ("uint32", "uint64", "int64", "float64")]
    try:
        return _load(path, allowed)
    except CheckpointError as error:
        if "contains deepspeed." not in str(error):
            raise
    # Data classes in the optimizer state of checkpoints that DeepSpeed wrote. None of them runs
    # code when built.
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return _load(path, [*allowed, LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])


def _load(path: str | Path, allowed: list[Any]) -> Any:
    with _errors_of(path):
        with open_file(path) as stream:
            is_zip = stream.read(4) == b"PK\3\4"  # files of torch 1.5 and earlier cannot be mapped
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def read_weights(path: Path, ignored: re.Pattern[str] = _NO_NAME) -> dict[str, Tensor]:
    """Tensor name -> tensor of a floating-point dtype, from a torch or .safetensors file.

    Tensors of a torch file are memory-mapped. Omits names that match `ignored`. Raises
    CheckpointError if the file is missing, damaged or contains anything else.
    """
    if path.suffix == ".safetensors":
        with _errors_of(path):
            open_file(path).close()
            state: Any = safetensors.torch.load_file(path)
    else:
        state = load_tensors(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: contains a {type(state).__name__} instead of named tensors")
    weights = {}
    for key, tensor in state.items():
        name = str(key)
        if ignored.fullmatch(name):
            continue
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{path}: has {name} of type {type(tensor).__name__}, not a tensor"
            )
        if tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{path}: has {name} of {tensor.dtype}; weights are float32, bfloat16, float16 or "
                "float64"
            )
        weights[name] = tensor
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
    except pickle.UnpicklingError as error:
        # torch's own message advises weights_only=False, which would execute the file.
        content = "is damaged or contains other objects"
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            content = f"contains {found[1]}"
        raise CheckpointError(
            f"{path}: rejected because it {content}; only tensors and plain Python values are "
            "loaded"
        ) from error
    except BaseException as error:  # damaged data can make the unpickler raise anything
        if not is_library_error(error):
            raise
        lines = (line for line in str(error).splitlines() if line and "weights_only" not in line)
        reason = next(lines, type(error).__name__)
        raise CheckpointError(f"{path}: cannot be read, the file is damaged ({reason})") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if it is missing, too large, or invalid."""
    try:
        value = json.loads(read_file(path, JSON_LIMIT))
    except UserError as error:
        raise CheckpointError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({first_line(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return value


def write_json(path: str | Path, value: Any) -> None:
    """Write atomically. Raises UserError if the file cannot be written."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())
