"""Evaluation streams."""

import numpy as np
import pytest
import torch

from megatron.data.datasets import SampleSettings
from megatron.data.streams import evaluation_stream, open_part
from megatron.preparation.indexed_writer import IndexedWriter
from tests.support.corpora import part_tokens
from tests.support.datasets import datasets_from_split
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
    tokens, lengths = open_part(numbered, "3,1", "valid")
    assert lengths.dtype == np.int64
    assert tokens[:].tolist() == np.repeat(np.arange(30, 40), lengths).tolist()


def test_parts_cover_the_corpus(numbered):
    parts = [part_tokens(numbered, "7,2,1", part) for part in ("train", "valid", "test")]
    assert np.concatenate(parts).tolist() == part_tokens(numbered, None).tolist()
    tokens, lengths = open_part(numbered, None, "valid")
    assert len(tokens) == lengths.sum()


def test_stream_contains_no_training_document(numbered):
    """Checked on the tokens of the training samples."""
    datasets = datasets_from_split(
        numbered, "949,50,1", (8, 8, 8), (None, None, 0), SampleSettings(40, 0, 1)
    )
    trained_on = {
        int(token)
        for index in range(len(datasets.train))
        for token in datasets.train[index]["tokens"]
    }
    validated_on = {
        int(token)
        for index in range(len(datasets.valid))
        for token in datasets.valid[index]["tokens"]
    }
    stream = set(part_tokens(numbered, "949,50,1").tolist())
    assert not trained_on & stream
    assert validated_on <= stream


def test_stream_of_a_configuration(configuration, numbered, corpus):
    config = configuration(data_path=numbered, split="1,1")
    expected = part_tokens(numbered, "1,1")
    stream, lengths = evaluation_stream(config)
    assert len(stream) == lengths.sum() == len(expected)
    assert stream[:9].dtype == torch.int64
    assert stream[3:].tolist() == expected[3:].tolist()
    several = configuration(
        train_data_paths=[corpus], valid_data_paths=[numbered, corpus], valid_data_weights=[1, 9]
    )
    both = np.concatenate([part_tokens(numbered, None), part_tokens(corpus, None)])
    stream, lengths = evaluation_stream(several)
    assert lengths.sum() == len(stream) == len(both)
    first = len(part_tokens(numbered, None))
    for part in (
        slice(None),
        slice(first - 2, first),
        slice(first - 1, first + 1),
        slice(first, None),
        slice(5, 5),
    ):
        assert stream[part].tolist() == both[part].tolist()
    indices = torch.tensor([[first, 0], [len(both) - 1, first - 1]])
    assert stream[indices].tolist() == both[indices].tolist()
    assert evaluation_stream(several, "train")[0][:].tolist() == part_tokens(corpus, None).tolist()
    assert_rejected("test-data-paths", evaluation_stream, several, "test")
