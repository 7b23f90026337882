"""Decides which corpora, and which of their documents, belong to training, validation and test.
Needs no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.config import Config
from megatron.config.schema.data import split_shares
from megatron.utils.errors import UserError

PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Blend:
    """Corpora of a part (train, valid or test), with their weights. Without weights all have the
    same share, as in GPT-NeoX.

    Attributes:
        prefixes: paths without .bin and .idx.
        by_documents: exponent a: weights are (number of documents)^a instead. Values below 1 sample
            more often from small corpora; Conneau et al. 2020 (arXiv:1911.02116) use 0.3.
        split: the shares of all parts in the only corpus; None if the part consists of whole
            corpora.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    by_documents: float | None = None
    split: str | None = None

    def shares(self, documents: Sequence[int]) -> list[float]:
        """Return the unnormalized weight of each corpus, given its number of documents."""
        if self.by_documents is not None:
            return [count**self.by_documents for count in documents]
        return list(self.weights or [1.0] * len(self.prefixes))


def config_blends(config: Config) -> list[Blend | None]:
    """The train, valid and test blends of `config.data`. Raises UserError without data paths."""
    # Paths per part, or else one corpus that is split.
    data = config.data
    paths_and_weights = [
        (data.train_data_paths, data.train_data_weights),
        (data.valid_data_paths, data.valid_data_weights),
        (data.test_data_paths, data.test_data_weights),
    ]
    if not any(paths for paths, _ in paths_and_weights):
        if not data.data_path:
            raise UserError("no data: set data-path, or train-data-paths and valid-data-paths")
        return [Blend((data.data_path,), split=data.split)] * len(PARTS)

    # A part without paths has no blend.
    by_documents = data.weighted_sampler_alpha if data.weight_by_num_documents else None
    blends: list[Blend | None] = []
    for paths, weights in paths_and_weights:
        blend = None
        if paths:
            blend = Blend(paths, weights or None, by_documents)
        blends.append(blend)
    return blends


def dataset_prefixes(config: Config) -> list[str]:
    """The prefixes of all datasets, each once. Raises UserError if no data paths are set."""
    blends = filter(None, config_blends(config))
    return list(dict.fromkeys(prefix for blend in blends for prefix in blend.prefixes))


def split_spans(split: str, sequences: int) -> list[tuple[int, int] | None]:
    """Return the first and one-past-last sequence of train, valid and test; None for a share of 0.

    The arithmetic equals megatron-core's bit by bit: shares are normalized, accumulated, multiplied
    by the number of sequences, and rounded.

    Raises UserError if `split` is invalid (see `split_shares`).
    """
    # In this order: rounding makes other orders differ.
    shares = split_shares(split)
    total = np.sum(np.array(shares, dtype=np.float64))
    spans: list[tuple[int, int] | None] = []
    start = 0.0
    for share in shares:
        end = start + float(share / total)
        span = None
        if end > start:
            span = round(start * sequences), round(end * sequences)
        spans.append(span)
        start = end
    return spans


def part_span(split: str | None, part: str, sequences: int, prefix: str) -> tuple[int, int]:
    """Return the first and one-past-last sequence of a part, or those of the whole corpus if
    `split` is None.

    Raises UserError if the part has no documents.
    """
    # Corpora of a part are not split.
    if split is None:
        return 0, sequences
    span = split_spans(split, sequences)[PARTS.index(part)]
    if span is None or span[0] == span[1]:
        raise UserError(
            f"split {split!r} of {prefix} ({sequences:,} documents) leaves no documents for "
            f"{part}; increase its share"
        )
    return span
