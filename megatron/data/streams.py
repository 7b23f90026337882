"""Evaluation data: the tokens of a validation or test part, as one stream or as segments of single documents.

Training shuffles documents. Evaluation reads them in file order, so the stream is the same for every seed. The part
boundaries are those of training, so no training document is included.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.config import Config
from megatron.data.indexed_dataset import TokenFile, open_indexed_files
from megatron.data.splits import PARTS, config_blends, part_span
from megatron.utils.errors import UserError


class TokenStream:
    """Concatenated parts of files, which are read only where the stream is indexed."""

    def __init__(self, files: Sequence[TokenFile]):
        self._files = list(files)
        self._ends = np.cumsum([len(file) for file in files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        """int64 tokens of a slice without a step, or at int64 indices >= 0 of any shape, in that shape."""
        indices = np.arange(*index.indices(len(self))) if isinstance(index, slice) else index.numpy()
        tokens = np.empty(indices.shape, dtype=np.int64)
        owners = np.searchsorted(self._ends, indices, side="right")
        for owner in np.unique(owners):
            start = self._ends[owner] - len(self._files[owner])
            tokens[owners == owner] = self._files[owner][indices[owners == owner] - start]
        return torch.from_numpy(tokens)


def open_part(prefix: str, split: str | None = "949,50,1", part: str = "valid") -> TokenFile:
    """Open the concatenated documents of one part of a corpus.

    Args:
        prefix: path without .bin and .idx.
        split: as for training. None means the whole corpus.
        part: "train", "valid" or "test".

    Raises UserError if the files are invalid, or the part has no documents.
    """
    files = open_indexed_files(prefix)
    return files.open_tokens(*part_span(split, part, files.sequences, files.prefix))


def document_lengths(prefix: str, split: str | None = "949,50,1", part: str = "valid") -> np.ndarray:
    """Return the tokens in each document of `open_part(prefix, split, part)`, int64 [documents]."""
    files = open_indexed_files(prefix)
    first, last = part_span(split, part, files.sequences, files.prefix)
    return files.lengths[first:last].astype(np.int64)


class DocumentSegments(NamedTuple):
    """Segments that each come from a single document.

    Attributes:
        tokens: int64 [segments, length + 1]; inputs are all but the last token, labels all but the first.
        documents: int64 [segments], index of the document in its part; -1 for segments of joined short documents.
        left_out: number of tokens in no segment: ends of documents, and short documents.
    """

    tokens: np.ndarray
    documents: np.ndarray
    left_out: int


def document_segments(
    prefix: str,
    split: str | None = "949,50,1",
    part: str = "valid",
    length: int = 2048,
    max_tokens: int | None = None,
    join_short: bool = False,
) -> DocumentSegments:
    """Cut documents into segments of `length` tokens that never cross a document boundary, in file order.

    A document of n tokens gives (n - 1) // length consecutive segments, and each target is scored once. In a plain
    stream, by contrast, most long segments consist of several short documents, which give each other no useful context.

    To score the same tokens at shorter lengths, request the longest length and cut its rows.

    Args:
        prefix, split, part: as for `open_part`.
        max_tokens: maximum number of targets, rounded down to whole segments, but at least one segment. Evenly spaced
            segments are then chosen from all of them.
        join_short: append segments cut from the concatenation of all documents shorter than length + 1 tokens.

    Raises UserError if the files are invalid, or no document is long enough for a segment.
    """
    # Segments inside the documents that are long enough.
    files = open_indexed_files(prefix)
    first, last = part_span(split, part, files.sequences, files.prefix)
    lengths = files.lengths[first:last].astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    counts = np.maximum(lengths - 1, 0) // length
    documents = np.repeat(np.arange(len(lengths)), counts)
    segment_in_document = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = offsets[documents] + segment_in_document * length

    # Segments of all other documents, one after the other.
    tokens = files.open_tokens(first, last)
    short = [tokens[offsets[index] : offsets[index + 1]] for index in np.flatnonzero(counts == 0)] if join_short else []
    joined = np.concatenate(short) if short else np.zeros(0, tokens.dtype)
    joined_starts = range(0, len(joined) - length, length)

    # Evenly spaced segments of both kinds.
    total = len(starts) + len(joined_starts)
    chosen = range(total) if max_tokens is None else evenly_spaced(total, max(max_tokens // length, 1))
    documents = documents[[index for index in chosen if index < len(starts)]]
    rows = [tokens[starts[index] : starts[index] + length + 1] for index in chosen if index < len(starts)]
    rows += [joined[joined_starts[index - len(starts)] :][: length + 1] for index in chosen if index >= len(starts)]
    if not rows:
        raise UserError(
            f"no document of {files.prefix} ({part}) has the {length + 1:,} tokens that a segment of {length:,} needs: "
            f"the longest has {int(lengths.max()):,}; use shorter segments, join short documents, or use the stream"
        )

    # Joined segments belong to no document.
    row_documents = np.full(len(rows), -1, dtype=np.int64)
    row_documents[: len(documents)] = documents

    # Consecutive segments of one document share a token.
    consecutive = np.diff(np.fromiter(chosen, dtype=np.int64)) == 1
    shared = int(np.sum(consecutive & (row_documents[1:] == row_documents[:-1])))
    left_out = int(lengths.sum()) - len(rows) * (length + 1) + shared
    return DocumentSegments(np.stack(rows).astype(np.int64), row_documents, left_out)


def evenly_spaced(total: int, count: int) -> Sequence[int]:
    """`count` evenly spaced indices of `total` items, starting at 0; all of them if there are not more."""
    return range(total) if count >= total else [index * total // count for index in range(count)]


def evaluation_stream(config: Config, part: str = "valid") -> TokenStream:
    """Return the stream of a part that `config.data` defines: a share of data-path, or e.g. valid-data-paths.

    Several corpora are concatenated in the order of their list. Their weights, which are for sampling, are ignored.
    """
    prefixes, split = evaluation_corpora(config, part)
    return TokenStream([open_part(prefix, split, part) for prefix in prefixes])


def evaluation_corpora(config: Config, part: str = "valid") -> tuple[Sequence[str], str | None]:
    """Return the prefixes of the corpora for a part, and the split that selects it (None: the corpora are the part).

    Raises UserError if `config.data` has no data for this part.
    """
    blends = config_blends(config)
    if blends is None:
        assert config.data.data_path is not None  # checked by config_blends
        return [config.data.data_path], config.data.split
    blend = dict(zip(PARTS, blends, strict=True)).get(part)
    if blend is None:
        raise UserError(f"no {part} data: {part}-data-paths is not set")
    return blend.prefixes, None
