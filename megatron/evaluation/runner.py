"""Planning and running evaluations: `EvalTask`, the loop over tasks, and length extrapolation.

An `EvalTask` is one measurement of one model. Extrapolation tasks are defined here, further ones in
`megatron.evaluation.metrics`. Several ranks share an evaluation: each runs its share of every
task's segments.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from kerple.attention import Mode
from kerple.positional import PositionsExceeded
from megatron.evaluation.modes import parse_modes
from megatron.evaluation.protocols import Protocol, Segments, parse_protocol
from megatron.evaluation.records import (
    ExtrapolationRecord,
    PositionsRecord,
    Provenance,
    Record,
    extrapolation_records,
    perplexity,
)
from megatron.evaluation.scoring import LossAccumulator, SegmentReader
from megatron.evaluation.text import IntArray, Text, as_text
from megatron.inference.decoder import as_decoder, inference, model_device, model_name
from megatron.utils.errors import UserError
from megatron.utils.progress import Progress
from megatron.utils.ranks import run_on_all_ranks

QUERY_CHUNK = 512
LOSS_NOTE = "the loss is"  # nan or inf: the start of the note of such a record
# Larger batches do not fit into a CPU's caches; smaller ones do not keep a GPU busy.
BATCH_TOKENS_CPU, BATCH_TOKENS_GPU = 8192, 32768
# For the time left only: attention over this many keys is assumed to cost as much as the rest of a
# small model.
KEYS_PER_UNIT_COST = 8192


@dataclass(frozen=True)
class EvalContext:
    """What all tasks of a run share: the model, how to feed it, and the participating ranks."""

    model: Any
    reader: SegmentReader
    rank: int
    world_size: int

    def share_note(self, note: str | None) -> str | None:
        """The note of the first rank that has one, on every rank."""
        if self.world_size == 1:  # also in training, whose ranks measure different texts
            return note
        return next((text for text in run_on_all_ranks(lambda: note) if text is not None), None)

    def sum_over_ranks(self, values: Tensor) -> None:
        """Replace a CPU tensor by its sum over the ranks."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)


