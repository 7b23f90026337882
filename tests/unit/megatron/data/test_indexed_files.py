"""Writing .bin/.idx, equal to megatron-core's builder, and what the check finds wrong with a pair."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.data.indexed_format import ID_TYPES, check_indexed_files, id_type_for
from megatron.data.indexed_writer import IndexedWriter
from megatron.utils.errors import UserError

ROOT = Path(__file__).parents[4]


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    batches=st.lists(
        st.lists(st.lists(st.integers(0, 70000), min_size=1, max_size=9), max_size=5), min_size=1, max_size=5
    ),
    vocab_size=st.sampled_from([70001, 100, 65499, 65500]),
)
def test_equal_to_megatron_cores_builder(tmp_path_factory, batches, vocab_size):
    batches = [[[token % vocab_size for token in document] for document in batch] for batch in batches]
    documents = [document for batch in batches for document in batch]
    if not documents:
        return
    folder = tmp_path_factory.mktemp("pair")
    builder = IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(folder / "theirs.idx"))
    with IndexedWriter(folder / "ours", vocab_size) as writer:
        for batch in batches:
            flat = np.array([token for document in batch for token in document], dtype=writer.dtype)
            writer.add(flat, np.array([len(document) for document in batch], dtype=np.int32))
        written = writer.finish()
    for ending in ("bin", "idx"):
        assert (folder / f"ours.{ending}").read_bytes() == (folder / f"theirs.{ending}").read_bytes()
    assert sorted(os.listdir(folder)) == ["ours.bin", "ours.idx", "theirs.bin", "theirs.idx"]
    assert (written.documents, written.tokens) == (len(documents), sum(map(len, documents)))
    assert written.largest_id == max(map(max, documents))
    ours = IndexedDataset(str(folder / "ours"))
    assert [ours[number].tolist() for number in range(len(ours))] == documents
    found = check_indexed_files(folder / "theirs")
    assert (found.documents, found.sequences, found.tokens) == (len(documents), len(documents), written.tokens)
    assert found.map_tokens().tolist() == [token for document in documents for token in document]


def test_every_id_type_of_megatron_core_is_read():
    theirs = {dtype.value: np.dtype(dtype.name) for dtype in DType}
    assert {code: dtype for code, dtype in theirs.items() if np.issubdtype(dtype, np.integer)} == ID_TYPES
    for size in (1, 65499, 65500, 10**6):
        assert id_type_for(size) == np.dtype(DType.optimal_dtype(size))


def test_several_sequences_per_document(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
    builder.add_document(torch.arange(7), [3, 4])
    builder.add_document(torch.arange(2), [2])
    builder.finalize(str(tmp_path / "a.idx"))
    found = check_indexed_files(tmp_path / "a")
    assert (found.documents, found.sequences, found.tokens) == (2, 3, 9)
    assert found.offsets().tolist() == [0, 3, 7, 9]


def test_nothing_under_the_final_name_before_the_end(tmp_path):
    with IndexedWriter(tmp_path / "a", 100) as writer:
        writer.add(np.arange(5, dtype=np.uint16), np.array([5]))
        assert not (tmp_path / "a.bin").exists()
        assert not (tmp_path / "a.idx").exists()
    assert os.listdir(tmp_path) == []


WRITE_UNTIL_KILLED = """
import sys
import numpy as np
from megatron.data.indexed_writer import IndexedWriter
writer = IndexedWriter(sys.argv[1], 100)
while True:
    writer.add(np.arange(50, dtype=np.uint16), np.array([20, 30]))
    print("added", flush=True)
