"""Perplexity against length: how a language model fares on texts longer than those it was trained on."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.config.errors import UserError
from megatron.evaluation.modes import Mode, parse_mode
from megatron.evaluation.progress import Progress
from megatron.evaluation.protocols import Protocol, Segments, parse_protocol
from megatron.evaluation.ranks import ALONE, Ranks
from megatron.evaluation.rows import Checkpoint, Positions, Record, Row, perplexity
from megatron.evaluation.scoring import score
from megatron.evaluation.tally import Tally
from megatron.evaluation.text import Text, as_text
from megatron.inference.decoder import Decoder, as_decoder, inference, model_device
from megatron.model.positional import PositionsExceeded

QUERY_CHUNK = 512
# A processor's caches hold no more at once; a GPU is idle with less.
BATCH_TOKENS_CPU, BATCH_TOKENS_GPU = 8192, 32768


@dataclass(frozen=True)
class Origin:
    """What is measured, for the records. `settings`: whatever changes the numbers of the same weights, e.g. the
    precision.
    """

    checkpoint: Checkpoint | None = None
    pos_emb: str | None = None
    seed: int | None = None
    train_length: int | None = None
    settings: str = ""

    def record(
        self, kind: str, *, corpus: str | None, mode: str, protocol: str, length: int, decided_by: object
    ) -> Record:
        """The record's keys, its values yet to come. `decided_by`: with `settings`, what the values follow from."""
        digest = hashlib.sha256(repr((decided_by, self.settings)).encode()).hexdigest()[:16]
        return Record(
            kind=kind,
            corpus=corpus,
            checkpoint=self.checkpoint,
            pos_emb=self.pos_emb,
            seed=self.seed,
            train_length=self.train_length,
            mode=mode,
            protocol=protocol,
            length=length,
            note=None,
            measurement=digest,
        )


@dataclass(frozen=True)
class Work:
    """One measurement to make; `wanted` are its records, the values yet to come. bins: of the losses by position."""

    text: Text
    mode: Mode
    segments: Segments
    wanted: tuple[Record, ...]
    bins: int | None = None


def plan_work(
    text: Text,
    lengths: Sequence[int],
    modes: Sequence[str],
    protocols: Sequence[str | Protocol],
    token_budget: int | None,
    origin: Origin,
    bins: int | None = None,
) -> list[Work]:
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
                records = [origin.record("extrapolation", **about, decided_by=digest)]
                if bins is not None:
                    records.append(origin.record("positions", **about, decided_by=(digest, bins)))
                works.append(Work(text, mode, part, tuple(records), bins))
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
) -> list[Row]:
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
    origin = Origin(pos_emb=pos_emb, seed=seed, train_length=train_length)
    works = plan_work(text, lengths, modes, protocols, token_budget, origin, position_bins)
    sizes = {"query_chunk": query_chunk, "batch_tokens": batch_tokens}
    records = measure(model, works, device=device, progress=progress, on_record=on_record, **sizes)
    return [record for record in records if record["kind"] == "extrapolation"]


def measure(
    model: Callable[[Tensor], Any],
    works: Sequence[Work],
    *,
    query_chunk: int = QUERY_CHUNK,
    batch_tokens: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    ranks: Ranks = ALONE,
    on_record: Callable[[Record], None] | None = None,
) -> list[Record]:
    """The records of planned work, in its order. Of several ranks, all of which must call this, each computes its share
    of every measurement's segments and gets all records. Arguments as of `evaluate_extrapolation`.
    """
    for name, value in (("query_chunk", query_chunk), ("batch_tokens", batch_tokens)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    decoder = as_decoder(model)
    for work in works:
        if not decoder.serves(work.mode.span):
            needed = "window" if work.mode.span.block is None else "block"
            raise UserError(
                f"inference mode {work.mode.name} needs a model with a `{needed}` argument; {_name(model)} has none"
            )
    device = model_device(model) if device is None else torch.device(device)
    if batch_tokens is None:
        batch_tokens = BATCH_TOKENS_CPU if device.type == "cpu" else BATCH_TOKENS_GPU
    sizes = {"query_chunk": query_chunk, "batch_tokens": batch_tokens}
    shares = [(work.mode, work.segments.share(ranks.rank, ranks.size)) for work in works]
    name = (works[0].wanted[0]["pos_emb"] if works else None) or _name(model)
    found: list[Record] = []
    with inference(model), Progress(name, shares, enabled=progress and ranks.is_main, ranks=ranks.size) as bar:
        for work, (mode, share) in zip(works, shares, strict=True):
            bar.start(mode, share)
            tally, note = _tally(decoder, work, share, device, bar, ranks, **sizes)
            records = [_filled(record, work, tally, note) for record in work.wanted]
            found += records
            if on_record is not None:
                for record in records:
                    on_record(record)
            bar.finish(records[0])  # what is printed is stored
    return found


def _tally(
    decoder: Decoder, work: Work, share: Segments, device: torch.device, bar: Progress, ranks: Ranks, **sizes: int
) -> tuple[Tally, str | None]:
    """The sums over all ranks, and the reason where there are none."""
    tally, note = Tally(work.text, work.segments, ranks), None
    try:
        for scored in score(decoder, work.text.tokens, share, span=work.mode.span, device=device, **sizes):
            tally.add(scored)
            bar.advance(scored.losses.numel())
    except PositionsExceeded as exceeded:
        note = str(exceeded)
    note = ranks.first(note)
    if note is None:
        tally.gather()
        if not math.isfinite(tally.loss):
            note = f"the loss is {tally.loss}"
    return tally, note


def _filled(record: Record, work: Work, tally: Tally, note: str | None) -> Record:
    """The record with its values; a loss that is no finite number is reported as such, not as a number."""
    if record["kind"] == "positions":
        if note is not None:
            return Positions(**{**record, "note": note}, edges=[], losses=[], counts=[])
        bins = tally.by_position(work.bins)
        return Positions(**record, edges=bins.edges, losses=bins.losses, counts=bins.counts)
    known = note is None
    return Row(
        **{**record, "note": note},
        tokens=tally.tokens if known else 0,
        segments=len(work.segments.starts),
        documents=tally.documents if known else None,
        loss=tally.loss if known else None,
        stderr=tally.stderr if known else None,
        bits_per_byte=tally.bits_per_byte if known else None,
        perplexity=perplexity(tally.loss) if known else None,
    )


def check_lengths(lengths: Sequence[int]) -> list[int]:
    """Each length once. Raises UserError for none, or one below 1."""
    unique = list(dict.fromkeys(int(length) for length in lengths))
    if not unique:
        raise UserError("no lengths to evaluate were given")
    if min(unique) < 1:
        raise UserError(f"a length must be at least 1 token, not {min(unique)}")
    return unique


def _name(model: Any) -> str:
    return getattr(model, "__name__", type(model).__name__)