@dataclass(frozen=True)
class EvalTask:
    """One measurement, in one inference mode, on segments of equal length. planned: its records,
    without values.
    """

    mode: Mode
    segments: Segments
    planned: tuple[Record, ...]

    def run(
        self, context: EvalContext, share: Segments, advance: Callable[[int], None]
    ) -> list[Record]:
        """The planned records with their values, on every rank. Calls `advance` with each number of
        tokens read.

        share: the segments of this rank.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ExtrapolationTask(EvalTask):
    """The loss of a text, and with `bins` also by position."""

    text: Text
    bins: int | None = None

    def run(
        self, context: EvalContext, share: Segments, advance: Callable[[int], None]
    ) -> list[Record]:
        """If the model has no positions for the length, the records have a note, not values."""
        text, mode = self.text, self.mode.attention
        # The losses of this rank's share. A method without positions for the length ends it.
        sums = LossAccumulator(text, self.segments, context.rank, context.world_size)
        note = None
        try:
            for chunk in context.reader.losses(text.tokens, share, mode, text.bos):
                sums.add(chunk)
                advance(chunk.losses.numel())
        except PositionsExceeded as error:
            note = str(error)

        # Sums over all ranks.
        note = context.share_note(note)
        if note is None:
            for values in sums.tensors:
                context.sum_over_ranks(values)
            if not math.isfinite(sums.loss):
                note = f"{LOSS_NOTE} {sums.loss}"
        return self._records(sums, note)

    def not_measured(self, note: str) -> list[Record]:
        """The planned records with a note instead of values."""
        return self._records(LossAccumulator(self.text, self.segments), note)

    def _records(self, sums: LossAccumulator, note: str | None) -> list[Record]:
        # The keys of a record without values.
        targets = self.text.targets_digest(self.segments)
        losses: ExtrapolationRecord = {
            **self.planned[0],
            "note": note,
            "tokens": 0,
            "segments": len(self.segments.starts),
            "documents": None,
            "loss": None,
            "stderr": None,
            "bits_per_byte": None,
            "perplexity": None,
            "targets": targets,
            "groups": None,
        }
        if note is None:
            losses["tokens"], losses["documents"] = sums.tokens, sums.documents
            losses["loss"], losses["stderr"] = sums.loss, sums.stderr
            losses["bits_per_byte"] = sums.bits_per_byte
            losses["perplexity"] = perplexity(sums.loss)
            losses["groups"] = sums.groups()
        if self.bins is None:
            return [losses]

        # With bins, a second record.
        positions: PositionsRecord = {
            **self.planned[1],
            "note": note,
            "edges": [],
            "losses": [],
            "counts": [],
            "targets": targets,
        }
        if note is None:
            by_position = sums.by_position(self.bins)
            positions["edges"], positions["losses"], positions["counts"] = by_position
        return [losses, positions]


def plan_extrapolation(
    text: Text,
    lengths: Sequence[int],
    modes: Sequence[str],
    protocols: Sequence[str | Protocol],
    token_budget: int | None,
    provenance: Provenance,
    bins: int | None,
) -> list[ExtrapolationTask]:
    """The tasks of `evaluate_extrapolation`, by protocol, mode and length. Raises UserError."""
    lengths = unique_lengths(lengths)
    parsed_modes = parse_modes(modes, provenance.train_length)
    parsed_protocols: dict[Protocol, None] = {}
    for each in protocols:
        if isinstance(each, str):
            each = parse_protocol(each)
        parsed_protocols[each] = None
    tasks = []
    for protocol in parsed_protocols:
        # The text does not depend on the mode.
        segments_by_length = text.plan(protocol, lengths, token_budget)
        digests = [text.digest(segments) for segments in segments_by_length]
        for mode in parsed_modes:
            for segments, digest in zip(segments_by_length, digests, strict=True):
                planned = partial(
                    provenance.record,
                    corpus=text.corpus,
                    mode=mode.name,
                    protocol=protocol.name,
                    length=segments.length,
                    bos=text.bos,
                )
                records = [planned("extrapolation", determined_by=digest)]
                if bins is not None:
                    records.append(planned("positions", determined_by=(digest, bins)))
                tasks.append(ExtrapolationTask(mode, segments, tuple(records), text, bins))
    return tasks


def run_eval_tasks(
    model: Callable[[Tensor], Any],
    tasks: Sequence[EvalTask],
    *,
    query_chunk: int = QUERY_CHUNK,
    batch_tokens: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    rank: int = 0,
    world_size: int = 1,
    on_record: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Run tasks on a model and return their records in order. For the arguments, see
    `evaluate_extrapolation`.

    With a `world_size` above 1, every rank of the default process group must call this. Each
    computes its share of the segments, and all get all records.
    """
    # Check all modes before the first task.
    decoder = as_decoder(model)
    for task in tasks:
        reason = decoder.unsupported_reason(task.mode.attention)
        if reason is not None:
            raise UserError(f"inference mode {task.mode.name} {reason}")

    # One reader for all tasks.
    device = torch.device(device or model_device(model))
    if batch_tokens is None:
        batch_tokens = BATCH_TOKENS_CPU if device.type == "cpu" else BATCH_TOKENS_GPU
    reader = SegmentReader(decoder, device, query_chunk, batch_tokens)
    context = EvalContext(model, reader, rank, world_size)

    # The name in the progress line: the method's, or the model's.
    name = model_name(model)
    if tasks:
        name = tasks[0].planned[0]["pos_emb"] or name

    # Weighting tokens by cost keeps the estimate of the time left from assuming that long segments
    # are cheap.
    shares, costs, total = [], [], 0.0
    for task in tasks:
        span, length = task.mode.span, task.segments.length
        keys = min(length, span.window or length, span.block or length)
        costs.append(1 + keys / KEYS_PER_UNIT_COST)
        shares.append(task.segments.shard(rank, world_size))
        total += costs[-1] * shares[-1].targets

    # Run the tasks. All ranks have the same tasks, and share the segments of each.
    completed = 0.0
    records: list[Record] = []
    is_shown = progress and rank == 0
    display = Progress(name, total, unit="tokens", log_interval=None, enabled=is_shown)
    with inference(model), display:
        for task, share, cost in zip(tasks, shares, costs, strict=True):
            display.description = f"{name} {task.mode.name} {share.length:,}"
            display.restart(completed)
            tokens = 0

            def advance(count: int, completed: float = completed, cost: float = cost) -> None:
                nonlocal tokens
                tokens += count
                display.update(completed + cost * tokens, amount=world_size * tokens)

            # The records, which are passed on before the next task begins.
            results = task.run(context, share, advance)
            if decoder.complete_segments is not None:
                for record in results:
                    record["complete_segments"] = decoder.complete_segments
            records += results
            if on_record is not None:
                for record in results:
                    on_record(record)

            # The estimate for what remains, and one line per task.
            completed += cost * share.targets
            display.update(completed, amount=world_size * tokens)
            display.print(_result_line(name, results[0], display.rate_text))
    return records


def check_losses(records: Iterable[Record], place: object) -> None:
    """Raises UserError, starting with `place`, if a loss is NaN or infinite: all weights are
    finite, but the computation can overflow, as in fp16.
    """
    for record in records:
        is_loss = record["kind"] == "extrapolation"
        if is_loss and str(record["note"]).startswith(LOSS_NOTE):
            raise UserError(
                f"{place}: {record['pos_emb']} {record['mode']} at {record['length']:,}: "
                f"{record['note']} (n/a in the report); evaluate with --precision fp32"
            )


