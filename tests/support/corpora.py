"""Small corpora and datasets for tests of the data pipeline."""

import json
import os
from pathlib import Path

import numpy as np

from megatron.data.indexed_dataset import (
    IndexedFiles,
    Manifest,
    bin_path,
    file_sha256,
    open_indexed_files,
)
from megatron.data.streams import open_part
from megatron.preparation.documents import DocumentOptions, SkippedDocuments, read_texts
from megatron.preparation.input_files import find_files
from megatron.preparation.readers import FileCorpus
from megatron.tokenizer.tokenizer import CharLevelTokenizer, TokenizerFiles
from tests.support.texts import KINDS

BYTE_TOKENIZER = TokenizerFiles("CharLevelTokenizer")


def part_tokens(prefix: str, split: str | None, part: str = "valid") -> np.ndarray:
    """All tokens of one part of a corpus, int64 [tokens]."""
    tokens, _ = open_part(prefix, split, part)
    return tokens[:].astype(np.int64)


TEXTS = [*KINDS.values(), "", "last"]


def json_lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def read_inputs(*inputs: str | Path, suffixes=(), columns=("text", "meta"), **options) -> list[str]:
    """The texts of all documents in the input files."""
    corpus = FileCorpus(find_files(inputs, suffixes), suffixes, columns)
    return list(read_texts(corpus.chunks(), DocumentOptions(**options), SkippedDocuments()))


def dataset_text(prefix: str | Path) -> str:
    """The text of a dataset that was tokenized with CharLevelTokenizer. Document ends are NUL
    characters.
    """
    return bytes(open_indexed_files(prefix).open_tokens()[:].astype(np.uint8)).decode()


class ExitingTokenizer(CharLevelTokenizer):
    """Ends the process that tokenizes."""

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        os._exit(1)


class ExitingTokenizerFiles(TokenizerFiles):
    """Workers import it by name."""

    def build(self) -> ExitingTokenizer:
        return ExitingTokenizer()


def manifest_of(files: IndexedFiles, largest_id: int, fingerprint: str = "") -> Manifest:
    """A manifest that describes `files`, by an HFTokenizer with 2,000 ids and this fingerprint."""
    return Manifest(
        documents=files.documents,
        tokens=files.tokens,
        text_bytes=None,
        largest_id=largest_id,
        sha256=file_sha256(bin_path(files.prefix)),
        dtype=files.dtype.name,
        tokenizer="HFTokenizer",
        tokenizer_fingerprint=fingerprint,
        vocab_size=2000,
        append_eod=True,
        ftfy=False,
        key="text",
        inputs=[],
        skipped_empty=0,
        skipped_bad=0,
        skipped_other=0,
    )
