"""Attention resolution: how well attention scores distinguish neighboring distances (LEX, arXiv
2212.10554, eqs. 3, 4).

Let s[n] be the mean of the final scores of all unmasked pairs of query and key at distance n, and D
the number of such distances. Then, for each head,

    R = sum_n e^s[n] (e^s[n] - e^s[n+1]) / (sum_n e^s[n])^2,    n = 0 ... D - 2 in both sums,

and R is averaged over heads, layers and texts. It is below 1; the paper does not state the scale of
its numbers. Scores are summed by distance while the model reads the text in chunks, so memory is
linear in the length.

Legend: b batch, h heads, g heads of keys, s query length, t key length, d head size; in a chunk: c
queries, l keys; n distances.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention import AttentionCall, AttentionMode
from kerple.positional import Chunk, PositionsExceeded
from megatron.evaluation.modes import parse_modes
from megatron.evaluation.protocols import Segments
from megatron.evaluation.records import Provenance, Record, ResolutionRecord
from megatron.evaluation.runner import EvalContext, EvalTask
from megatron.evaluation.text import Text
from megatron.model.gpt import GPT
from megatron.utils.errors import UserError

# Scores are computed for MAX_QUERIES queries at a time; fewer, but at least MIN_QUERIES, if that
# exceeds MAX_SCORES.
MIN_QUERIES, MAX_QUERIES = 16, 256
MAX_SCORES = 4 * 1024 * 1024


@dataclass(frozen=True)
class ResolutionTask(EvalTask):
    """The attention resolution on segments of a text."""

    text: Text

    def run(
        self, context: EvalContext, share: Segments, advance: Callable[[int], None]
    ) -> list[Record]:
        """If the model has no positions for the length, the record has a note instead of values.
        The model must be a `GPT`, because other models do not record scores.
        """
        # Sums over texts, as soon as a batch of texts is complete.
        model: GPT = context.model
        text, mode = self.text, self.mode.attention
        totals = torch.zeros(len(model.blocks), dtype=torch.float64)
        note = None
        try:
            with record_scores(model) as recorders:
                for chunk in context.reader.hidden_states(text.tokens, share, mode, text.bos):
                    advance(chunk.hidden.shape[0] * chunk.hidden.shape[1])
                    if chunk.position + chunk.hidden.shape[1] == share.length:
                        sums = [layer.resolution().mean(dim=1).sum() for layer in recorders]
                        totals += torch.stack(sums).cpu()
                        for layer in recorders:
                            layer.reset()
        except PositionsExceeded as error:
            note = str(error)

        # The mean over all ranks.
        note = context.share_note(note)
        texts = len(self.segments.starts)
        if note is None:
            context.sum_over_ranks(totals)
            totals /= texts
            if not totals.isfinite().all():
                note = "a score is not finite, or there are fewer than two distances"
        record: ResolutionRecord = {
            **self.planned[0],
            "note": note,
            "texts": 0,
            "layers": [],
            "resolution": None,
            "targets": self.text.targets_digest(self.segments),
        }
        if note is None:
            record["texts"], record["layers"] = texts, totals.tolist()
            record["resolution"] = float(totals.mean())
        return [record]


def plan_resolution(
    text: Text, lengths: Sequence[int], modes: Sequence[str], texts: int, provenance: Provenance
) -> list[ResolutionTask]:
    """One task per mode and length, in this order, on the first `texts` segments of the text.
    Raises UserError if the text has fewer.
    """
    tasks = []
    for mode in parse_modes(modes, provenance.train_length):
        if mode.attention != AttentionMode(mode.span) or mode.span.sinks:
            raise UserError(
                f"--resolution: not measured in inference mode {mode.name}; use full, window@W and "
                "blockwise, and run the other modes without --resolution"
            )
        for length in lengths:
            # All segments must be in the text.
            available = (len(text.tokens) - 1) // length
            if available < texts:
                advice = "shorter lengths"
                if available:
                    advice = f"--resolution {available}, or shorter lengths"
                raise text.error(
                    f"--resolution {texts}: the text has only {available:,} segments of {length:,} "
                    f"tokens; choose {advice}"
                )
            segments = Segments(length, range(0, texts * length, length))
            planned = provenance.record(
                "resolution",
                corpus=text.corpus,
                bos=text.bos,
                mode=mode.name,
                protocol=f"first@{texts}",
                length=length,
                determined_by=text.digest(segments),
            )
            tasks.append(ResolutionTask(mode, segments, (planned,), text))
    return tasks


class ScoreRecorder:
    """Replaces the attention of one layer, and sums its final scores by distance."""

    def __init__(self, attention: Callable[[AttentionCall], Tensor]):
        self._attention = attention
        self.reset()

    def reset(self) -> None:
        """Discard the sums, before another batch."""
        self._sums = torch.empty(0)
        self._counts = torch.empty(0)

    def __call__(self, call: AttentionCall) -> Tensor:
        """The attention's own output."""
        self.add(call)
        return self._attention(call)

    def add(self, call: AttentionCall) -> None:
        """Add the scores of a call without documents."""
        # As many queries at once as memory allows.
        query, method, tables, t = call.query, call.method, call.tables, call.kv_len
        fitting = MAX_SCORES // (query.shape[0] * query.shape[1] * t)
        rows = max(MIN_QUERIES, min(MAX_QUERIES, fitting))
        if method is not None and "scale_qk" in method.hooks:
            rows = min(rows, method.segment)

        # Sums for as many distances as there are keys.
        if not len(self._counts):
            self._sums = query.new_zeros(*query.shape[:2], 0, dtype=torch.float64)
            self._counts = query.new_zeros(0, dtype=torch.float64)
        missing = max(0, t - len(self._counts))
        self._sums = F.pad(self._sums, (0, missing))
        self._counts = F.pad(self._counts, (0, missing))
        for first in range(0, call.q_len, rows):
            # The queries at positions start ... end-1, and the keys that they attend to.
            last = min(first + rows, call.q_len)
            start, end = call.offset + first, call.offset + last
            begin = call.span.first_key(start)
            part = call.part(slice(first, last), slice(begin, end))
            queries, keys = part.query, part.key  # [b, h, c, d], [b, g, l, d]
            query_positions = torch.arange(start, end) + call.dropped
            key_positions = torch.arange(begin, end) + call.dropped
            if method is not None and "scale_qk" in method.hooks:
                queries, keys = method.scale_qk(queries, keys, query_positions, key_positions)

            # The scores [b, h, c, l], in at least float32, with the decay and the network of DAPE.
            dtype = call.compute_dtype
            keys = keys.repeat_interleave(call.queries_per_kv, dim=1)  # [b, h, l, d]
            scores = queries.to(dtype) @ keys.to(dtype).transpose(-1, -2) * call.scale
            if part.decay_sums is not None:
                of_queries = part.decay_sums[..., first - last :].unsqueeze(-1)
                of_keys = part.decay_sums.unsqueeze(-2)
                scores = scores + (of_queries - of_keys).to(dtype)
            mask = call.mask(slice(start, end), slice(begin, end))
            if call.modify_scores is not None:
                chunk = Chunk(scores, queries, query_positions, key_positions, mask, tables.scores)
                scores = call.modify_scores(chunk)

            # All unmasked pairs have a distance below `max_kv_len`, as do the tables.
            distances = min(end - begin, call.max_kv_len)
            sums = sum_by_distance(scores.masked_fill(mask, 0.0))[..., :distances]
            counts = sum_by_distance((~mask).to(dtype))[:distances]

            # Bias and weight are constant for a distance, so they can be applied to the sums.
            if tables.weight is not None:
                sums = sums * tables.weight[:, :distances]
            if tables.bias is not None:
                sums = sums + counts * tables.bias[:, :distances]
            self._sums[..., :distances] += sums
            self._counts[:distances] += counts

    def resolution(self) -> Tensor:
        """R of each text and head, float64 `[b, h]`; NaN if there are fewer than two distances."""
        distances = int((self._counts > 0).sum())
        means = self._sums[..., :distances] / self._counts[:distances]
        powers = (means - means.amax(dim=-1, keepdim=True)).exp()
        near, far = powers[..., :-1], powers[..., 1:]
        return (near * (near - far)).sum(dim=-1) / near.sum(dim=-1) ** 2


def sum_by_distance(values: Tensor) -> Tensor:
    """`[..., c, l]`, with the c queries at the last of the l keys' positions -> float64 `[..., l]`,
    sums over the pairs at each distance 0 to l - 1. Pairs with the key after the query are ignored.
    """
    c, l = values.shape[-2:]  # noqa: E741
    # Shift each row by one more than the row above, so that each column is a distance.
    padded = F.pad(values.flip(-1), (0, c))  # [..., c, l + c]
    skewed: Tensor = padded.flatten(-2)[..., :-c].unflatten(-1, (c, l + c - 1))
    return skewed.sum(dim=-2, dtype=torch.float64)[..., c - 1 :]


@contextmanager
def record_scores(model: GPT) -> Iterator[list[ScoreRecorder]]:
    """Record the scores of all layers within the context; yields one recorder per layer."""
    layers: list[Any] = [block.attention for block in model.blocks]
    attentions = [layer.attention for layer in layers]
    recorders = list(map(ScoreRecorder, attentions))
    for layer, recorder in zip(layers, recorders, strict=True):
        layer.attention = recorder
    try:
        yield recorders
    finally:
        for layer, attention in zip(layers, attentions, strict=True):
            layer.attention = attention
