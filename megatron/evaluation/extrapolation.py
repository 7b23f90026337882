"""Perplexity against length: how a language model fares on texts longer than those it was trained on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kerple.positional import PositionsExceeded
from megatron.evaluation.loss_accumulator import Tally
from megatron.evaluation.modes import parse_mode
from megatron.evaluation.protocols import Protocol, Segments, parse_protocol
from megatron.evaluation.records import ExtrapolationRecord, PositionsRecord, Provenance, Record, perplexity
from megatron.evaluation.scoring import score
from megatron.evaluation.text import Text, as_text
from megatron.evaluation.work import QUERY_CHUNK, Run, Work, measure
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class Losses(Work):
    """The loss of a text, and by position in so many bins."""

    text: Text
    bins: int | None = None

    def records(self, run: Run, share: Segments, advance: Callable[[int], None]) -> list[Record]:
        """A length that the model has no positions for has no values, and a note."""
        tally, note = Tally(self.text, self.segments, run.ranks), None
        sizes = {"query_chunk": run.query_chunk, "batch_tokens": run.batch_tokens, "device": run.device}
        try:
            for scored in score(run.decoder, self.text.tokens, share, span=self.mode.span, **sizes):
                tally.add(scored)
                advance(scored.losses.numel())
        except PositionsExceeded as exceeded:
            note = str(exceeded)
        note = run.ranks.first(note)
        if note is None:
            tally.gather()
            if not math.isfinite(tally.loss):
                note = f"the loss is {tally.loss}"
        return [self._filled(record, tally, note) for record in self.wanted]

    def _filled(self, record: Record, tally: Tally, note: str | None) -> Record:
        """The record with its values; a loss that is no finite number is reported as such, not as a number."""
        record, known = {**record, "note": note}, note is None
        if record["kind"] == "positions":
            if not known:
                return PositionsRecord(**record, edges=[], losses=[], counts=[])
            bins = tally.by_position(self.bins)
            return PositionsRecord(**record, edges=bins.edges, losses=bins.losses, counts=bins.counts)
        return ExtrapolationRecord(
            **record,
            tokens=tally.tokens if known else 0,
            segments=len(self.segments.starts),
            documents=tally.documents if known else None,
            loss=tally.loss if known else None,
            stderr=tally.stderr if known else None,
            bits_per_byte=tally.bits_per_byte if known else None,
            perplexity=perplexity(tally.loss) if known else None,
        )


def plan_work(
    text: Text,
    lengths: Sequence[int],
    modes: Sequence[str],
    protocols: Sequence[str | Protocol],
    token_budget: int | None,
    origin: Provenance,
    bins: int | None = None,
) -> list[Losses]:
    """Every protocol, mode and length, in that order. Raises UserError."""
    lengths = check_lengths(lengths)
    wanted = [parse_mode(name, origin.train_length) for name in dict.fromkeys(modes)]
    works = []
    for protocol in dict.fromkeys(parse_protocol(name) if isinstance(name, str) else name for name in protocols):
        if text.row is None:
            segments = protocol.plan(len(text.tokens), lengths, token_budget)
            name = protocol.name
        else:
            segments = protocol.plan_rows(len(text.tokens) // text.row, lengths, token_budget)
            name = f"{protocol.name} by document"
        digests = [text.digest(part) for part in segments]
        for mode in wanted:
            for part, digest in zip(segments, digests, strict=True):
                about = {"corpus": text.corpus, "mode": mode.name, "protocol": name, "length": part.length}
                records = [origin.record("extrapolation", **about, determined_by=digest)]
                if bins is not None:
                    records.append(origin.record("positions", **about, determined_by=(digest, bins)))
                works.append(Losses(mode, part, tuple(records), text, bins))
    return works


def evaluate_extrapolation(
    model: Callable[[Tensor], Any],
    tokens: Tensor | np.ndarray | Sequence[int] | Text,
    lengths: Sequence[int],
    *,
    modes: Sequence[str] = ("full",),
    protocols: Sequence[str] = ("non-overlapping",),
    token_budget: int | None = None,
    position_bins: int | None = None,
    query_chunk: int = QUERY_CHUNK,
    batch_tokens: int | None = None,
    vocab_size: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    pos_emb: str | None = None,
    seed: int | None = None,
    train_length: int | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> list[ExtrapolationRecord]:
    """Loss and perplexity of a token stream, read in segments of each of the given lengths.

    model: any callable from int64 tokens `[b, s]` to logits `[b, s, v]` (or an object that holds them as `.logits`). A
        model of this project, or one of transformers, is fed in chunks through its key-value cache, so that memory
        grows linearly with the length.
    tokens: int64 `[n]`, the text, or a `Text` that also knows its documents. It is validation text: the first token is
        context only, the next ones are the targets.
    lengths: segment lengths in tokens. Those that divide the longest make the best use of the text.
    modes: `full`, `window@W`, `blockwise`, `blockwise@L`; see `megatron.evaluation.modes`.
    protocols: `non-overlapping`, `kerple`, `last-k`, `sliding`; see `megatron.evaluation.protocols`.
    token_budget: score at most so many tokens, the same ones at every length; None: as many as there are.
    position_bins: also the loss by position, in so many bins: records of kind `positions`, for `on_record`.
    query_chunk: queries computed at once within a segment, for a model that has a cache.
    batch_tokens: short segments are computed together, up to so many tokens; by default 8,192 on a CPU and 32,768 on a
        GPU. What this and `query_chunk` change is memory and speed.
    vocab_size: refuse token ids from it on before anything is computed.
    device: where batches are sent; by default where the model's first parameter is. The model itself stays where it is.
    progress: a bar with tokens/s and time left on the standard error stream, one line per row where that is no
        terminal.
    pos_emb, seed, train_length: copied into the rows; `blockwise` takes its blocks from train_length.
    on_record: called with each record as soon as it is known.

    Returns one row per protocol, mode and length, in that order. The loss is accumulated in float64. A length that the
    positional method does not know (`learned` beyond its table) gives a row without a loss, with a note. Raises
    UserError for arguments that cannot be served.
    """
    text = as_text(tokens, vocab_size)
    for name, value in (("token_budget", token_budget), ("position_bins", position_bins)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    origin = Provenance(pos_emb=pos_emb, seed=seed, train_length=train_length)
    works = plan_work(text, lengths, modes, protocols, token_budget, origin, position_bins)
    sizes = {"query_chunk": query_chunk, "batch_tokens": batch_tokens}
    records = measure(model, works, device=device, progress=progress, on_record=on_record, **sizes)
    return [record for record in records if record["kind"] == "extrapolation"]


def check_lengths(lengths: Sequence[int]) -> list[int]:
    """Each length once. Raises UserError for none, or one below 1."""
    unique = list(dict.fromkeys(int(length) for length in lengths))
    if not unique:
        raise UserError("no lengths to evaluate were given")
    if min(unique) < 1:
        raise UserError(f"a length must be at least 1 token, not {min(unique)}")
    return unique
