"""Evaluation streams and document segments."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.datasets import SampleSettings, datasets_from_split
from megatron.data.streams import document_lengths, document_segments, evaluation_stream
from megatron.preparation.indexed_writer import IndexedWriter
from megatron.utils.errors import UserError
from tests.support.corpora import part_tokens
from tests.support.errors import assert_rejected


@pytest.fixture
def numbered(tmp_path) -> str:
    """40 documents. All tokens of document i are i."""
    prefix = str(tmp_path / "numbered")
    lengths = np.random.default_rng(3).integers(1, 30, 40)
    with IndexedWriter(prefix, 40) as writer:
        writer.add(np.repeat(np.arange(40, dtype=np.uint16), lengths), lengths)
        writer.finish()
    return prefix


def test_stream_is_in_file_order(numbered):
    lengths = document_lengths(numbered, "3,1")
    stream = part_tokens(numbered, "3,1")
    assert stream.dtype == lengths.dtype == np.int64
    assert stream.tolist() == np.repeat(np.arange(30, 40), lengths).tolist()


def test_parts_cover_the_corpus(numbered):
    parts = [part_tokens(numbered, "7,2,1", part) for part in ("train", "valid", "test")]
    assert np.concatenate(parts).tolist() == part_tokens(numbered, None).tolist()
    assert len(part_tokens(numbered, None)) == document_lengths(numbered, None).sum()


def test_stream_contains_no_training_document(numbered):
    """Checked on the tokens of the training samples."""
    datasets = datasets_from_split(numbered, "949,50,1", (8, 8, 8), (None, None, 0), SampleSettings(40, 0, 1))
    trained_on = {int(token) for index in range(len(datasets.train)) for token in datasets.train[index]["tokens"]}
    validated_on = {int(token) for index in range(len(datasets.valid)) for token in datasets.valid[index]["tokens"]}
    stream = set(part_tokens(numbered, "949,50,1").tolist())
    assert not trained_on & stream
    assert validated_on <= stream


def test_errors(numbered, tmp_path):
    with pytest.raises(UserError, match=r"leaves no documents for test"):
        part_tokens(numbered, "9,1,0", "test")
    with pytest.raises(UserError, match=r"no data at .*absent"):
        part_tokens(str(tmp_path / "absent"))


def test_stream_of_a_configuration(configuration, numbered, corpus):
    config = configuration(data_path=numbered, split="1,1")
    expected = part_tokens(numbered, "1,1")
    stream = evaluation_stream(config)
    assert (len(stream), stream[:9].dtype) == (len(expected), torch.int64)
    assert stream[3:].tolist() == expected[3:].tolist()
    several = configuration(train_data_paths=[corpus], valid_data_paths=[numbered, corpus], valid_data_weights=[1, 9])
    both = np.concatenate([part_tokens(numbered, None), part_tokens(corpus, None)])
    stream = evaluation_stream(several)
    first = len(part_tokens(numbered, None))
    for part in (slice(None), slice(first - 2, first), slice(first - 1, first + 1), slice(first, None), slice(5, 5)):
        assert stream[part].tolist() == both[part].tolist()
    indices = torch.tensor([[first, 0], [len(both) - 1, first - 1]])
    assert stream[indices].tolist() == both[indices].tolist()
    assert evaluation_stream(several, "train")[:].tolist() == part_tokens(corpus, None).tolist()
    assert_rejected("test-data-paths", evaluation_stream, several, "test")


def corpus_of(folder, lengths) -> str:
    """Documents of the given lengths. Every token has a different id."""
    lengths = np.array(lengths, dtype=np.int32)
    with IndexedWriter(folder / "c", 60000) as writer:
        writer.add(np.arange(lengths.sum(), dtype=np.uint16), lengths)
        writer.finish()
    return str(folder / "c")


def test_document_segments(tmp_path):
    """In segments of 4, the first and the last document give two each, the other two none."""
    segments = document_segments(corpus_of(tmp_path, [9, 3, 4, 12]), None, length=4)
    assert segments.tokens.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [16, 17, 18, 19, 20], [20, 21, 22, 23, 24]]
    assert segments.tokens.dtype == np.int64
    assert segments.documents.tolist() == [0, 0, 3, 3]
    assert segments.left_out == 3 + 4 + 3


def test_short_documents_joined(tmp_path):
    segments = document_segments(corpus_of(tmp_path, [9, 3, 4, 12, 2]), None, length=4, join_short=True)
    assert segments.documents.tolist() == [0, 0, 3, 3, -1, -1]
    assert segments.tokens[4:].tolist() == [[9, 10, 11, 12, 13], [13, 14, 15, 28, 29]]
    assert segments.left_out == 3


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=15),
    length=st.integers(1, 12),
    budget=st.none() | st.integers(1, 60),
    join=st.booleans(),
)
def test_document_segments_in_general(tmp_path_factory, lengths, length, budget, join):
    prefix = corpus_of(tmp_path_factory.mktemp("corpus"), lengths)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    short = [n for n in lengths if n <= length]
    expected = sum((n - 1) // length for n in lengths) + (max(sum(short) - 1, 0) // length if join else 0)
    expected = expected if budget is None else min(expected, max(budget // length, 1))
    if expected == 0:
        with pytest.raises(UserError, match=rf"the longest has {max(lengths)}"):
            document_segments(prefix, None, "valid", length, budget, join)
        return
    segments = document_segments(prefix, None, "valid", length, budget, join)
    assert segments.tokens.shape == (expected, length + 1)
    targets = segments.tokens[:, 1:].ravel()
    assert len(set(targets)) == len(targets)  # each token is scored once
    for row, document in zip(segments.tokens, segments.documents, strict=True):
        if document >= 0:
            assert row.tolist() == list(range(row[0], row[0] + length + 1))
            assert starts[document] <= row[0]
            assert row[-1] < starts[document + 1]
    assert segments.left_out == sum(lengths) - len(set(segments.tokens.ravel()))


def test_document_segments_of_a_part(numbered):
    lengths = document_lengths(numbered, "3,1")
    segments = document_segments(numbered, "3,1", length=5)
    assert set(segments.tokens.ravel()) <= set(range(30, 40))
    assert (segments.tokens[:, 0] == segments.documents + 30).all()
    assert len(segments.tokens) == sum((lengths - 1) // 5)
    assert_rejected("2,049", document_segments, numbered, "3,1")
