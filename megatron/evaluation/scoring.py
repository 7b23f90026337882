"""The loss of every scored token, in memory that grows linearly with the length.

Each segment is read in chunks of queries through the KV cache, so no tensor is length x length.
Logits are computed for `LOGIT_POSITIONS` positions at a time, so no tensor is length x vocabulary.
As in training, the softmax covers the padded vocabulary.

Legend: b batch (segments), s positions, c positions of a chunk, n tokens of the stream, e hidden
size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kerple.attention import DEFAULT_MODE, AttentionMode
from megatron.data.streams import TokenStream
from megatron.evaluation.protocols import Segments
from megatron.evaluation.records import DocumentGroups
from megatron.evaluation.statistics import standard_error
from megatron.evaluation.text import Text
from megatron.inference.decoder import Decoder
from megatron.model import loss
from megatron.model.gpt import text_length
from megatron.utils.errors import UserError

LOGIT_POSITIONS = 1024


@dataclass(frozen=True)
class HiddenChunk:
    """Hidden states `[b, c, e]` of consecutive segments and positions, of which `segment` and
    `position` are the first. `text`, int64 `[b, length + 1]`, contains these segments and the token
    after each.
    """

    segment: int
    position: int
    text: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class LossChunk:
    """Losses `[b, s]` in nats (float32; float64 for a float64 model) of consecutive segments and
    positions, of which `segment` and `position` are the first. A position predicts the token after
    it.
    """

    segment: int
    position: int
    losses: Tensor


@dataclass(frozen=True)
class SegmentReader:
    """Feeds segments of a token stream to a model.

    Attributes:
        query_chunk: queries computed at once, for a model with a KV cache.
        batch_tokens: tokens of short segments computed at once.
    """

    decoder: Decoder
    device: torch.device
    query_chunk: int
    batch_tokens: int

    def hidden_states(
        self,
        tokens: Tensor | TokenStream,
        segments: Segments,
        mode: AttentionMode = DEFAULT_MODE,
        bos: int | None = None,
    ) -> Iterator[HiddenChunk]:
        """The hidden states of segments of `tokens` `[n]`, in order. All chunks of a batch of
        segments precede the next batch. Raises what the model raises, e.g. PositionsExceeded.

        mode: for texts of the segments' length.
        bos: the token that replaces the first one of each segment; None: no token.
        """
        # Without a KV cache, a chunk is a whole segment.
        length = segments.length
        mode = mode.at_length(length)
        batch = max(1, self.batch_tokens // length)
        chunk = self.query_chunk if self.decoder.cached else length
        offsets = torch.arange(length + 1)
        for segment in range(0, len(segments.starts), batch):
            # A batch of segments, and the token after each.
            starts = torch.tensor(segments.starts[segment : segment + batch])
            text = tokens[starts[:, None] + offsets].to(self.device)  # [b, length + 1]
            if bos is not None:
                text[:, 0] = bos

            # Its chunks, of which each continues the cache of those before.
            cache = self.decoder.new_cache(length, mode) if chunk < length else None
            for position in range(0, length, chunk):
                inputs = text[:, position : min(position + chunk, length)]
                with text_length(self.decoder.methods, length):
                    hidden = self.decoder.hidden(inputs, cache, mode)  # [b, c, e]
                yield HiddenChunk(segment, position, text, hidden)

    def losses(
        self,
        tokens: Tensor | TokenStream,
        segments: Segments,
        mode: AttentionMode = DEFAULT_MODE,
        bos: int | None = None,
    ) -> Iterator[LossChunk]:
        """The losses of the scored tokens, as they are computed. Otherwise like `hidden_states`."""
        for chunk in self.hidden_states(tokens, segments, mode, bos):
            end = chunk.position + chunk.hidden.shape[1]
            # Only context so far.
            if end <= segments.first:
                continue
            # A chunk may begin with context. Position i predicts token i + 1.
            first = max(chunk.position, segments.first)
            hidden = chunk.hidden[:, first - chunk.position :]  # [b, s, e]
            targets = chunk.text[:, first + 1 : end + 1]  # [b, s]
            yield LossChunk(chunk.segment, first, token_losses(self.decoder, hidden, targets))


def token_losses(decoder: Decoder, hidden: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy `[b, s]` in nats for int64 targets `[b, s]` and hidden states `[b, s, e]`, in
    at least float32.
    """
    losses = []
    target_parts = targets.flatten().split(LOGIT_POSITIONS)
    hidden_parts = hidden.flatten(0, 1).split(LOGIT_POSITIONS)
    for positions, labels in zip(hidden_parts, target_parts, strict=True):
        logits = decoder.logits(positions)
        if decoder.vocab_size is None and int(labels.max()) >= logits.shape[-1]:
            raise UserError(
                f"the text has token id {int(labels.max())}, but the model has logits for "
                f"{logits.shape[-1]} ids; use the tokenizer that it was trained with"
            )
        losses.append(loss.token_losses(logits, labels))
    return torch.cat(losses).view(targets.shape)


