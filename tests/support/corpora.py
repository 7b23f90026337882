"""Small corpora and datasets for tests of the data pipeline."""

import json
import os
from pathlib import Path

import numpy as np

from megatron.data.documents import DocumentOptions, read_texts
from megatron.data.indexed_dataset import open_indexed_files
from megatron.data.input_files import find_files
from megatron.data.readers import FileCorpus
from megatron.tokenizer import TokenizerFiles
from tests.support.texts import KINDS

BYTE_TOKENIZER = TokenizerFiles("CharLevelTokenizer")

TEXTS = [*KINDS.values(), "", "last"]


def json_lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def read_inputs(*inputs: str | Path, suffixes=(), columns=("text", "meta"), **options) -> list[str]:
    """The texts of all documents in the input files."""
    corpus = FileCorpus(find_files(inputs, suffixes), suffixes, columns)
    return list(read_texts(corpus.chunks(), DocumentOptions(**options)))


def dataset_text(prefix: str | Path) -> str:
    """The text of a dataset that was tokenized with CharLevelTokenizer. Document ends are NUL characters."""
    return bytes(open_indexed_files(prefix).open_tokens()[:].astype(np.uint8)).decode()


def exit_process(chunks, tokenizer, options) -> None:
    """A function for `process_in_order` that ends the worker process. Workers import it by name."""
    os._exit(1)