"""


def test_a_kill_leaves_nothing_under_the_final_name_and_does_not_hinder_the_next(tmp_path):
    command = [sys.executable, "-c", WRITE_UNTIL_KILLED, str(tmp_path / "a")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"added\n"
        process.kill()
    assert (tmp_path / "a.partial.bin").exists()
    assert not (tmp_path / "a.bin").exists()
    with pytest.raises(UserError, match=r"a.bin and .*a.idx missing"):
        check_indexed_files(tmp_path / "a")
    with IndexedWriter(tmp_path / "a", 100) as writer:
        writer.add(np.arange(5, dtype=np.uint16), np.array([5]))
        writer.finish()
    assert check_indexed_files(tmp_path / "a").tokens == 5
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_two_writers_of_one_prefix(tmp_path):
    with IndexedWriter(tmp_path / "a", 100), pytest.raises(UserError, match=r"another process is writing .*a.bin"):
        IndexedWriter(tmp_path / "a", 100)


def test_overwriting_replaces_the_pair(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", [5, 6])
    write_corpus(tmp_path / "a", [7])
    assert check_indexed_files(tmp_path / "a").lengths.tolist() == [7]


def test_a_wrong_byte_on_disk_is_noticed(tmp_path, monkeypatch):
    original = IndexedWriter._write_idx

    def damage(self):
        with open(self._bin, "r+b") as stream:
            stream.seek(4)
            stream.write(b"\x09")
        original(self)

    monkeypatch.setattr(IndexedWriter, "_write_idx", damage)
    with IndexedWriter(tmp_path / "a", 100) as writer:
        writer.add(np.arange(5, dtype=np.uint16), np.array([5]))
        with pytest.raises(UserError, match=r"reads back differently"):
            writer.finish()
    assert os.listdir(tmp_path) == []


def test_a_full_disk(tmp_path, monkeypatch):
    with IndexedWriter(tmp_path / "a", 100) as writer:
        writer.add(np.arange(5, dtype=np.uint16), np.array([5]))

        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write .*a.*: No space left on device"):
            writer.finish()
    assert os.listdir(tmp_path) == []


def test_writing_nothing(tmp_path):
    with IndexedWriter(tmp_path / "a", 100) as writer, pytest.raises(UserError, match=r"holds no text"):
        writer.finish()
    assert os.listdir(tmp_path) == []


def test_ids_beyond_the_vocabulary_are_not_put_in_place(tmp_path):
    with IndexedWriter(tmp_path / "a", 100) as writer:
        writer.add(np.array([3, 100], dtype=np.uint16), np.array([2]))
        with pytest.raises(UserError, match=r"token id 100, but the vocabulary ends at 99"):
            writer.finish()
    assert os.listdir(tmp_path) == []


def test_misuse(tmp_path):
    with IndexedWriter(tmp_path / "a", 100) as writer:
        with pytest.raises(ValueError, match=r"add up to 4"):
            writer.add(np.arange(5, dtype=np.uint16), np.array([4]))
        with pytest.raises(ValueError, match=r"stored as uint16"):
            writer.add(np.arange(5, dtype=np.int32), np.array([5]))


@pytest.fixture
def pair(tmp_path, write_corpus):
    write_corpus(tmp_path / "pair", [5, 6, 7])
    return tmp_path / "pair"


def _edit(path, offset, content):
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(content)


def test_both_missing(tmp_path, pair):
    with pytest.raises(UserError, match=r"absent.bin and .*absent.idx missing; in that folder there is: pair$"):
        check_indexed_files(tmp_path / "absent")
    with pytest.raises(UserError, match=r"missing; make it with prepare_data.py or tools/datasets/preprocess_data.py"):
        check_indexed_files(tmp_path / "nowhere" / "absent")


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_one_missing(pair, ending):
    pair.with_suffix(f".{ending}").unlink()
    with pytest.raises(UserError, match=rf"pair\.{ending} missing; the other file of the pair is there"):
        check_indexed_files(pair)


def test_prefix_with_ending(pair):
    with pytest.raises(UserError, match=r"give the prefix without the ending: .*pair$"):
        check_indexed_files(f"{pair}.bin")


def test_truncated_bin(pair):
    os.truncate(f"{pair}.bin", 30)
    with pytest.raises(UserError, match=r"pair.bin is truncated .*describes 36 bytes, the .bin has 30"):
        check_indexed_files(pair)


def test_idx_of_another_file(pair, tmp_path, write_corpus):
    write_corpus(tmp_path / "other", [5, 6])
    os.replace(tmp_path / "other.idx", f"{pair}.idx")
    with pytest.raises(UserError, match=r"pair.idx belongs to another file .*describes 22 bytes, the .bin has 36"):
        check_indexed_files(pair)


@pytest.mark.parametrize("size", [4, 20, 40, 90])
def test_truncated_idx(pair, size):
    os.truncate(f"{pair}.idx", size)
    with pytest.raises(UserError, match=r"pair.idx is truncated"):
        check_indexed_files(pair)


def test_overlong_idx(pair):
    with open(f"{pair}.idx", "ab") as stream:
        stream.write(b"\0")
    with pytest.raises(UserError, match=r"pair.idx is damaged: its header announces 3 sequences and 4 document"):
        check_indexed_files(pair)


@pytest.mark.parametrize("block", [1, 2, 1 << 20])
@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (0, b"PK", "is not a Megatron index"),
        (9, struct.pack("<Q", 2), "has format version 2"),
        (17, b"\x06", "id type code 6, which stands for no integer type"),
        (17, b"\x63", "id type code 99"),
        (17, b"\x04", "its sequence offsets do not add up"),
        (34, struct.pack("<i", -5), "a sequence has -5 tokens"),
        (34, struct.pack("<ii", 6, 5), "its sequence offsets do not add up"),
        (70, struct.pack("<q", 1), "its document index does not cover the sequences"),
        (78, struct.pack("<q", 3), "its document index does not cover the sequences"),
    ],
)
def test_damaged_idx(pair, offset, content, message, block, monkeypatch):
    monkeypatch.setattr("megatron.data.indexed_format._SEQUENCES_AT_ONCE", block)
    check_indexed_files(pair)
    _edit(f"{pair}.idx", offset, content)
    with pytest.raises(UserError, match=message):
        check_indexed_files(pair)


def test_empty_files(pair):
    os.truncate(f"{pair}.idx", 0)
    with pytest.raises(UserError, match=r"pair.idx is not a Megatron index"):
        check_indexed_files(pair)


def test_empty_dataset(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"))
    builder.finalize(str(tmp_path / "a.idx"))
    with pytest.raises(UserError, match=r"a is empty: .* 0 sequences without a single token"):
        check_indexed_files(tmp_path / "a")
