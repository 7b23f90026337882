"""Which corpora, and which of their documents, make up training, validation and test. NumPy is enough for this."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.config.schema import split_shares
from megatron.utils.errors import UserError

PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Blend:
    """Prefixes of the corpora to draw from, with their shares; equal shares where none are given (GPT-NeoX's rule).

    Attributes:
        by_documents: exponent a: the shares are proportional to (number of documents)^a, in place of weights. Less than
            1 draws more often from small corpora (Conneau et al. 2020, arXiv:1911.02116, take 0.3).
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    by_documents: float | None = None

    def __post_init__(self):
        if not self.prefixes:
            raise UserError("a list of data paths is empty")
        if self.weights is None:
            return
        if len(self.weights) != len(self.prefixes):
            raise UserError(
                f"{len(self.weights)} weights for {len(self.prefixes)} data paths ({', '.join(self.prefixes)})"
            )
        if not all(np.isfinite(weight) and weight > 0 for weight in self.weights):
            raise UserError(f"data weights must be positive numbers, but are {list(self.weights)}")

    def shares(self, documents: Sequence[int]) -> list[float]:
        """What to draw from each corpus, not normalized; `documents` is how many each has."""
        if self.by_documents is not None:
            return [count**self.by_documents for count in documents]
        return list(self.weights or [1.0] * len(self.prefixes))


def config_blends(config) -> list[Blend | None] | None:
    """The blends of train, valid, test that `config.data` names; None if it names one corpus to split instead."""
    data = config.data
    given = [
        (data.train_data_paths, data.train_data_weights),
        (data.valid_data_paths, data.valid_data_weights),
        (data.test_data_paths, data.test_data_weights),
    ]
    if not any(paths for paths, _ in given):
        if not data.data_path:
            raise UserError("no data: set data-path, or train-data-paths and valid-data-paths")
        return None
    by_documents = data.weighted_sampler_alpha if data.weight_by_num_documents else None
    return [
        Blend(tuple(paths), tuple(weights) if weights else None, by_documents) if paths else None
        for paths, weights in given
    ]


def split_spans(split: str, sequences: int) -> list[tuple[int, int] | None]:
    """First and one-past-last sequence of train, valid and test; None for a share of 0.

    The arithmetic, to the last bit, is megatron-core's: shares are normalized, added up, and multiplied by the number
    of sequences; bounds are rounded.

    Raises:
        UserError: as `split_shares`.
    """
    shares = split_shares(split)
    total = np.sum(np.array(shares, dtype=np.float64))
    spans: list[tuple[int, int] | None] = []
    start = 0.0
    for share in shares:
        end = start + float(share / total)
        spans.append((round(start * sequences), round(end * sequences)) if end > start else None)
        start = end
    return spans


def part_span(split: str | None, part: str, sequences: int, name: str) -> tuple[int, int]:
    """First and one-past-last sequence of `part`; all of them without a split. `name` is the corpus, for messages."""
    if part not in PARTS:
        raise UserError(f"unknown part {part!r}; the parts of a split are {', '.join(PARTS)}")
    if split is None:
        return 0, sequences
    span = split_spans(split, sequences)[PARTS.index(part)]
    if span is None or span[0] == span[1]:
        raise UserError(f"split {split!r} of {name} ({sequences:,} documents) leaves nothing for {part}")
    return span
