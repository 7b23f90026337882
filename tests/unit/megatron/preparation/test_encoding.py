"""Tokenizing chunks, in this process and in workers."""

import json

import numpy as np
import pytest

from megatron.preparation import encoding
from megatron.preparation.documents import DocumentOptions
from megatron.preparation.encoding import encode_chunks, encode_in_order, work_items
from megatron.preparation.input_files import find_files
from megatron.preparation.readers import START, FileCorpus, TextChunk
from megatron.tokenizer.tokenizer import CharLevelTokenizer
from tests.support.corpora import BYTE_TOKENIZER, ExitingTokenizerFiles, json_lines
from tests.support.errors import assert_rejected

TOKENIZER = CharLevelTokenizer()


def encode(records, tokenizer=TOKENIZER, **options):
    content = "\n".join(json.dumps(record) for record in records).encode()
    return encode_chunks([TextChunk("shard.jsonl", "lines", 1, content)], tokenizer, DocumentOptions(**options))


def decode(encoded, column=0) -> list[str]:
    ends = np.cumsum(encoded.lengths[column])
    return [TOKENIZER.detokenize(ids) for ids in np.split(encoded.tokens[column], ends)[:-1]]


def test_append_eod_and_empty_documents():
    encoded = encode([{"text": "ab"}, {"text": ""}, {"text": "c"}], append_eod=True)
    assert (encoded.tokens[0].dtype, encoded.lengths[0].dtype) == (np.uint16, np.int32)
    assert encoded.tokens[0].tolist() == [97, 98, 0, 99, 0]
    assert encoded.lengths[0].tolist() == [3, 2]
    assert encoded.empty == [1]


def test_documents_start_with_the_token_that_the_tokenizer_adds(monkeypatch):
    """A document without text has no other token, and is skipped."""

    class WithBos(CharLevelTokenizer):
        bos = 300

        def tokenize(self, text):
            return [self.bos, *super().tokenize(text)]

    encoded = encode([{"text": "ab"}, {"text": ""}, {"text": "c"}], WithBos(), append_eod=True)
    assert encoded.tokens[0].tolist() == [300, 97, 98, 0, 300, 99, 0]
    assert encoded.lengths[0].tolist() == [4, 3]
    assert encoded.empty == [1]


def test_ids_that_overflow_their_dtype_are_an_error():
    class LargeIds(CharLevelTokenizer):
        def tokenize(self, text):
            return [70000]

    with pytest.raises(OverflowError):
        encode([{"text": "a"}], tokenizer=LargeIds())


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> FileCorpus:
    """A corpus of several work items."""
    monkeypatch.setattr(encoding, "WORK_ITEM_BYTES", 1)
    for number in range(9):
        (tmp_path / f"{number}.jsonl").write_bytes(json_lines(*[str(number)] * number))
    return FileCorpus(find_files([tmp_path]))


def process(corpus, workers, tokenizer_files=BYTE_TOKENIZER):
    return list(encode_in_order(work_items(corpus, START), TOKENIZER, tokenizer_files, DocumentOptions(), workers))


def test_results_of_workers_are_in_order(corpus):
    results = [(item.position, item.bytes_read, decode(encoded)) for item, encoded in process(corpus, workers=2)]
    assert results == [(item.position, item.bytes_read, decode(encoded)) for item, encoded in process(corpus, 1)]
    assert [len(texts) for _, _, texts in results] == list(range(1, 9))


def test_killed_worker(corpus):
    assert_rejected("worker process", process, corpus, 2, ExitingTokenizerFiles("CharLevelTokenizer"))