def _result_line(name: str, record: Record, rate: str) -> str:
    # Each kind of record has other values.
    values = cast(Mapping[str, Any], record)
    if values["note"] is not None:
        result = f"n/a: {values['note']}"
    elif values["kind"] == "resolution":
        result = f"resolution {values['resolution']:.3f} ({values['texts']} texts, {rate})"
    elif values["kind"] == "passkey":
        result = (
            f"{values['correct']} of {values['trials']} pass keys at depth {values['depth']:g} "
            f"(accuracy {values['accuracy']:.0%}, {rate})"
        )
    else:
        # A loss above 709 has no perplexity that a float can represent.
        number = "overflow"
        loss = f"{values['loss']:.4f}"
        if values["perplexity"] is not None:
            number = f"{values['perplexity']:.4g}"
        if values["stderr"] is not None:
            loss += f" ± {values['stderr']:.4f}"
            if (values["documents"] or 1) == 1:
                loss += " over segments"
        result = f"perplexity {number} (loss {loss}, {values['tokens']:,} tokens, {rate})"
    return f"{name} {values['mode']} {values['protocol']} at {values['length']:,}: {result}"


def evaluate_extrapolation(
    model: Callable[[Tensor], Any],
    tokens: Tensor | IntArray | Sequence[int] | Text,
    lengths: Sequence[int],
    *,
    modes: Sequence[str] = ("full",),
    protocols: Sequence[str | Protocol] = ("non-overlapping",),
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
    """Measure the loss and perplexity of a token stream, read in segments of each of the given
    lengths.

    Args:
        model: a callable from int64 tokens `[b, s]` to logits `[b, s, v]`, or to an object with
            such `.logits`. Models of this project and of transformers are fed in chunks through
            their KV cache, so memory grows linearly with the length.
        tokens: int64 `[n]`, or a `Text`, which also knows its documents. The first token is only
            context.
        lengths: segment lengths in tokens. Lengths that divide the longest make the best use of the
            text.
        modes: such as `full` or `window@512`; see `kerple/attention/inference/mode.py`.
        protocols: `non-overlapping`, `kerple`, `last-k`, `sliding`; see
            `megatron.evaluation.protocols`.
        token_budget: maximum number of tokens to score, the same ones at every length, evenly
            spaced in the text; None for no limit.
        position_bins: also measure the loss by position in this many bins. These records, of kind
            `positions`, are only passed to `on_record`.
        query_chunk: queries computed at once, for a model with a KV cache.
        batch_tokens: tokens of short segments computed at once; by default 8,192 on a CPU and
            32,768 on a GPU. Like `query_chunk`, this affects memory and speed, not results.
        vocab_size: the ids of the tokens that are read must be below it, and below the size of the
            model's own vocabulary, if known.
        device: where batches are sent; by default the device of the model's first parameter. The
            model is not moved.
        progress: show tokens/s and the time left on standard error: a changing line on a terminal,
            otherwise one line per result.
        pos_emb, seed, train_length: copied to the records. A model of this project knows its own
            pos_emb. Mode `blockwise` takes the block size from train_length.
        on_record: called with each record once it is measured.

    Returns:
        One record per protocol, mode and length, in this order. The loss is summed in float64. A
        length without positions (e.g. `learned` beyond its table) has a record with a `note` and
        without a loss.

    Raises:
        UserError: for an invalid argument, before anything is computed.
    """
    # What the caller does not say is that of the model.
    decoder = as_decoder(model)
    known = [size for size in (vocab_size, decoder.vocab_size) if size is not None]
    if pos_emb is None:
        pos_emb = decoder.pos_emb

    # Check everything before the model runs.
    text = as_text(tokens)
    sizes = {
        "token_budget": token_budget,
        "position_bins": position_bins,
        "query_chunk": query_chunk,
        "batch_tokens": batch_tokens,
    }
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    provenance = Provenance(pos_emb=pos_emb, seed=seed, train_length=train_length)
    tasks = plan_extrapolation(
        text, lengths, modes, protocols, token_budget, provenance, position_bins
    )
    text.check_ids(min(known, default=None))
    records = run_eval_tasks(
        model,
        tasks,
        query_chunk=query_chunk,
        batch_tokens=batch_tokens,
        device=device,
        progress=progress,
        on_record=on_record,
    )
    return extrapolation_records(records)


def unique_lengths(lengths: Iterable[int]) -> list[int]:
    """The lengths without duplicates. Raises UserError if there are none, or one is below 1 or not
    an integer.
    """
    unique: dict[int, None] = {}  # as an ordered set
    for length in lengths:
        if not isinstance(length, Real) or not 1 <= length < math.inf or length != int(length):
            raise UserError(f"a length must be an integer of at least 1 token, not {length!r}")
        unique[int(length)] = None
    if not unique:
        raise UserError("no lengths to evaluate: give at least one")
    return list(unique)
