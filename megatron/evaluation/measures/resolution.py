"""Attention resolution: how well the scores tell one distance from the next (LEX, arXiv 2212.10554, equations 3, 4).

With s[n] the mean of the final scores of all pairs of query and key at distance n that attention sees, and D such
distances,

    R = sum of e^s[n] (e^s[n] - e^s[n+1]) / (sum of e^s[n])^2,    n = 0 ... D - 2 in both sums,

of each head, averaged over heads, layers and texts. It lies below 1: the numbers that the paper reports are on a scale
that it does not give. Scores are added up by distance while the model reads, in chunks, so that memory is linear in the
length.

Legend: b batch, h heads, s query length, t key length, d head size; in a chunk: c queries, l keys; n distances.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention import Attention, Span
from kerple.positional import PositionsExceeded
from megatron.evaluation.modes import parse_mode
from megatron.evaluation.protocols import Segments
from megatron.evaluation.records import Provenance, Record, ResolutionRecord
from megatron.evaluation.scoring import read
from megatron.evaluation.text import Text
from megatron.evaluation.work import Run, Work
from megatron.model.gpt import GPT
from megatron.utils.errors import UserError

FEWEST_ROWS, MOST_ROWS = 16, 256
SCORES_AT_ONCE = 4 * 1024 * 1024


@dataclass(frozen=True)
class ResolutionWork(Work):
    """The attention resolution on segments of a text."""

    text: Text

    def records(self, run: Run, share: Segments, advance: Callable[[int], None]) -> list[Record]:
        """Raises UserError for a model that is not of this project."""
        if not isinstance(run.model, GPT):
            raise UserError("attention resolution needs the scores inside the model, which only GPT shows")
        totals, note = torch.zeros(len(run.model.blocks), dtype=torch.float64), None
        sizes = {"query_chunk": run.query_chunk, "batch_tokens": run.batch_tokens, "device": run.device}
        try:
            with watched(run.model) as scores:
                for part in read(run.decoder, self.text.tokens, share, span=self.mode.span, **sizes):
                    advance(part.hidden.shape[0] * part.hidden.shape[1])
                    if part.position + part.hidden.shape[1] == share.length:
                        totals += torch.stack([one.resolution().mean(dim=1).sum() for one in scores]).cpu()
                        for one in scores:
                            one.clear()
        except PositionsExceeded as exceeded:
            note = str(exceeded)
        note = run.ranks.first(note)
        texts = len(self.segments.starts)
        if note is None:
            run.ranks.add(totals)
            totals /= texts
            if not totals.isfinite().all():
                note = "a score is no finite number, or there are fewer than two distances"
        (record,), known = self.wanted, note is None
        return [
            ResolutionRecord(
                **{**record, "note": note},
                texts=texts if known else 0,
                layers=totals.tolist() if known else [],
                resolution=float(totals.mean()) if known else None,
            )
        ]


def plan_resolution(
    text: Text, lengths: Sequence[int], modes: Sequence[str], texts: int, origin: Provenance
) -> list[ResolutionWork]:
    """The first `texts` segments of each length (of a text in rows, the beginnings of the rows), in every mode. Raises
    UserError where there are fewer.
    """
    works = []
    for name in dict.fromkeys(modes):
        mode = parse_mode(name, origin.train_length)
        for length in lengths:
            stride = length if text.row is None else text.row
            held = (len(text.tokens) - 1) // length if text.row is None else len(text.tokens) // text.row
            if held < texts:
                raise UserError(
                    f"--resolution {texts}: the text holds {held:,} segments of {length:,} tokens; "
                    + (f"choose --resolution {held}, or shorter lengths" if held else "choose shorter lengths")
                )
            segments = Segments(length, range(0, texts * stride, stride))
            protocol = f"first@{texts}" + (" by document" if text.row is not None else "")
            about = {"corpus": text.corpus, "mode": mode.name, "protocol": protocol, "length": length}
            record = origin.record("resolution", **about, determined_by=text.digest(segments))
            works.append(ResolutionWork(mode, segments, (record,), text))
    return works


class ScoresByDistance:
    """One layer's final scores, summed over the pairs at each distance while the layer computes attention."""

    def __init__(self, attention: Attention):
        self._attention = attention
        self.clear()

    def clear(self) -> None:
        """Forget what was summed: another batch comes."""
        self._sums: Tensor | None = None
        self._counts: Tensor | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        """Attention, as without this."""
        self.add(query, key, **{name: options[name] for name in ("bias_table", "weight_table", "table")},
                 span=Span(options["window"], options["block"]))  # fmt: skip
        return self._attention(query, key, value, **options)

    def uses_jacobians(self, *_: object) -> bool:
        """Nothing is trained while scores are summed."""
        return False

    def add(
        self,
        query: Tensor,
        key: Tensor,
        *,
        bias_table: Tensor | None,
        weight_table: Tensor | None,
        table: Tensor | None,
        span: Span,
    ) -> None:
        """Queries `[b, h, s, d]`, the last of the `[b, h, t, d]` keys' positions; tables as of `attend`."""
        s, t = query.shape[2], key.shape[2]
        positional = self._attention.positional
        scales_qk = positional is not None and positional.scales_qk
        modifies_scores = positional is not None and positional.modifies_scores
        rows = max(FEWEST_ROWS, min(MOST_ROWS, SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * t)))
        if scales_qk:
            rows = min(rows, positional.segment)
        max_kv_len = span.max_kv_len(t)
        self._reserve(query, t)
        for first in range(0, s, rows):
            last = min(first + rows, s)
            begin, end = span.first_key(t - s + first), t - s + last
            queries, keys = query[:, :, first:last], key[:, :, begin:end]
            positions = torch.arange(t - s + first, end), torch.arange(begin, end)
            if scales_qk:
                queries, keys = positional.scale_qk(queries, keys, *positions)
            dtype = torch.promote_types(query.dtype, torch.float32)
            scores = queries.to(dtype) @ keys.to(dtype).transpose(-1, -2) * query.shape[3] ** -0.5
            mask = span.mask(range(t - s + first, end), range(begin, end), query.device)
            if modifies_scores:
                scores = positional.modify_scores(scores, queries, *positions, mask, table)
            # No query sees a key further away than `max_kv_len`, and no table goes further.
            near = min(end - begin, max_kv_len)
            sums = by_distance(scores.masked_fill(mask, 0.0))[..., :near]
            counts = by_distance((~mask).to(dtype))[:near]
            # Functions of the distance act on the sums as they do on each score.
            if weight_table is not None:
                sums = sums * weight_table[:, :near]
            if bias_table is not None:
                sums = sums + counts * bias_table[:, :near]
            self._sums[..., :near] += sums
            self._counts[:near] += counts

    def resolution(self) -> Tensor:
        """R of every text and head, float64 `[b, h]`; not a number where fewer than two distances are seen."""
        seen = int((self._counts > 0).sum())
        means = self._sums[..., :seen] / self._counts[:seen]
        powers = (means - means.amax(dim=-1, keepdim=True)).exp()
        here, further = powers[..., :-1], powers[..., 1:]
        return (here * (here - further)).sum(dim=-1) / here.sum(dim=-1) ** 2

    def _reserve(self, query: Tensor, length: int) -> None:
        """Room for as many distances as there are positions."""
        held = 0 if self._sums is None else self._sums.shape[-1]
        if length > held:
            more = max(length, 2 * held)
            sums = query.new_zeros(*query.shape[:2], more, dtype=torch.float64)
            counts = query.new_zeros(more, dtype=torch.float64)
            if held:
                sums[..., :held], counts[:held] = self._sums, self._counts
            self._sums, self._counts = sums, counts


def by_distance(values: Tensor) -> Tensor:
    """`[..., c, l]` of pairs, the queries being the last of the keys' positions -> float64 `[..., l]`, sums over the
    pairs at each distance. Pairs whose key comes after their query do not count.
    """
    c, l = values.shape[-2:]  # noqa: E741
    # Each row one further to the right than the one above: then a column is a distance.
    skewed = F.pad(values.flip(-1), (0, c)).flatten(-2)[..., :-c].unflatten(-1, (c, l + c - 1))
    return skewed.sum(dim=-2, dtype=torch.float64)[..., c - 1 :]


@contextmanager
def watched(model: GPT) -> Iterator[list[ScoresByDistance]]:
    """Every layer's scores by distance, summed inside this context."""
    layers = [block.attention for block in model.blocks]
    watchers = [ScoresByDistance(layer.attention) for layer in layers]
    attentions = [layer.attention for layer in layers]
    for layer, watcher in zip(layers, watchers, strict=True):
        layer.attention = watcher
    try:
        yield watchers
    finally:
        for layer, attention in zip(layers, attentions, strict=True):
            layer.attention = attention
