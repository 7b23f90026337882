"""Measurements planned and made: what is wanted of a model, and the loop over it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.evaluation.modes import Mode
from megatron.evaluation.progress import Progress
from megatron.evaluation.protocols import Segments
from megatron.evaluation.ranks import ALONE, Ranks
from megatron.evaluation.records import Record
from megatron.inference.decoder import Decoder, as_decoder, inference, model_device
from megatron.utils.errors import UserError

QUERY_CHUNK = 512
# A processor's caches hold no more at once; a GPU is idle with less.
BATCH_TOKENS_CPU, BATCH_TOKENS_GPU = 8192, 32768


@dataclass(frozen=True)
class Run:
    """What measurements share: the model, and how much of a text is computed at once."""

    model: Any
    decoder: Decoder
    device: torch.device
    query_chunk: int
    batch_tokens: int
    ranks: Ranks


@dataclass(frozen=True)
class Work:
    """One measurement to make, in one inference mode, on equal segments; `wanted` are its records, the values yet to
    come.
    """

    mode: Mode
    segments: Segments
    wanted: tuple[Record, ...]

    def records(self, run: Run, share: Segments, advance: Callable[[int], None]) -> list[Record]:
        """`wanted` with its values, on every rank. share: this rank's segments; `advance` is told the scored tokens."""
        raise NotImplementedError


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
    run = Run(model, decoder, device, query_chunk, batch_tokens, ranks)
    shares = [(work.mode, work.segments.share(ranks.rank, ranks.size)) for work in works]
    name = (works[0].wanted[0]["pos_emb"] if works else None) or _name(model)
    found: list[Record] = []
    with inference(model), Progress(name, shares, enabled=progress and ranks.is_main, ranks=ranks.size) as bar:
        for work, (mode, share) in zip(works, shares, strict=True):
            bar.start(mode, share)
            records = work.records(run, share, bar.advance)
            found += records
            if on_record is not None:
                for record in records:
                    on_record(record)
            bar.finish(records[0])  # what is printed is stored
    return found


def _name(model: Any) -> str:
    return getattr(model, "__name__", type(model).__name__)
