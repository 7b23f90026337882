"""Validation of .bin/.idx files, and manifests."""

import os
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from megatron.data.indexed_dataset import (
    ID_TYPES,
    Manifest,
    bin_path,
    check_tokenizer,
    data_fingerprint,
    file_sample,
    file_sha256,
    id_type_for,
    idx_path,
    manifest_path,
    open_indexed_files,
    read_manifest,
    write_manifest,
)
from megatron.utils.errors import UserError
from tests.support.corpora import manifest_of
from tests.support.errors import assert_rejected


def test_id_types_equal_megatron_cores():
    core_types = {dtype.value: np.dtype(dtype.name) for dtype in DType}
    assert {
        code: dtype for code, dtype in core_types.items() if np.issubdtype(dtype, np.integer)
    } == ID_TYPES
    for size in (1, 65499, 65500, 10**6):
        assert id_type_for(size) == np.dtype(DType.optimal_dtype(size))


def test_several_sequences_per_document(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
    builder.add_document(torch.arange(7), [3, 4])
    builder.add_document(torch.arange(2), [2])
    builder.finalize(str(tmp_path / "a.idx"))
    files = open_indexed_files(tmp_path / "a")
    assert (files.documents, files.sequences, files.tokens) == (2, 3, 9)
    assert files.offsets().tolist() == [0, 3, 7, 9]


@pytest.fixture
def pair(tmp_path, write_corpus):
    write_corpus(tmp_path / "pair", [5, 6, 7])
    return tmp_path / "pair"


def test_missing_and_empty_files(tmp_path, pair):
    assert_rejected(r"absent\.bin.*absent\.idx", open_indexed_files, tmp_path / "absent")
    assert_rejected(
        r"tools/datasets/preprocess_data\.py", open_indexed_files, tmp_path / "nowhere" / "absent"
    )
    assert_rejected("--set.*data-path=PREFIX", open_indexed_files, "nowhere/absent")
    assert_rejected(
        r"give the prefix without the extension: .*pair$", open_indexed_files, f"{pair}.bin"
    )
    pair.with_suffix(".bin").rename(tmp_path / "other.bin")
    assert_rejected(r"pair\.bin missing", open_indexed_files, pair)
    assert_rejected(r"other\.idx missing", open_indexed_files, tmp_path / "other")
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"))
    builder.finalize(str(tmp_path / "a.idx"))
    assert_rejected(r"a is empty: .* 0 sequences and no tokens", open_indexed_files, tmp_path / "a")


@pytest.mark.parametrize(
    ("suffix", "offset", "content", "message"),
    [
        (".idx", 0, b"PK", "is not a Megatron index"),
        (".idx", 9, struct.pack("<Q", 2), "has format version 2"),
        (".idx", 17, b"\x06", "id type code 6, which is not an integer type"),
        (".idx", 17, b"\x04", "sequence offsets do not match the lengths"),
        (".idx", 34, struct.pack("<i", -5), "a sequence has -5 tokens"),
        (".idx", 34, struct.pack("<ii", 6, 5), "sequence offsets do not match the lengths"),
        (".idx", 70, struct.pack("<q", 1), "its document index does not cover the sequences"),
        (".idx", 78, struct.pack("<qq", 2, 1), "document index does not cover the sequences"),
        (".idx", 94, struct.pack("<q", 2), "its document index does not cover the sequences"),
        (".idx", 4, None, r"pair\.idx"),
        (".idx", 40, None, r"pair\.idx"),
        (".idx", 102, b"\0", r"pair\.idx is damaged"),
        (".bin", 30, None, r"pair\.bin.*36.*30"),
        (".bin", 36, b"\0\0", r"pair\.bin.*pair\.idx.*36.*38"),
    ],
)
def test_damaged_files(pair, suffix, offset, content, message, monkeypatch):
    """Bytes are replaced or added, or the file ends before them."""
    monkeypatch.setattr("megatron.data.indexed_dataset._VALIDATION_BLOCK", 1)
    open_indexed_files(pair)
    with open(f"{pair}{suffix}", "r+b") as stream:
        stream.seek(offset)
        if content is None:
            stream.truncate()
        else:
            stream.write(content)
    assert_rejected(message, open_indexed_files, pair)


# --- manifests


def test_the_tokenizer_of_the_manifest(pair, write_corpus, tokenizer):
    assert not check_tokenizer(pair, tokenizer)  # no manifest
    manifest = manifest_of(open_indexed_files(pair), 1234)
    write_manifest(pair, manifest)
    fingerprint = tokenizer.fingerprint[:12]
    message = rf"with 2,000 ids .* with 600 ids .*{fingerprint}.*tokenizer-type.*kerple prepare"
    message += rf".*same ids, remove {pair}\.json$"
    assert_rejected(message, check_tokenizer, pair, tokenizer)
    write_manifest(pair, replace(manifest, tokenizer_fingerprint=tokenizer.fingerprint))
    assert check_tokenizer(pair, tokenizer)
    manifest_path(pair).write_bytes(manifest_path(pair).read_bytes()[:20])
    assert not check_tokenizer(pair, tokenizer)


def test_a_damaged_manifest_is_rejected(pair):
    assert read_manifest(pair) is None
    manifest = manifest_of(open_indexed_files(pair), 1234)
    write_manifest(pair, manifest)
    assert read_manifest(pair) == manifest
    valid = manifest_path(pair).read_bytes()
    for damaged in (
        b'{"documents": 3}',
        b"[" * 10**5,
        b"\xff",
        valid.replace(b'"tokens": 18', b'"tokens": "18"'),
    ):
        assert damaged != valid
        manifest_path(pair).write_bytes(damaged)
        assert read_manifest(pair) is None
        assert_rejected(r"pair\.json", open_indexed_files, pair)
    manifest_path(pair).unlink()
    open_indexed_files(pair)
    os.mkfifo(manifest_path(pair))
    assert read_manifest(pair) is None
    assert_rejected(r"pair\.json", open_indexed_files, pair)


def test_token_file(corpus):
    """Slices and indices of any shape, of the whole file and of a part, against the file read at
    once.
    """
    files = open_indexed_files(corpus)
    expected = np.fromfile(f"{corpus}.bin", files.dtype)
    offsets = files.offsets()
    for first, last in ((0, None), (3, 50), (7, 7)):
        tokens = files.open_tokens(first, last)
        part = expected[offsets[first] : offsets[files.sequences if last is None else last]]
        assert len(tokens) == len(part)
        for index in (
            slice(None),
            slice(5, 90),
            slice(-3, None),
            slice(9, 4),
            slice(10**12, 10**13),
        ):
            assert tokens[index].tolist() == part[index].tolist()
        generator = np.random.default_rng(0)
        for shape in ((0,), (1,), (40,), (4, 10)) if len(part) else ((0,),):
            index = generator.integers(0, max(len(part), 1), shape)
            index[..., 1:] = index[..., :1] if shape == (4, 10) else index[..., 1:]
            assert tokens[index].tolist() == part[index].tolist()
    assert (
        files.open_tokens()[np.arange(12).reshape(3, 4)].tolist()
        == expected[:12].reshape(3, 4).tolist()
    )


def test_truncated_while_in_use(corpus):
    tokens = open_indexed_files(corpus).open_tokens()
    os.truncate(f"{corpus}.bin", 100)
    assert len(tokens[:50]) == 50
    with pytest.raises(UserError, match=r"corpus\.bin.*102"):
        tokens[49:51]
    with pytest.raises(UserError, match="was truncated"):
        tokens[np.array([[0, 60]])]


# --- contents


def with_hashes(prefix) -> Manifest:
    """A manifest with the hashes of the files."""
    manifest = manifest_of(open_indexed_files(prefix), 999)
    hashes = {
        "idx_sha256": file_sha256(idx_path(prefix)),
        "bin_sample": file_sample(bin_path(prefix)),
    }
    return replace(manifest, sha256=file_sha256(bin_path(prefix)), **hashes)


def test_files_that_the_manifest_does_not_describe(pair, tmp_path, write_corpus):
    manifest = with_hashes(pair)
    write_manifest(pair, manifest)
    assert open_indexed_files(pair).manifest == manifest
    for changed in ({"tokens": 17}, {"documents": 4}, {"dtype": "int32"}):
        write_manifest(pair, replace(manifest, **changed))
        assert_rejected(r"pair\.idx.*pair\.json", open_indexed_files, pair)
    write_manifest(pair, manifest)

    # Files of other corpora with the same counts and sizes.
    write_corpus(tmp_path / "other ids", [5, 6, 7], seed=2)
    write_corpus(tmp_path / "other documents", [7, 6, 5])
    for path, other in ((bin_path(pair), "other ids.bin"), (idx_path(pair), "other documents.idx")):
        content = path.read_bytes()
        path.write_bytes((tmp_path / other).read_bytes())
        assert len(path.read_bytes()) == len(content)
        assert_rejected(rf"{path.name}.*pair\.json", open_indexed_files, pair)
        # Earlier versions stored only the hash of the whole .bin, which is read if it is small.
        write_manifest(pair, replace(manifest, idx_sha256=None, bin_sample=None))
        if path == bin_path(pair):
            assert_rejected(r"pair\.bin.*pair\.json", open_indexed_files, pair)
        else:
            open_indexed_files(pair)
        write_manifest(pair, manifest)
        path.write_bytes(content)
    assert open_indexed_files(pair).tokens == 18


def test_fingerprint_of_the_data(pair, tmp_path, write_corpus):
    """It depends on both files, and not on their path or on whether there is a manifest."""
    first = data_fingerprint(pair)
    write_corpus(tmp_path / "copy", [5, 6, 7])
    assert data_fingerprint(tmp_path / "copy") == first
    write_corpus(tmp_path / "other ids", [5, 6, 7], seed=3)
    write_corpus(tmp_path / "other documents", [6, 5, 7])
    assert (
        len(
            {
                first,
                *(data_fingerprint(tmp_path / name) for name in ("other ids", "other documents")),
            }
        )
        == 3
    )
    for manifest in (manifest_of(open_indexed_files(pair), 999), with_hashes(pair)):
        write_manifest(pair, manifest)
        assert data_fingerprint(pair) == first
    assert_rejected(r"absent\.bin", data_fingerprint, tmp_path / "absent")


@pytest.mark.parametrize("size", [1, 131_073, 3_000_001, 4 << 20])
def test_the_sample_covers_small_files(tmp_path, size):
    path = tmp_path / "file"
    content = bytearray(size)
    path.write_bytes(content)
    samples = {file_sample(path)}
    positions = [0, size // 3, size // 2, size - 1]
    for position in positions:
        content[position] ^= 1
        path.write_bytes(content)
        samples.add(file_sample(path))
        content[position] ^= 1
    path.write_bytes(content + b"\0")
    samples.add(file_sample(path))
    assert len(samples) == 2 + len(set(positions))