class LossAccumulator:
    """Sums the losses of segments of a text, by document and by position; by segment if documents
    are not known, or if all scored tokens are in one document.

    All sums are float64 on the CPU. Each of several ranks adds the losses of its share of the
    segments (`Segments.shard`); then the sums of all ranks must be added up.
    """

    def __init__(self, text: Text, segments: Segments, rank: int = 0, world_size: int = 1):
        self.text, self.segments = text, segments
        self._rank, self._world_size = rank, world_size

        # Clusters are the documents, unless those of the first and the last scored token are one.
        clusters = len(segments.starts)
        self._documents: Tensor | None = None
        if text.documents is not None:
            first = min(segments.starts) + segments.first + 1
            last = max(segments.starts) + segments.length
            begin, end = np.searchsorted(text.documents, (first, last), side="right")
            if begin != end:
                self._documents = torch.from_numpy(text.documents)
                clusters = len(self._documents) - 1
        self._token_bytes: Tensor | None = None
        if text.token_bytes is not None:
            self._token_bytes = torch.from_numpy(text.token_bytes)
        self.losses = torch.zeros(clusters, dtype=torch.float64)
        self.counts = torch.zeros(clusters, dtype=torch.int64)
        self.position_losses = torch.zeros(segments.length, dtype=torch.float64)
        self.position_counts = torch.zeros(segments.length, dtype=torch.int64)
        self.bytes = torch.zeros((), dtype=torch.int64)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All sums."""
        return (
            self.losses,
            self.counts,
            self.position_losses,
            self.position_counts,
            self.bytes,
        )

    def add(self, chunk: LossChunk) -> None:
        """Add losses of this rank's share; `chunk.segment` is an index into the share."""
        # The segments of the rows, and the tokens in the stream that were predicted.
        losses = chunk.losses.to("cpu", torch.float64)  # [b, s]
        rows, columns = losses.shape
        segments = self._rank + torch.arange(chunk.segment, chunk.segment + rows) * self._world_size
        starts = torch.tensor([self.segments.starts[segment] for segment in segments.tolist()])
        positions = torch.arange(chunk.position, chunk.position + columns)  # [s]
        targets = starts[:, None] + positions + 1  # [b, s]

        # Sums by cluster, by position, and of the bytes.
        clusters = segments[:, None].expand(rows, columns)
        if self._documents is not None:
            clusters = torch.searchsorted(self._documents, targets, right=True) - 1  # [b, s]
        clusters = clusters.flatten()
        self.losses.index_add_(0, clusters, losses.flatten())
        self.counts.index_add_(0, clusters, torch.ones_like(clusters))
        self.position_losses[positions] += losses.sum(dim=0)
        self.position_counts[positions] += rows
        if self._token_bytes is not None:
            self.bytes += self._token_bytes[self.text.tokens[targets]].sum()

    @property
    def tokens(self) -> int:
        """The number of scored tokens."""
        return int(self.counts.sum())

    @property
    def documents(self) -> int | None:
        """The number of documents with a scored token; None if documents are not known."""
        if self.text.documents is None:
            return None
        if self._documents is None:
            return 1
        return int((self.counts > 0).sum())

    @property
    def loss(self) -> float:
        """Mean loss per scored token, in nats."""
        return float(self.losses.sum()) / self.tokens

    @property
    def stderr(self) -> float | None:
        """Standard error of `loss` over documents (or segments); see `standard_error`."""
        return standard_error(self.losses.numpy(), self.counts.numpy())

    def groups(self, most: int = 256) -> DocumentGroups:
        """The losses of at most `most` groups of documents (or segments)."""
        # Consecutive groups with about equal numbers of tokens: by the middle of each in the text.
        scored = (self.counts > 0).numpy()
        losses, counts = self.losses.numpy()[scored], self.counts.numpy()[scored]
        group = np.arange(len(counts))
        if len(counts) > most:
            middle = np.cumsum(counts) - counts / 2
            group = (middle * most / counts.sum()).astype(np.int64)
            _, group = np.unique(group, return_inverse=True)
        tokens = np.bincount(group, counts).astype(np.int64)
        means = [float(f"{mean:.7g}") for mean in np.bincount(group, losses) / tokens]
        return {"tokens": tokens.tolist(), "losses": means}

    @property
    def bits_per_byte(self) -> float | None:
        """Bits of all scored tokens divided by the bytes of their text; None if not known."""
        if self._token_bytes is None or not int(self.bytes):
            return None
        return float(self.losses.sum()) / math.log(2) / int(self.bytes)

    def by_position(self, bins: int) -> tuple[list[int], list[float], list[int]]:
        """(edges, mean losses in nats, counts) of the scored positions in at most `bins` bins of
        about equal size.

        Bin i covers the positions `edges[i]` to `edges[i + 1] - 1`.
        """
        # Rounding can make two edges equal.
        first, length = self.segments.first, self.segments.length
        bins = min(bins, length - first)
        edges = np.linspace(first, length, bins + 1).round()
        edges = np.unique(edges.astype(np.int64))

        # reduceat sums from each edge to the next one.
        sums = np.add.reduceat(self.position_losses.numpy(), edges[:-1])
        counts = np.add.reduceat(self.position_counts.numpy(), edges[:-1])
        return edges.tolist(), (sums / counts).tolist(), counts.tolist()
