"""Checks of an untrusted torch file before and after `torch.load(weights_only=True)`.

torch.load executes no code from the file, but it trusts the file's sizes: it inflates compressed records, builds
`bytearray(10**12)`, and returns sparse, meta and expanded tensors, whose size in memory differs from that in the file.
The format is a zip archive of uncompressed records: `NAME/data.pkl`, a pickle of protocol 2, and `NAME/data/KEY`, one
per storage. A file written before torch 1.6 is a sequence of five pickles and the storages.
"""

import io
import pickletools
import re
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

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
            pending += [(f"{name}.{key}" if name else str(key), item) for key, item in items]


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
