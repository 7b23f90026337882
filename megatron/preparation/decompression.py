"""Decompresses gzip, xz and Zstandard streams in limited memory."""

import gzip
import io
import lzma
from collections.abc import Callable
from typing import BinaryIO, Protocol, cast

from megatron.utils.errors import UserError, install_command

# Bytes read at a time. Chunk boundaries, and with them the meaning of a ReadPosition, depend on it.
BLOCK = 1 << 20
# Limit for the window or dictionary of a decompressor: `zstd --long=28`, `xz -9` with a dictionary four times as large.
_MAX_WINDOW = 1 << 28
# 1 kB of Zstandard can expand to 32 MB.
_COMPRESSED_BLOCK = 1 << 10


def decompress(raw: BinaryIO, suffix: str, source: str) -> BinaryIO:
    """Return a stream of the decompressed content, or `raw` itself if `suffix` does not name a compression.

    Raises:
        UserError: for Zstandard, if the package zstandard is not installed; while reading Zstandard or xz, if the file
            is truncated. For other damage, the libraries raise exceptions of their own, and Zstandard ValueError.
    """
    if suffix in (".gz", ".tgz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if suffix == ".xz":
        return cast(BinaryIO, io.BufferedReader(_DecompressedStream(raw, source, _XzFrame), BLOCK))
    if suffix == ".zst":
        try:
            import zstandard  # noqa: F401 (checked here, where the name of the file is known)
        except ImportError as error:
            raise UserError(
                f"reading {source} needs the package zstandard, which is not installed: {install_command('data')}"
            ) from error
        return cast(BinaryIO, io.BufferedReader(_DecompressedStream(raw, source, _ZstdFrame), BLOCK))
    return raw


class _Frame(Protocol):
    """Decompresses one frame. `decompress(b"")` returns more of the output if there is any."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, compressed: bytes) -> bytes: ...


class _ZstdFrame:
    needs_input = True

    def __init__(self) -> None:
        import zstandard

        self._frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
        self._error = zstandard.ZstdError

    def decompress(self, compressed: bytes) -> bytes:
        try:
            return self._frame.decompress(compressed)
        except self._error as error:
            raise ValueError(str(error)) from error

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data


class _XzFrame:
    def __init__(self) -> None:
        self._frame = lzma.LZMADecompressor(memlimit=_MAX_WINDOW + (16 << 20))

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def needs_input(self) -> bool:
        return self._frame.needs_input

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data.lstrip(b"\0")  # padding between frames

    def decompress(self, compressed: bytes) -> bytes:
        return self._frame.decompress(compressed, BLOCK)


class _DecompressedStream(io.RawIOBase):
    """Decompresses one or several frames in limited memory, and detects a truncated file.

    zstandard's own reader does not detect it, and LZMAFile has no memory limit.
    """

    def __init__(self, raw: BinaryIO, source: str, new_frame: Callable[[], _Frame]):
        self._raw = raw
        self._source = source
        self._new_frame = new_frame
        self._frame = new_frame()
        self._frame_has_data = False
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # no Buffer before Python 3.12
        target = memoryview(buffer)
        while not self._output:
            if not self._decompress_block():
                return 0
        count = min(len(target), len(self._output))
        target[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _decompress_block(self) -> bool:
        """Refill the output buffer. Returns False at the end of the file."""
        compressed = b""
        if self._frame.eof:
            compressed = self._frame.unused_data
            self._frame, self._frame_has_data = self._new_frame(), False
        if not compressed and self._frame.needs_input:
            compressed = self._raw.read(_COMPRESSED_BLOCK)
            if not compressed:
                if self._frame_has_data:
                    raise UserError(f"{self._source} is truncated: its last compressed frame is incomplete")
                return False
        self._frame_has_data = True
        self._output = memoryview(self._frame.decompress(compressed))
        return True
