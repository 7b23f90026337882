"""Writing .bin/.idx: equality with megatron-core's builder, failures, and resuming."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.data.indexed_dataset import open_indexed_files
from megatron.preparation.indexed_writer import IndexedWriter, is_resumable, publish
from tests.support.errors import assert_rejected


@settings(max_examples=40, deadline=None)
@given(
    batches=st.lists(
        st.lists(st.lists(st.integers(0, 70000), min_size=1, max_size=9), max_size=5),
        min_size=1,
        max_size=5,
    ),
    vocab_size=st.sampled_from([70001, 100, 65499, 65500]),
)
def test_equal_to_megatron_cores_builder(tmp_path_factory, batches, vocab_size):
    batches = [
        [[token % vocab_size for token in document] for document in batch] for batch in batches
    ]
    documents = [document for batch in batches for document in batch]
    if not documents:
        return
    folder = tmp_path_factory.mktemp("pair")
    builder = IndexedDatasetBuilder(
        str(folder / "expected.bin"), dtype=DType.optimal_dtype(vocab_size)
    )
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(folder / "expected.idx"))
    with IndexedWriter(folder / "actual", vocab_size) as writer:
        for batch in batches:
            flat = np.array([token for document in batch for token in document], dtype=writer.dtype)
            writer.add(flat, np.array([len(document) for document in batch], dtype=np.int32))
        written = writer.finish()
    for ending in ("bin", "idx"):
        assert (folder / f"actual.{ending}").read_bytes() == (
            folder / f"expected.{ending}"
        ).read_bytes()
    assert sorted(os.listdir(folder)) == [
        "actual.bin",
        "actual.idx",
        "expected.bin",
        "expected.idx",
    ]
    assert (written.documents, written.tokens) == (len(documents), sum(map(len, documents)))
    assert written.largest_id == max(map(max, documents))
    dataset = IndexedDataset(str(folder / "actual"))
    assert [dataset[number].tolist() for number in range(len(dataset))] == documents
    files = open_indexed_files(folder / "expected")
    assert (files.documents, files.sequences, files.tokens) == (
        len(documents),
        len(documents),
        written.tokens,
    )
    assert files.open_tokens()[:].tolist() == [
        token for document in documents for token in document
    ]


@pytest.fixture
def writer(tmp_path):
    """A writer with a document, of which no file is left after a failure."""
    with IndexedWriter(tmp_path / "a", 100) as writer:
        writer.add(np.arange(5, dtype=np.uint16), np.array([5]))
        yield writer
    assert os.listdir(tmp_path) == []


def second_writer(writer, path, monkeypatch):
    IndexedWriter(path, 100)


def damage_on_disk(writer, path, monkeypatch):
    writer.commit()
    with open(f"{path}.partial.bin", "r+b") as stream:
        stream.seek(4)
        stream.write(b"\x09")


def full_disk(writer, path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)


def id_beyond_the_vocabulary(writer, path, monkeypatch):
    writer.add(np.array([3, 100], dtype=np.uint16), np.array([2]))


@pytest.mark.parametrize(
    ("happens", "message"),
    [
        (second_writer, r"a\.bin"),
        (damage_on_disk, "reads back differently"),
        (full_disk, "cannot write .*a.*: No space left on device"),
        (id_beyond_the_vocabulary, "100.*99"),
    ],
)
def test_what_prevents_the_end(writer, tmp_path, monkeypatch, happens, message):
    def finish():
        happens(writer, tmp_path / "a", monkeypatch)
        writer.finish()

    assert_rejected(message, finish)


def test_writing_nothing(tmp_path):
    with IndexedWriter(tmp_path / "a", 100) as writer:
        assert_rejected("contains no text", writer.finish)
    assert os.listdir(tmp_path) == []


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=8),
    cut_data=st.data(),
    lost=st.integers(0, 3),
)
def test_resume_from_any_commit(tmp_path_factory, pieces, cut_data, lost):
    """Commit, write more that is lost, and resume in another writer: the result equals that of a
    single writer.
    """
    folder = tmp_path_factory.mktemp("writer")
    arrays = [
        (np.repeat(np.array(piece, np.uint16), piece), np.array(piece, np.int32))
        for piece in pieces
    ]
    if not sum(map(sum, pieces)):
        return
    with IndexedWriter(folder / "expected", 10) as writer:
        for piece in arrays:
            writer.add(*piece)
        expected = writer.finish()
    cut = cut_data.draw(st.integers(0, len(pieces)))
    first = IndexedWriter(folder / "out", 10)
    for piece in arrays[:cut]:
        first.add(*piece)
    state = first.commit()
    for piece in arrays[cut : cut + lost]:
        first.add(*piece)
    first.close()
    assert is_resumable(folder / "out", 10, state)
    with IndexedWriter(folder / "out", 10, state) as second:
        for piece in arrays[cut:]:
            second.add(*piece)
        written = second.finalize()
        publish(folder / "out")
        second.close()
    assert (written.sha256, written.documents) == (expected.sha256, expected.documents)
    for ending in ("bin", "idx"):
        assert (folder / f"out.{ending}").read_bytes() == (
            folder / f"expected.{ending}"
        ).read_bytes()
