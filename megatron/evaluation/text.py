"""The text that models are evaluated on: a token stream, its document boundaries and its size in bytes."""

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

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.integer]]


@dataclass(frozen=True)
class Text:
    """A token stream.

    Attributes:
        tokens: int64 `[n]`.
        documents: int64 `[documents + 1]`, the start of each document, followed by n; None if not known.
        row: the stream consists of rows of this many tokens, and no segment may cross rows; None for one stream.
        token_bytes: int64 `[vocabulary]`, the number of UTF-8 bytes of each token; None if not known.
        corpus: its name.
    """

    tokens: Tensor
    documents: IntArray | None = None
    row: int | None = None
    token_bytes: IntArray | None = None
    corpus: str | None = None
    _digests: dict[int, "hashlib._Hash"] = field(default_factory=dict, repr=False, compare=False)

    def digest(self, segments: Segments) -> str:
        """16 hexadecimal digits that identify what is scored: the tokens up to the last one read, and the segments."""
        end = int(max(segments.starts)) + segments.length + 1
        if end not in self._digests:
            self._digests[end] = hashlib.sha256(self.tokens[:end].numpy().tobytes())
        digest = self._digests[end].copy()
        digest.update(np.asarray(segments.starts, dtype=np.int64).tobytes())
        digest.update(repr((segments.length, segments.first, self.token_bytes is not None)).encode())
        if self.documents is not None:
            digest.update(self.documents[: np.searchsorted(self.documents, end)].tobytes())
        return digest.hexdigest()[:16]


def as_text(tokens: Tensor | IntArray | Sequence[int] | Text, vocab_size: int | None) -> Text:
    """A `Text` of the given tokens. Raises UserError if they are not a vector of token ids below `vocab_size`."""
    if isinstance(tokens, Text):
        check_ids(tokens.tokens, vocab_size)
        return tokens
    stream = torch.as_tensor(tokens)
    if stream.dim() != 1 or stream.is_floating_point() or stream.is_complex() or stream.dtype == torch.bool:
        raise UserError(f"tokens must be a vector of integers, not {stream.dtype} of shape {tuple(stream.shape)}")
    stream = stream.to("cpu", torch.int64)
    check_ids(stream, vocab_size)
    return Text(stream)


def check_ids(tokens: Tensor, vocab_size: int | None) -> None:
    """Raises UserError if a token id is negative or, with `vocab_size`, not below it."""
    if not len(tokens):
        return
    low, high = (extreme.item() for extreme in torch.aminmax(tokens))
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        invalid = low if low < 0 else high
        limit = f" of {vocab_size:,}" if vocab_size is not None else ""
        raise UserError(
            f"token id {invalid} is outside the vocabulary{limit}: the text was tokenized with another tokenizer"
        )


def validation_text(config: Config, max_tokens: int | None, token_bytes: IntArray | None = None) -> Text:
    """The configured validation documents, concatenated. max_tokens: where to stop; None for all of them."""
    tokens = evaluation_tokens(config, "valid", max_tokens)
    prefixes, split = evaluation_corpora(config, "valid")
    lengths = np.concatenate([document_lengths(prefix, split, "valid") for prefix in prefixes])
    ends = np.cumsum(lengths)
    offsets = np.concatenate(([0], ends[ends < len(tokens)], [len(tokens)]))
    return Text(torch.from_numpy(tokens), offsets, None, token_bytes, corpus_name(prefixes))


def text_by_document(
    config: Config,
    longest: int,
    max_tokens: int | None,
    token_bytes: IntArray | None = None,
    *,
    quiet: bool = False,
) -> Text:
    """The configured validation documents as rows of `longest + 1` tokens (inputs and targets) from one document each.

    Documents that are too short are concatenated into further rows. Raises UserError if the text is too short for a
    single row.
    """
    prefixes, split = evaluation_corpora(config, "valid")
    if len(prefixes) > 1:
        raise UserError("--document-aware reads a single corpus; set data-path to one corpus")
    rows = document_segments(prefixes[0], split, "valid", longest, max_tokens, join_short=True)
    joined = int(np.sum(rows.documents < 0))
    if joined and not quiet:
        print(
            f"--document-aware: {len(rows.documents) - joined:,} rows of {longest:,} tokens come from one document "
            f"each, {joined:,} are concatenated short documents",
            flush=True,
        )
    # The boundaries within a concatenated row are not known: it counts as one document.
    starts_document = np.ones(len(rows.documents), dtype=bool)
    starts_document[1:] = (rows.documents[1:] != rows.documents[:-1]) | (rows.documents[1:] < 0)
    offsets = np.concatenate((np.flatnonzero(starts_document), [len(starts_document)])) * (longest + 1)
    tokens = torch.from_numpy(rows.tokens).flatten()
    return Text(tokens, offsets, longest + 1, token_bytes, corpus_name(prefixes))


def corpus_name(prefixes: Sequence[str]) -> str:
    """The file names without `_text_document`; several are joined by +."""
    return "+".join(Path(prefix).name.removesuffix("_document").removesuffix("_text") for prefix in prefixes)
