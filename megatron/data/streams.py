"""The tokens of a validation or test part as one stream, for evaluation at many lengths.

Training shuffles documents; evaluation reads them in the order of the file, so that a stream is the same for every
seed, and long texts stay whole. The boundaries between the parts are those of training: no training document is here.
"""

from collections.abc import Sequence

import numpy as np

from megatron.config.errors import UserError
from megatron.data.indexed_format import check_indexed_files
from megatron.data.selection import PARTS, config_blends, part_span


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


def evaluation_tokens(config, part: str = "valid", max_tokens: int | None = None) -> np.ndarray:
    """The stream of the part that `config.data` names: a share of data-path, or the corpora of e.g. valid-data-paths.

    Several corpora follow each other in the order of their list; their weights, which are for drawing samples, play no
    role.

    Returns:
        int64 [tokens], at most `max_tokens`.
    """
    blends = config_blends(config)
    if blends is None:
        return validation_stream(config.data.data_path, config.data.split, part, max_tokens)
    blend = dict(zip(PARTS, blends, strict=True)).get(part)
    if blend is None:
        raise UserError(f"no {part} data: {part}-data-paths is not set")
    return _concatenate(blend.prefixes, part, max_tokens)


def _concatenate(prefixes: Sequence[str], part: str, max_tokens: int | None) -> np.ndarray:
    streams: list[np.ndarray] = []
    for prefix in prefixes:
        left = None if max_tokens is None else max_tokens - sum(map(len, streams))
        if left == 0:
            break
        streams.append(validation_stream(prefix, None, part, left))
    return np.concatenate(streams)
