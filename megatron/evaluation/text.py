"""The text that models are measured on: one stream of tokens, where its documents are, and how many bytes it is."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron.config import Config
from megatron.data.streams import document_lengths, document_segments, evaluation_corpora, evaluation_tokens
from megatron.evaluation.protocols import Segments
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class Text:
    """A token stream.

    tokens: int64 `[n]`. documents: int64 `[documents + 1]`, where each begins, and n; None where that is not known.
    row: the stream is rows of so many tokens, and no segment may cross from one to the next; None: it is one text.
    token_bytes: int64 `[vocabulary]`, the bytes that each token stands for. corpus: its name.
    """

    tokens: Tensor
    documents: np.ndarray | None = None
    row: int | None = None
    token_bytes: np.ndarray | None = None
    corpus: str | None = None
    _digests: dict[int, "hashlib._Hash"] = field(default_factory=dict, repr=False, compare=False)

    def digest(self, segments: Segments) -> str:
        """16 hexadecimal digits that decide what is scored: the tokens up to the last that is read, and where."""
        end = int(max(segments.starts)) + segments.length + 1
        if end not in self._digests:
            self._digests[end] = hashlib.sha256(self.tokens[:end].numpy().tobytes())
        found = self._digests[end].copy()
        found.update(np.asarray(segments.starts, dtype=np.int64).tobytes())
        found.update(repr((segments.length, segments.first, self.token_bytes is not None)).encode())
        if self.documents is not None:
            found.update(self.documents[: np.searchsorted(self.documents, end)].tobytes())
        return found.hexdigest()[:16]


def as_text(tokens: Tensor | np.ndarray | Sequence[int] | Text, vocab_size: int | None) -> Text:
    """A text of plain tokens, their ids checked. Raises UserError."""
    if isinstance(tokens, Text):
        check_ids(tokens.tokens, vocab_size)
        return tokens
    stream = torch.as_tensor(tokens)
    if stream.dim() != 1 or stream.is_floating_point() or stream.is_complex() or stream.dtype == torch.bool:
        raise UserError(f"tokens must be a vector of integers, not {stream.dtype} of shape {tuple(stream.shape)}")
    stream = stream.to("cpu", torch.int64)
    check_ids(stream, vocab_size)
    return Text(stream)


def check_ids(stream: Tensor, vocab_size: int | None) -> None:
    """Raises UserError for a token id outside of the vocabulary (None: for a negative one)."""
    if not len(stream):
        return
    low, high = (extreme.item() for extreme in torch.aminmax(stream))
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        wrong = low if low < 0 else high
        limit = f" of {vocab_size:,}" if vocab_size is not None else ""
        raise UserError(f"token id {wrong} is outside the vocabulary{limit}: the text was made with another tokenizer")


def validation_text(config: Config, max_tokens: int | None, token_bytes: np.ndarray | None = None) -> Text:
    """The validation documents that the configuration names, one after the other; at most so many tokens."""
    tokens = evaluation_tokens(config, "valid", max_tokens)
    prefixes, split = evaluation_corpora(config, "valid")
    lengths = np.concatenate([document_lengths(prefix, split, "valid") for prefix in prefixes])
    ends = np.cumsum(lengths)
    inside = ends[ends < len(tokens)]
    offsets = np.concatenate(([0], inside, [len(tokens)]))
    return Text(torch.from_numpy(tokens), offsets, None, token_bytes, corpus_name(prefixes))


def text_by_document(
    config: Config,
    longest: int,
    max_tokens: int | None,
    token_bytes: np.ndarray | None = None,
    *,
    quiet: bool = False,
) -> Text:
    """The validation documents cut into rows of `longest` tokens and the one that follows them, each from one document;
    short documents are joined to fill the rows at the end. Raises UserError where no row can be filled.
    """
    prefixes, split = evaluation_corpora(config, "valid")
    if len(prefixes) > 1:
        raise UserError("--document-aware reads one corpus; name it with data-path")
    found = document_segments(prefixes[0], split, "valid", longest, max_tokens, join_short=True)
    joined = int(np.sum(found.documents < 0))
    if joined and not quiet:
        print(
            f"--document-aware: {len(found.documents) - joined:,} texts of {longest:,} tokens are each from one "
            f"document, {joined:,} are short documents joined",
            flush=True,
        )
    # A joined row is a text of its own: which documents it is made of, nobody has counted.
    new = np.ones(len(found.documents), dtype=bool)
    new[1:] = (found.documents[1:] != found.documents[:-1]) | (found.documents[1:] < 0)
    offsets = np.concatenate((np.flatnonzero(new), [len(new)])) * (longest + 1)
    tokens = torch.from_numpy(found.tokens).flatten()
    return Text(tokens, offsets, longest + 1, token_bytes, corpus_name(prefixes))


def corpus_name(prefixes: Sequence[str]) -> str:
    """The corpus' files without `_text_document`; several joined by +."""
    return "+".join(Path(prefix).name.removesuffix("_document").removesuffix("_text") for prefix in prefixes)
