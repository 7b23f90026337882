"""Compressed input files: truncated ones, and those of several frames."""

import gzip
import lzma
import os
import resource
import sys
from pathlib import Path

import pytest
import zstandard

from tests.support.archives import tar_of
from tests.support.corpora import json_lines, read_inputs
from tests.support.errors import assert_rejected

COMPRESSIONS = {".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("fraction", [0.3, 0.995])
def test_truncated_compressed_file(tmp_path, compression, fraction):
    texts = [f"{number * 7919 % 104729:x}" * 50 for number in range(4000)]
    content = COMPRESSIONS[compression](json_lines(*texts))
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(content[: int(len(content) * fraction)])
    assert_rejected(rf"a.jsonl{compression} is (damaged or )?truncated", read_inputs, path)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_an_empty_file_is_not_an_empty_content(tmp_path, compression):
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(COMPRESSIONS[compression](b""))
    assert read_inputs(path) == []
    path.write_bytes(b"")
    assert_rejected(rf"a\.jsonl{compression}", read_inputs, path)


def test_zstandard_is_optional(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"text"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert_rejected(r"a\.txt\.zst", read_inputs, tmp_path / "a.txt.zst")


@pytest.mark.parametrize("window_log", [29, 31])
def test_windows_of_zstandard(tmp_path, window_log):
    """All that `zstd --long` writes; a lack of memory is not reported as damage."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=window_log, hash_log=12, chain_log=12, strategy=1
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    content = compressor.compress(b"text" * 99) + compressor.flush()
    assert zstandard.get_frame_parameters(content).window_size == 1 << window_log
    (tmp_path / "a.txt.zst").write_bytes(content)
    assert read_inputs(tmp_path / "a.txt.zst") == ["text" * 99]
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (1 << 28), before[1])
    )
    try:
        assert_rejected(r"a\.txt\.zst: .*memory.*--long", read_inputs, tmp_path / "a.txt.zst")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_padding_between_xz_streams(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"text") + bytes(8) + lzma.compress(b"more"))
    assert read_inputs(tmp_path / "a.txt.xz") == ["textmore"]


def test_large_blocks_of_compressed_frames(tmp_path):
    """Several concatenated frames, as `cat a.zst b.zst` writes, larger than the buffers."""
    texts = [f"{number} " * 3000 for number in range(400)]
    frames = [
        zstandard.compress(json_lines(*texts[start : start + 100])) for start in range(0, 400, 100)
    ]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert read_inputs(tmp_path / "a.jsonl.zst") == texts


def test_gzip_checksum_of_a_tar_is_verified(tmp_path):
    """The checksum is at the end of the file, after the last member."""
    content = bytearray(gzip.compress(tar_of({"a.jsonl": json_lines("one")})))
    content[-6] ^= 1
    (tmp_path / "a.tar.gz").write_bytes(content)
    assert_rejected(r"a\.tar\.gz.*damaged", read_inputs, tmp_path / "a.tar.gz")
