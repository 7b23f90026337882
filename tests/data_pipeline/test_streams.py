"""Evaluation streams: the documents of a part, in the order of the file."""

import numpy as np
import pytest

from megatron.config.errors import UserError
from megatron.data import document_lengths, evaluation_tokens, validation_stream
from megatron.data.datasets import datasets_from_split
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.samples import SampleSettings


@pytest.fixture
def numbered(tmp_path) -> str:
    """40 documents; document i is i, i, ..., so that a token tells where it is from."""
    prefix = str(tmp_path / "numbered")
    lengths = np.random.default_rng(3).integers(1, 30, 40)
    with IndexedWriter(prefix, 40) as writer:
        writer.add(np.repeat(np.arange(40, dtype=np.uint16), lengths), lengths)
        writer.finish()
    return prefix


def test_documents_of_the_part_in_order(numbered):
    lengths = document_lengths(numbered, "3,1")
    stream = validation_stream(numbered, "3,1")
    assert stream.dtype == lengths.dtype == np.int64
    assert stream.tolist() == np.repeat(np.arange(30, 40), lengths).tolist()


def test_parts_make_up_the_corpus(numbered):
    parts = [validation_stream(numbered, "7,2,1", part) for part in ("train", "valid", "test")]
    assert np.concatenate(parts).tolist() == validation_stream(numbered, None).tolist()
    assert len(validation_stream(numbered, None)) == document_lengths(numbered, None).sum()


def test_no_training_document_in_it(numbered):
    """The boundaries are those of the training samples, checked on the samples themselves."""
    datasets = datasets_from_split(numbered, "949,50,1", (8, 8, 8), (None, None, 0), SampleSettings(40, 0, 1))
    trained_on = {int(token) for index in range(len(datasets.train)) for token in datasets.train[index]["tokens"]}
    validated_on = {int(token) for index in range(len(datasets.valid)) for token in datasets.valid[index]["tokens"]}
    stream = set(validation_stream(numbered, "949,50,1").tolist())
    assert not trained_on & stream
    assert validated_on <= stream


def test_max_tokens(numbered):
    whole = validation_stream(numbered, "1,1")
    assert validation_stream(numbered, "1,1", max_tokens=17).tolist() == whole[:17].tolist()
    assert validation_stream(numbered, "1,1", max_tokens=10**9).tolist() == whole.tolist()


def test_errors(numbered, tmp_path):
    with pytest.raises(UserError, match=r"leaves nothing for test"):
        validation_stream(numbered, "9,1,0", "test")
    with pytest.raises(UserError, match=r"unknown part 'dev'"):
        document_lengths(numbered, "9,1,0", "dev")
    with pytest.raises(UserError, match=r"no data at .*absent"):
        validation_stream(str(tmp_path / "absent"))


def test_from_a_configuration(configuration, numbered, corpus):
    config = configuration(data_path=numbered, split="1,1")
    assert evaluation_tokens(config, max_tokens=9).tolist() == validation_stream(numbered, "1,1", "valid", 9).tolist()
    several = configuration(train_data_paths=[corpus], valid_data_paths=[numbered, corpus], valid_data_weights=[1, 9])
    both = np.concatenate([validation_stream(numbered, None), validation_stream(corpus, None)])
    assert evaluation_tokens(several).tolist() == both.tolist()
    first = len(validation_stream(numbered, None))
    for count in (first - 1, first, first + 1):
        assert evaluation_tokens(several, max_tokens=count).tolist() == both[:count].tolist()
    assert evaluation_tokens(several, "train").tolist() == validation_stream(corpus, None).tolist()
    with pytest.raises(UserError, match="no test data: test-data-paths is not set"):
        evaluation_tokens(several, "test")
