"""Tokenizing chunks, in this process and in workers."""

import json

import numpy as np
import pytest

from megatron.preparation.documents import DocumentOptions
from megatron.preparation.encoding import encode_chunks, encode_in_order, work_items
from megatron.preparation.input_files import find_files
from megatron.preparation.readers import START, FileCorpus, TextChunk
from megatron.tokenizer.tokenizer import CharLevelTokenizer
from tests.support.corpora import ExitingTokenizerFiles, json_lines
from tests.support.errors import assert_rejected

TOKENIZER = CharLevelTokenizer()


def encode(records, tokenizer=TOKENIZER, **options):
    content = "\n".join(json.dumps(record) for record in records).encode()
    return encode_chunks(
        [TextChunk("shard.jsonl", "lines", 1, content)], tokenizer, DocumentOptions(**options)
    )


class WithBos(CharLevelTokenizer):
    bos = 300

    def tokenize(self, text):
        return [self.bos, *super().tokenize(text)]


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "lengths"),
    [(TOKENIZER, [97, 98, 0, 99, 0], [3, 2]), (WithBos(), [300, 97, 98, 0, 300, 99, 0], [4, 3])],
)
def test_ends_and_starts_of_documents(tokenizer, tokens, lengths):
    """A document without text has no other token than that of its start, and is skipped."""
    encoded = encode([{"text": "ab"}, {"text": ""}, {"text": "c"}], tokenizer, append_eod=True)
    assert (encoded.tokens[0].dtype, encoded.lengths[0].dtype) == (np.uint16, np.int32)
    assert encoded.tokens[0].tolist() == tokens
    assert encoded.lengths[0].tolist() == lengths
    assert encoded.empty == [1]


def test_ids_that_overflow_their_dtype_are_an_error():
    class LargeIds(CharLevelTokenizer):
        def tokenize(self, text):
            return [70000]

    with pytest.raises(OverflowError):
        encode([{"text": "a"}], tokenizer=LargeIds())


def test_killed_worker(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines("text"))
    items = work_items(FileCorpus(find_files([tmp_path])), START)
    files = ExitingTokenizerFiles("CharLevelTokenizer")
    assert_rejected(
        "worker process",
        list,
        encode_in_order(items, TOKENIZER, files, DocumentOptions(), workers=2),
    )
