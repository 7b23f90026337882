"""Evaluation data: the tokens of a validation or test part, as one stream or as segments of single documents.

Training shuffles documents. Evaluation reads them in file order, so the stream is the same for every seed. The part
boundaries are those of training, so no training document is included.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.config import Config
from megatron.data.indexed_dataset import open_indexed_files
from megatron.data.splits import PARTS, config_blends, part_span
from megatron.utils.errors import UserError


def validation_stream(
    prefix: str, split: str | None = "949,50,1", part: str = "valid", max_tokens: int | None = None
) -> np.ndarray:
    """Return the concatenated documents of one part of a corpus. Reads only the returned tokens.

    Args:
        prefix: path without .bin and .idx.
        split: as for training. None means the whole corpus.
        part: "train", "valid" or "test".
        max_tokens: maximum number of tokens.

    Returns:
        int64 [tokens].

    Raises:
        UserError: the files are invalid, or the part has no documents.
    """
    files = open_indexed_files(prefix)
    first, last = part_span(split, part, files.sequences, files.prefix)
    offsets = files.offsets()
    start, stop = int(offsets[first]), int(offsets[last])
    if max_tokens is not None:
        stop = min(stop, start + max_tokens)
    return files.map_tokens()[start:stop].astype(np.int64)


def document_lengths(prefix: str, split: str | None = "949,50,1", part: str = "valid") -> np.ndarray:
    """Return the tokens in each document of `validation_stream(prefix, split, part)`, int64 [documents]."""
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
        prefix, split, part: as for `validation_stream`.
        max_tokens: maximum number of targets, rounded down to whole segments, but at least one segment.
        join_short: append segments cut from the concatenation of all documents shorter than length + 1 tokens.

    Raises:
        UserError: the files are invalid, or no document is long enough for a segment.
    """
    if length < 1:
        raise UserError(f"segment length is {length}; it must be at least 1")
    files = open_indexed_files(prefix)
    first, last = part_span(split, part, files.sequences, files.prefix)
    lengths, offsets = files.lengths[first:last].astype(np.int64), files.offsets()[first : last + 1]
    counts = np.maximum(lengths - 1, 0) // length
    max_segments = None if max_tokens is None else max(max_tokens // length, 1)
    documents = np.repeat(np.arange(len(lengths)), counts)[:max_segments]
    segment_in_document = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = offsets[documents] + segment_in_document[: len(documents)] * length
    tokens = files.map_tokens()
    rows = [tokens[start : start + length + 1] for start in starts]
    if join_short and (max_segments is None or len(rows) < max_segments):
        short = [tokens[offsets[index] : offsets[index + 1]] for index in np.flatnonzero(counts == 0)]
        joined = np.concatenate(short) if short else np.zeros(0, tokens.dtype)
        remaining = None if max_segments is None else max_segments - len(rows)
        rows += [joined[start : start + length + 1] for start in range(0, len(joined) - length, length)[:remaining]]
    if not rows:
        raise UserError(
            f"no document of {files.prefix} ({part}) has the {length + 1:,} tokens that a segment of {length:,} needs: "
            f"the longest has {int(lengths.max()):,}; use shorter segments, join short documents, or use the stream"
        )
    row_documents = np.full(len(rows), -1, dtype=np.int64)
    row_documents[: len(documents)] = documents
    # Consecutive rows of one document share a token.
    shared = int(np.sum(row_documents[1:] == row_documents[:-1]))
    left_out = int(lengths.sum()) - len(rows) * (length + 1) + shared
    return DocumentSegments(np.stack(rows).astype(np.int64), row_documents, left_out)


def evaluation_tokens(config: Config, part: str = "valid", max_tokens: int | None = None) -> np.ndarray:
    """Return the stream of a part that `config.data` defines: a share of data-path, or e.g. valid-data-paths.

    Several corpora are concatenated in the order of their list. Their weights, which are for sampling, are ignored.

    Returns:
        int64 [tokens], at most `max_tokens`.
    """
    prefixes, split = evaluation_corpora(config, part)
    streams: list[np.ndarray] = []
    for prefix in prefixes:
        remaining = None if max_tokens is None else max_tokens - sum(map(len, streams))
        if remaining == 0:
            break
        streams.append(validation_stream(prefix, split, part, remaining))
    return np.concatenate(streams)


def evaluation_corpora(config: Config, part: str = "valid") -> tuple[Sequence[str], str | None]:
    """Return the prefixes of the corpora for a part, and the split that selects it (None: the corpora are the part).

    Raises:
        UserError: `config.data` has no data for this part.
    """
    blends = config_blends(config)
    if blends is None:
        assert config.data.data_path is not None  # checked by config_blends
        return [config.data.data_path], config.data.split
    blend = dict(zip(PARTS, blends, strict=True)).get(part)
    if blend is None:
        raise UserError(f"no {part} data: {part}-data-paths is not set")
    return blend.prefixes, None
