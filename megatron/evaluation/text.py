"""The text that models are evaluated on: a token stream, its document boundaries and its size in
bytes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.config import Config
from megatron.data.indexed_dataset import check_tokenizer
from megatron.data.streams import TokenStream, evaluation_corpora, evaluation_stream
from megatron.evaluation.protocols import Protocol, Segments
from megatron.tokenizer.interface import Tokenizer
from megatron.utils.errors import UserError, visible

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.integer]]
READ_TOKENS = 1 << 22  # tokens read at once to compute a digest


@dataclass(frozen=True)
class Text:
    """A token stream.

    Attributes:
        tokens: int64 `[n]`, or a stream of n tokens that reads its files only where it is indexed.
        documents: int64 `[documents + 1]`, the start of each document, followed by n; None if not
            known.
        token_bytes: int64 `[vocabulary]`, the number of UTF-8 bytes of each token; None if not
            known.
        corpus: its name.
        tokenizer_is_known: whether the data name their tokenizer, so that the tokens determine
            `token_bytes`.
        source: where it is from, for error messages; None if not known.
        bos: the token that replaces the first one of each segment, which is only context; None: no
            token.
    """

    tokens: Tensor | TokenStream
    documents: IntArray | None = None
    token_bytes: IntArray | None = None
    corpus: str | None = None
    tokenizer_is_known: bool = False
    source: str | None = None
    bos: int | None = None
    _read: dict[bytes, "_Read"] = field(default_factory=dict, repr=False, compare=False)

    def plan(
        self, protocol: Protocol, lengths: Sequence[int], token_budget: int | None
    ) -> list[Segments]:
        """The segments that the protocol scores at each length. Raises UserError, which names the
        source and its size, if there are none.
        """
        try:
            return protocol.plan(len(self.tokens), lengths, token_budget)
        except UserError as error:
            raise self.error(str(error)) from error

    def error(self, problem: str) -> UserError:
        """An error that names the source of this text and its size."""
        if self.source is not None:
            problem = f"{self.source} ({len(self.tokens):,} tokens): {problem}"
        return UserError(problem)

    def digest(self, segments: Segments) -> str:
        """16 hexadecimal digits that identify what is scored: the tokens that are read, the
        segments, `bos`, and the number of bytes of the tokens.
        """
        # The tokens, and how they are cut.
        starts = np.asarray(segments.starts, dtype=np.int64)
        digest = self._read_digest(_merged(np.unique(starts), segments.length + 1))
        digest.update(starts.tobytes())
        parts = (segments.length, segments.first, self.token_bytes is not None)
        digest.update(repr(parts).encode())

        # What else changes the values. The tokenizer's name stands for its bytes.
        if self.bos is not None:
            digest.update(f"bos {self.bos}".encode())
        if self.token_bytes is not None and not self.tokenizer_is_known:
            digest.update(self.token_bytes.tobytes())
        return digest.hexdigest()[:16]

    def targets_digest(self, segments: Segments) -> str:
        """16 hexadecimal digits that identify the scored tokens, regardless of their context."""
        first_targets = np.unique(segments.starts) + segments.first + 1
        spans = _merged(first_targets, segments.length - segments.first)
        digest = self._read_digest(spans)
        digest.update(spans.tobytes())
        return digest.hexdigest()[:16]

    def _read_digest(self, spans: IntArray) -> "hashlib._Hash":
        """A new digest of the tokens in these spans and of the documents that they are in."""
        key = spans.tobytes()
        if key not in self._read:
            digest, low, high = hashlib.sha256(), np.iinfo(np.int64).max, np.iinfo(np.int64).min
            # A part of the stream at a time, as it can be larger than the memory.
            for first, end in spans:
                for start in range(first, end, READ_TOKENS):
                    ids = self.tokens[start : min(start + READ_TOKENS, end)].numpy()
                    digest.update(ids.tobytes())
                    low, high = min(low, int(ids.min())), max(high, int(ids.max()))

            # The documents that the spans touch.
            if self.documents is not None:
                begin, last = np.searchsorted(self.documents, (spans[0, 0], spans[-1, 1]))
                digest.update(self.documents[max(begin - 1, 0) : last].tobytes())
            self._read[key] = _Read(digest, low, high)
        return self._read[key].digest.copy()

    def check_ids(self, vocab_size: int | None) -> None:
        """Raises UserError if a token of the segments passed to `digest` is negative or not below
        `vocab_size`.
        """
        for read in self._read.values():
            bos = read.low if self.bos is None else self.bos
            check_range(min(read.low, bos), max(read.high, bos), vocab_size)


class PlannedText(Text):
    """The size of a text, to check whether a measurement is possible. Its tokens are a tensor
    without data.
    """

    def digest(self, segments: Segments) -> str:
        """An empty string."""
        return ""


class _Read(NamedTuple):
    """The digest of tokens that were read, and the smallest and largest of them."""

    digest: "hashlib._Hash"
    low: int
    high: int


def _merged(starts: IntArray, length: int) -> IntArray:
    """The union of the spans of `length` positions at sorted `starts`, as disjoint spans (first,
    end) `[spans, 2]`.
    """
    # A span begins after a gap, and ends before the next one.
    new = np.concatenate(([True], starts[1:] > starts[:-1] + length))
    last = np.concatenate((new[1:], [True]))
    return np.stack((starts[new], starts[last] + length), axis=1)


def as_text(tokens: Tensor | IntArray | Sequence[int] | Text) -> Text:
    """A `Text` of the given tokens. Raises UserError if they are not a vector of integers."""
    if isinstance(tokens, Text):
        return tokens
    stream = torch.as_tensor(tokens)
    is_integer = not (stream.is_floating_point() or stream.is_complex())
    if stream.dim() != 1 or not is_integer or stream.dtype == torch.bool:
        raise UserError(
            f"tokens must be a vector of integers, not {stream.dtype} of shape "
            f"{tuple(stream.shape)}"
        )
    return Text(stream.to("cpu", torch.int64))


def check_range(low: int, high: int, vocab_size: int | None) -> None:
    """Raises UserError if the smallest id is negative or, with `vocab_size`, the largest one is not
    below it.
    """
    place = "the vocabulary"
    if vocab_size is not None:
        place += f" of {vocab_size:,}"
    invalid = low if low < 0 else high
    if invalid < 0 or (vocab_size is not None and invalid >= vocab_size):
        raise UserError(
            f"token id {invalid} is outside {place}: the text was tokenized with another tokenizer"
        )


def evaluation_text(
    config: Config, tokenizer: Tokenizer | None = None, part: str = "valid"
) -> Text:
    """The configured documents of a part (`valid` or `test`), concatenated. Their tokens are read
    when they are used.

    tokenizer: that of the text, for bits per byte. Raises UserError if the data were built with
        another one.
    """
    # Bytes per token are only known with the tokenizer of the data.
    prefixes, _ = evaluation_corpora(config, part)
    is_known = False
    token_bytes: IntArray | None = None
    if tokenizer is not None:
        known = [check_tokenizer(prefix, tokenizer) for prefix in prefixes]
        is_known = all(known)
        token_bytes = tokenizer.byte_lengths()
    tokens, lengths = evaluation_stream(config, part)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    name, source = corpus_name(prefixes, part), text_source(config, part)
    return Text(tokens, offsets, token_bytes, name, is_known, source)


def text_source(config: Config, part: str) -> str:
    """The files of a part, and the split that selects it from them."""
    prefixes, split = evaluation_corpora(config, part)
    source = visible(", ".join(prefixes))
    if split is not None:
        source += f", {part} part of split {split}"
    return source


def corpus_name(prefixes: Sequence[str], part: str = "valid") -> str:
    """The file names without `_text_document`; several are joined by +. A very long name is
    shortened to what a record may have. The name of the test split says so.
    """
    files = [Path(prefix).name for prefix in prefixes]
    names = [file.removesuffix("_document").removesuffix("_text") for file in files]
    ending = " (test split)" if part == "test" else ""
    return visible("+".join(names))[: 300 - len(ending)] + ending
