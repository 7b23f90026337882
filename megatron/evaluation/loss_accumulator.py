"""Losses added up: over documents, over positions, and what follows from the sums.

All sums are float64 on the CPU. Those of several ranks are added.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.evaluation.protocols import Segments
from megatron.evaluation.ranks import Ranks
from megatron.evaluation.scoring import Scored
from megatron.evaluation.text import Text


class Tally:
    """Sums of the losses of segments of a text, of which this rank scores its share."""

    def __init__(self, text: Text, segments: Segments, ranks: Ranks):
        self._text, self._segments, self._ranks = text, segments, ranks
        clusters = len(segments.starts) if text.documents is None else len(text.documents) - 1
        self._offsets = None if text.documents is None else torch.from_numpy(text.documents)
        self._bytes_of = None if text.token_bytes is None else torch.from_numpy(text.token_bytes)
        self.losses, self.counts = _zeros(clusters)
        self.position_losses, self.position_counts = _zeros(segments.length)
        self.bytes = torch.zeros((), dtype=torch.int64)

    def add(self, scored: Scored) -> None:
        """Losses of this rank's share; `scored.segment` counts within the share."""
        losses = scored.losses.to("cpu", torch.float64)
        rows, columns = losses.shape
        local = torch.arange(scored.segment, scored.segment + rows)
        index = self._ranks.rank + local * self._ranks.size
        starts = torch.tensor([self._segments.starts[number] for number in index.tolist()])
        positions = torch.arange(scored.position, scored.position + columns)
        targets = starts[:, None] + positions + 1
        if self._offsets is None:
            clusters = index[:, None].expand(rows, columns)
        else:
            clusters = torch.searchsorted(self._offsets, targets, right=True) - 1
        ones = torch.ones(losses.numel(), dtype=torch.int64)
        self.losses.index_add_(0, clusters.flatten(), losses.flatten())
        self.counts.index_add_(0, clusters.flatten(), ones)
        self.position_losses[positions] += losses.sum(dim=0)
        self.position_counts[positions] += rows
        if self._bytes_of is not None:
            self.bytes += self._bytes_of[self._text.tokens[targets]].sum()

    def gather(self) -> None:
        """Add the sums of all ranks: every rank then holds the whole."""
        self._ranks.add(self.losses, self.counts, self.position_losses, self.position_counts, self.bytes)

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def documents(self) -> int | None:
        """Documents that hold a target; None where they are not known."""
        return None if self._offsets is None else int((self.counts > 0).sum())

    @property
    def loss(self) -> float:
        """Mean over targets, in nats."""
        return float(self.losses.sum()) / self.tokens

    @property
    def stderr(self) -> float | None:
        """Standard error of the loss over documents (or segments), None with fewer than two.

        The loss is a ratio of sums over documents, its error that of a ratio estimate: with m the loss and of document
        d the sum S_d over n_d targets, sqrt(D / (D - 1) * sum (S_d - m n_d)^2) / N. For equal n_d this is the standard
        error of the mean of the documents' losses.
        """
        return standard_error(self.losses.numpy(), self.counts.numpy())

    @property
    def bits_per_byte(self) -> float | None:
        """Bits of all targets over the bytes of their text; None where these are not known."""
        if self._bytes_of is None or not int(self.bytes):
            return None
        return float(self.losses.sum()) / math.log(2) / int(self.bytes)

    def by_position(self, bins: int) -> "PositionLosses":
        """Mean losses of at most so many equal bins of the scored positions; each edge is a whole position."""
        first, length = self._segments.first, self._segments.length
        edges = np.unique(np.linspace(first, length, bins + 1).round().astype(np.int64))
        sums = np.add.reduceat(self.position_losses.numpy(), edges[:-1])
        counts = np.add.reduceat(self.position_counts.numpy(), edges[:-1])
        return PositionLosses(edges.tolist(), (sums / counts).tolist(), counts.tolist())


@dataclass(frozen=True)
class PositionLosses:
    """Bin i is `[edges[i], edges[i + 1])`: its mean loss in nats, and how many targets it has."""

    edges: list[int]
    losses: list[float]
    counts: list[int]


def standard_error(sums: np.ndarray, counts: np.ndarray) -> float | None:
    """Of the ratio sum(sums) / sum(counts) over the entries with a count; None with fewer than two."""
    sums, counts = sums[counts > 0], counts[counts > 0]
    if len(sums) < 2:
        return None
    residual = sums - sums.sum() / counts.sum() * counts
    return float(np.sqrt(len(sums) / (len(sums) - 1) * np.sum(residual**2)) / counts.sum())


def _zeros(length: int) -> tuple[Tensor, Tensor]:
    """Sums and counts."""
    return torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.int64)
