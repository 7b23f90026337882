"""The text of evaluate.py --text, and the token at the beginning of each of its segments."""

from pathlib import Path

import numpy as np
import torch

from megatron.evaluation.text import Text, corpus_name
from megatron.preparation.documents import DocumentOptions
from megatron.preparation.encoding import encode_chunks, special_lines
from megatron.preparation.input_files import find_files
from megatron.preparation.readers import FileCorpus
from megatron.tokenizer.interface import Tokenizer
from megatron.utils.errors import UserError, visible
from megatron.utils.ranks import Report


def text_of_file(path: str | Path, tokenizer: Tokenizer, report: Report) -> Text:
    """The documents of a file or folder as a dataset would contain them: each with its
    end-of-document token. Reports special and unknown tokens in them. Raises UserError
    if prepare_data.py cannot read the text, or there is none.
    """
    chunks = list(FileCorpus(find_files([path])).chunks())
    encoded = encode_chunks(chunks, tokenizer, DocumentOptions(append_eod=True, skip_bad=True))
    if encoded.skipped.bad:
        raise UserError(
            f"--text {encoded.skipped.examples[0]}; correct the file, or remove the document"
        )
    tokens = torch.from_numpy(encoded.tokens[0].astype(np.int64))
    if not len(tokens):
        raise UserError(f"--text {path}: has no text")
    for line in special_lines(encoded.special[0], tokenizer):
        report(line)
    ends = np.cumsum(encoded.lengths[0], dtype=np.int64)
    offsets = np.concatenate(([0], ends))
    name = corpus_name([str(path)])
    return Text(tokens, offsets, tokenizer.byte_lengths(), name, source=visible(str(path)))


def first_token(tokenizer: Tokenizer, bos: str) -> int | None:
    """The token that replaces the first one of each segment, by the value of --bos; None: none."""
    if bos == "never":
        return None
    return tokenizer.first if bos == "always" else tokenizer.bos
