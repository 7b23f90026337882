"""Fixtures for the tests of megatron.preparation."""

from tests.support.token_files import (
    corpus,
    documents,
    no_fsync,
    tokenizer,
    tokenizer_file,
    write_corpus,
)

__all__ = ["corpus", "documents", "no_fsync", "tokenizer", "tokenizer_file", "write_corpus"]
