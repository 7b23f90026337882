"""Fixtures for megatron.data and megatron.preparation: a tokenizer, documents, and a corpus of
random ids.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from megatron.preparation.indexed_writer import IndexedWriter
from megatron.tokenizer.hugging_face import train_bpe
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.support.texts import KINDS

VOCABULARY = 1000


@pytest.fixture(scope="module", autouse=True)
def no_fsync():
    """Skip fsync, which is slow on a busy disk. No unit test simulates a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    """A BPE tokenizer of 600 ids."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(KINDS.values(), 600).save(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file):
    return build_tokenizer("HFTokenizer", tokenizer_file)


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """About 500 texts of several kinds, including empty ones and a very long line."""
    texts = []
    for number in range(70):
        for text in KINDS.values():
            start = number * 97 % max(len(text) // 2, 1)
            texts.append(text[start : start + 40 * (number % 29)])
    return [*texts, *KINDS.values(), ""]


@pytest.fixture
def write_corpus():
    """write(prefix, lengths) writes documents of random ids and returns their tokens
    and lengths.
    """

    def write(prefix, lengths, seed=0, vocab_size=VOCABULARY):
        lengths = np.asarray(lengths, dtype=np.int32)
        tokens = (
            np.random.default_rng(seed).integers(0, vocab_size, lengths.sum()).astype(np.uint16)
        )
        with IndexedWriter(prefix, vocab_size) as writer:
            writer.add(tokens, lengths)
            writer.finish()
        return tokens, lengths

    return write


@pytest.fixture
def corpus(tmp_path, write_corpus) -> str:
    """The prefix of 400 documents of 1 to 200 tokens."""
    prefix = str(tmp_path / "corpus")
    write_corpus(prefix, np.random.default_rng(7).integers(1, 200, 400))
    return prefix
