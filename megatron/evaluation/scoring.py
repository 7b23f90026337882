"""Texts read in chunks, and the loss of every scored token, in memory that grows linearly with the length.

Each segment is fed in chunks of queries through the key-value cache, so that no tensor is length x length; the logits
are made for `LOGIT_POSITIONS` positions at a time, so that none is length x vocabulary. The softmax runs over the whole
padded vocabulary, as training's does: its padded entries have weights like any other.

Legend: b batch (segments), s positions, c positions of a chunk, n tokens of the stream, e hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention import Span
from megatron.evaluation.protocols import Segments
from megatron.inference.decoder import Decoder

LOGIT_POSITIONS = 1024


@dataclass(frozen=True)
class Read:
    """Hidden states `[b, c, e]` of the inputs from `position` on, of consecutive segments from `segment` on; `text`,
    int64 `[b, length + 1]`, holds their inputs and, one further, their targets.
    """

    segment: int
    position: int
    text: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Scored:
    """Losses `[b, s]` in nats (float32, float64 for a float64 model): rows are consecutive segments from `segment` on,
    columns are consecutive positions from `position` on, each the input whose next token was predicted."""

    segment: int
    position: int
    losses: Tensor


def read(
    decoder: Decoder,
    tokens: Tensor,
    segments: Segments,
    *,
    span: Span,
    query_chunk: int,
    batch_tokens: int,
    device: torch.device,
) -> Iterator[Read]:
    """The segments of the stream `tokens`, int64 `[n]` on any device, given to the model chunk by chunk, in order; each
    batch of them whole before the next. Short segments are batched up to `batch_tokens` tokens. Raises what the model
    raises, `PositionsExceeded` among it.
    """
    length = segments.length
    batch = max(1, batch_tokens // length)
    chunk = query_chunk if decoder.cached else length
    offsets = torch.arange(length + 1)
    for row in range(0, len(segments.starts), batch):
        starts = torch.tensor(segments.starts[row : row + batch])
        text = tokens[starts[:, None] + offsets].to(device)
        cache = decoder.new_cache(len(starts), length) if chunk < length else None
        for begin in range(0, length, chunk):
            yield Read(row, begin, text, decoder.hidden(text[:, begin : min(begin + chunk, length)], cache, span))


def score(
    decoder: Decoder,
    tokens: Tensor,
    segments: Segments,
    *,
    span: Span,
    query_chunk: int,
    batch_tokens: int,
    device: torch.device,
) -> Iterator[Scored]:
    """The losses of the segments' targets, as they are computed. Arguments and errors as of `read`."""
    sizes = {"query_chunk": query_chunk, "batch_tokens": batch_tokens}
    for part in read(decoder, tokens, segments, span=span, device=device, **sizes):
        end = part.position + part.hidden.shape[1]
        if end <= segments.first:
            continue
        scored = max(part.position, segments.first)
        hidden, targets = part.hidden[:, scored - part.position :], part.text[:, scored + 1 : end + 1]
        yield Scored(part.segment, scored, token_losses(decoder, hidden, targets))


def token_losses(decoder: Decoder, hidden: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy `[b, s]` in nats of int64 targets `[b, s]` given hidden states `[b, s, e]`, in float32 at least."""
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    losses = []
    for start in range(0, len(wanted), LOGIT_POSITIONS):
        logits = decoder.logits(flat[start : start + LOGIT_POSITIONS])
        if logits.dtype != torch.float64:
            logits = logits.float()
        losses.append(F.cross_entropy(logits, wanted[start : start + LOGIT_POSITIONS], reduction="none"))
    return torch.cat(losses).view(targets.shape)
