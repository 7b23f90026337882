"""Decompression of streams, as they are read: gzip, Zstandard, xz."""

import gzip
import io
import lzma
from typing import BinaryIO

import zstandard

from megatron.utils.errors import UserError

COMPRESSIONS = (".gz", ".zst", ".xz")

_BUFFER = 1 << 20
_COMPRESSED_AT_ONCE = 1 << 17
# Shards packed with `zstd --ultra --long=31` have a window of 2 GiB.
_LARGEST_WINDOW = 1 << 31


def decompressed(raw: BinaryIO, suffix: str, source: str) -> BinaryIO:
    """What `raw` holds, by the ending of its name; `raw` itself if that ending is of no compression.

    Raises:
        UserError: while reading Zstandard: cut off. The other libraries have errors of their own for that.
    """
    if suffix in (".gz", ".tgz"):
        return gzip.GzipFile(fileobj=raw)
    if suffix == ".xz":
        return lzma.LZMAFile(raw)
    if suffix == ".zst":
        return io.BufferedReader(_ZstandardStream(raw, source), _BUFFER)
    return raw


class _ZstandardStream(io.RawIOBase):
    """Decompressed bytes of one or several frames. zstandard's own reader takes a truncated file for a whole one."""

    def __init__(self, raw: BinaryIO, source: str):
        self._raw = raw
        self._source = source
        self._frame = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
        self._frame_begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _fill(self) -> bool:
        """Decompress some more; False at the end of the file."""
        compressed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
            self._frame_begun = False
        if not compressed:
            compressed = self._raw.read(_COMPRESSED_AT_ONCE)
        if not compressed:
            if self._frame_begun:
                raise UserError(f"{self._source} is truncated: its last compressed frame has no end")
            return False
        self._frame_begun = True
        self._ready = memoryview(self._frame.decompress(compressed))
        return True
