"""The tokens of a validation or test part, for evaluation at many lengths: as one stream, or document by document.

Training shuffles documents; evaluation reads them in the order of the file, so that a stream is the same for every
seed, and long texts stay whole. The boundaries between the parts are those of training: no training document is here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.data.indexed_format import check_indexed_files
from megatron.data.selection import PARTS, config_blends, part_span
from megatron.utils.errors import UserError


def validation_stream(
    prefix: str, split: str | None = "949,50,1", part: str = "valid", max_tokens: int | None = None
) -> np.ndarray:
    """The documents of one part of a corpus, one after the other; only the tokens returned are read.

    Args:
        prefix: path without .bin and .idx.
        split: as in training; None: the whole corpus is the part.
        part: "train", "valid" or "test".
        max_tokens: stop after so many.

    Returns:
        int64 [tokens].

    Raises:
        UserError: no such data, or a part without documents.
    """
    files = check_indexed_files(prefix)
    first, last = part_span(split, part, files.sequences, files.prefix)
    offsets = files.offsets()
    start, stop = int(offsets[first]), int(offsets[last])
    if max_tokens is not None:
        stop = min(stop, start + max_tokens)
    return files.map_tokens()[start:stop].astype(np.int64)


def document_lengths(prefix: str, split: str | None = "949,50,1", part: str = "valid") -> np.ndarray:
    """Tokens in each document of `validation_stream(prefix, split, part)`, in its order: int64 [documents]."""
    files = check_indexed_files(prefix)
    first, last = part_span(split, part, files.sequences, files.prefix)
    return files.lengths[first:last].astype(np.int64)


class DocumentSegments(NamedTuple):
    """Segments of which each is from one document.

    Attributes:
        tokens: int64 [segments, length + 1]: inputs are all but the last, labels all but the first token.
        documents: int64 [segments], the number of the document in its part; -1 where short ones were joined.
        left_out: tokens that are in no segment: rests of documents, and short documents.
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
    """Segments of `length` tokens that never cross from one document to the next, in the order of the file.

    A document of n tokens gives (n - 1) // length of them, one behind the other; each target is scored once. In a plain
    stream most long segments are several short documents, whose beginnings are no help for what follows.

    To score the SAME tokens at shorter lengths, ask for the longest and cut its rows.

    Args:
        prefix, split, part: as of `validation_stream`.
        max_tokens: stop after so many targets (whole segments, at least one).
        join_short: then the documents shorter than length + 1 tokens, laid end to end and cut in the same way.

    Raises:
        UserError: no such data, or no segment at all: the longest document is named.
    """
    if length < 1:
        raise UserError(f"segments of {length} tokens; the length must be at least 1")
    files = check_indexed_files(prefix)
    first, last = part_span(split, part, files.sequences, files.prefix)
    lengths, offsets = files.lengths[first:last].astype(np.int64), files.offsets()[first : last + 1]
    counts = np.maximum(lengths - 1, 0) // length
    most = None if max_tokens is None else max(max_tokens // length, 1)
    documents = np.repeat(np.arange(len(lengths)), counts)[:most]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = offsets[documents] + within[: len(documents)] * length
    tokens = files.map_tokens()
    rows = [tokens[start : start + length + 1] for start in starts]
    if join_short and (most is None or len(rows) < most):
        short = [tokens[offsets[index] : offsets[index + 1]] for index in np.flatnonzero(counts == 0)]
        joined = np.concatenate(short) if short else np.zeros(0, tokens.dtype)
        joint = range(0, len(joined) - length, length)[: None if most is None else most - len(rows)]
        rows += [joined[start : start + length + 1] for start in joint]
    if not rows:
        longest = int(lengths.max())
        raise UserError(
            f"no document of {files.prefix} ({part}) has {length + 1:,} tokens, as a segment of {length:,} needs: the "
            f"longest has {longest:,}; use shorter segments, join short documents, or read the plain stream"
        )
    numbers = np.full(len(rows), -1, dtype=np.int64)
    numbers[: len(documents)] = documents
    # Rows that follow each other in one document share a token.
    shared = int(np.sum(numbers[1:] == numbers[:-1]))
    left_out = int(lengths.sum()) - len(rows) * (length + 1) + shared
    return DocumentSegments(np.stack(rows).astype(np.int64), numbers, left_out)


def evaluation_tokens(config, part: str = "valid", max_tokens: int | None = None) -> np.ndarray:
    """The stream of the part that `config.data` names: a share of data-path, or the corpora of e.g. valid-data-paths.

    Several corpora follow each other in the order of their list; their weights, which are for drawing samples, play no
    role.

    Returns:
        int64 [tokens], at most `max_tokens`.
    """
    prefixes, split = evaluation_corpora(config, part)
    streams: list[np.ndarray] = []
    for prefix in prefixes:
        left = None if max_tokens is None else max_tokens - sum(map(len, streams))
        if left == 0:
            break
        streams.append(validation_stream(prefix, split, part, left))
    return np.concatenate(streams)


def evaluation_corpora(config, part: str = "valid") -> tuple[Sequence[str], str | None]:
    """The prefixes that `config.data` names for a part, and the split that cuts it out of them (None: all of each)."""
    blends = config_blends(config)
    if blends is None:
        return [config.data.data_path], config.data.split
    blend = dict(zip(PARTS, blends, strict=True)).get(part)
    if blend is None:
        raise UserError(f"no {part} data: {part}-data-paths is not set")
    return blend.prefixes, None
