"""Evaluation data: the tokens of a validation or test part, as one stream.

Training shuffles documents. Evaluation reads them in file order, so the stream is the same for
every seed. The part boundaries are those of training, so no training document is included.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.config import Config
from megatron.data.indexed_dataset import TokenFile, merged_datasets, open_indexed_files
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
        """int64 tokens of a slice without a step, or at int64 indices >= 0, in their shape."""
        if isinstance(index, slice):
            indices = np.arange(*index.indices(len(self)))
        else:
            indices = index.numpy()

        # From each file the tokens that it has.
        tokens = np.empty(indices.shape, dtype=np.int64)
        owners = np.searchsorted(self._ends, indices, side="right")
        for owner in np.unique(owners):
            file, is_owned = self._files[owner], owners == owner
            start = self._ends[owner] - len(file)
            tokens[is_owned] = file[indices[is_owned] - start]
        return torch.from_numpy(tokens)


def open_part(prefix: str, split: str | None, part: str) -> tuple[TokenFile, np.ndarray]:
    """The concatenated documents of one part of a corpus, or of all of it if `split` is None: the
    tokens, and the number of tokens in each document, int64 [documents].

    Raises UserError if the files are invalid, or the part has no documents.
    """
    files = open_indexed_files(prefix)
    first, last = part_span(split, part, files.sequences, files.prefix)
    return files.open_tokens(first, last), files.lengths[first:last].astype(np.int64)


def evaluation_stream(config: Config, part: str = "valid") -> tuple[TokenStream, np.ndarray]:
    """Return a part that `config.data` defines, a share of data-path, or e.g. valid-data-paths: the
    tokens, and the number of tokens in each document, int64 [documents].

    Several corpora are concatenated in the order of their list. Their weights, which are for
    sampling, are ignored.
    """
    prefixes, split = evaluation_corpora(config, part)
    files, lengths = zip(*(open_part(prefix, split, part) for prefix in prefixes), strict=True)
    return TokenStream(files), np.concatenate(lengths)


def part_documents(config: Config, part: str) -> dict[str, tuple[int, int]]:
    """`data_fingerprint` -> first and one-past-last document of a part in each of its corpora, and
    instead of a merged corpus in those that it was merged from. Raises UserError like
    `evaluation_stream`.
    """
    prefixes, split = evaluation_corpora(config, part)
    documents: dict[str, tuple[int, int]] = {}
    for prefix in prefixes:
        files = open_indexed_files(prefix)
        first, end = part_span(split, part, files.sequences, prefix)
        start = 0  # of a merged corpus in this one
        for fingerprint, count in merged_datasets(files):
            part_first, part_end = max(first - start, 0), min(end - start, count)
            if part_first < part_end:
                before = documents.get(fingerprint, (part_first, part_end))
                documents[fingerprint] = min(part_first, before[0]), max(part_end, before[1])
            start += count
    return documents


def evaluation_corpora(config: Config, part: str) -> tuple[Sequence[str], str | None]:
    """Return the prefixes of the corpora for a part, and the split that selects it (None: the
    corpora are the part).

    Raises UserError if `config.data` has no data for this part.
    """
    blend = config_blends(config)[PARTS.index(part)]
    if blend is None:
        raise UserError(f"no {part} data: {part}-data-paths is not set")
    return blend.prefixes, blend.split
