"""Decompresses gzip, xz and Zstandard streams in limited memory."""

import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from megatron.utils.errors import UserError, import_package

# Bytes read at a time. Chunk boundaries, and with them the meaning of a ReadPosition, depend on it.
BLOCK = 1 << 20
# The largest window of the format, that of `zstd --long=31`, which Reddit's dumps use. Content
# fills it gradually.
_MAX_WINDOW = 1 << 31
# Bytes to decompress at a time. These expand to at most 32 MB, 1 MB and 4 MB.
_ZSTANDARD_BYTES = 1 << 10
_XZ_BYTES = 1 << 7
_GZIP_BYTES = 1 << 12
# The `wbits` of zlib for the format gzip.
_GZIP_FORMAT = 16 + zlib.MAX_WBITS


def decompress(raw: BinaryIO, suffix: str, source: str) -> BinaryIO:
    """Return a stream of the decompressed content, or `raw` if `suffix` names no compression.

    Raises UserError if the package zstandard is not installed and, while reading, if the file is
    empty or truncated, or there is not enough memory. For other damage, reading raises ValueError.
    """
    # Several gzip members or xz streams in a file may have zeros between them.
    if suffix in (".gz", ".tgz"):

        def new_member() -> Any:
            return zlib.decompressobj(_GZIP_FORMAT)

        blocks = _blocks(raw, source, _GZIP_BYTES, new_member, padding=b"\0")
    elif suffix == ".xz":
        blocks = _blocks(raw, source, _XZ_BYTES, lzma.LZMADecompressor, padding=b"\0")
    elif suffix == ".zst":
        zstandard = import_package("zstandard", "data", f"reading {source}")
        new_frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj
        blocks = _blocks(raw, source, _ZSTANDARD_BYTES, new_frame)
    else:
        return raw
    return cast(BinaryIO, io.BufferedReader(_BlockStream(blocks), BLOCK))


def _blocks(
    raw: BinaryIO, source: str, size: int, new_frame: Callable[[], Any], padding: bytes = b""
) -> Iterator[bytes]:
    """Yield the decompressed content of one or several frames, and detect a truncated file.

    zstandard's own reader does not detect it, LZMAFile ignores damage after the first frame, and
    GzipFile reads an empty file as an empty content, whose file has 20 bytes.

    Args:
        size: compressed bytes to read at a time.
        new_frame: makes a decompressor of one frame.
        padding: bytes to skip before a frame.
    """
    frame, is_empty = None, True
    while block := raw.read(size):
        is_empty = False
        while block:
            # Padding precedes a frame.
            if not frame:
                block = block.lstrip(padding)
                if not block:
                    break
                frame = new_frame()
            try:
                content = frame.decompress(block)
            except Exception as error:  # each library has its own
                if isinstance(error, MemoryError) or "not enough memory" in str(error):
                    raise UserError(
                        f"{source}: there is not enough memory to decompress it (up to 2 GiB for "
                        "zstd --long=31)"
                    ) from error
                raise ValueError(str(error)) from error
            yield content
            block = frame.unused_data
            if frame.eof:
                frame = None
    if is_empty:
        raise UserError(f"{source} is empty; even without content, a compressed file is not")
    if frame:
        raise UserError(f"{source} is truncated: its last compressed frame is incomplete")


class _BlockStream(io.RawIOBase):
    """A stream of the bytes in consecutive blocks."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks = blocks
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    # collections.abc.Buffer, the type of the argument, needs Python 3.12.
    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._block:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._block = memoryview(block)
        count = min(len(buffer), len(self._block))
        buffer[:count] = self._block[:count]
        self._block = self._block[count:]
        return count
