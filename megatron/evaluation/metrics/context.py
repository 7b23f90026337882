"""Context utilization: how much the loss of the same tokens falls with more context.

For k = 64, 128, 256 ... below the length, the last `TARGETS` tokens of each text are scored with k tokens of context,
and with the whole text. The measure is the difference of the mean losses: what a model gains from the context beyond k
tokens. The texts are cut before the model reads them, so unlike in windowed modes no information from earlier tokens
reaches the targets through lower layers. Differences are paired: their standard error is that over documents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kerple.positional import PositionsExceeded
from megatron.evaluation.modes import parse_modes
from megatron.evaluation.protocols import LastK, Segments
from megatron.evaluation.records import ContextRecord, Provenance, Record
from megatron.evaluation.runner import LOSS_NOTE, EvalContext, EvalTask
from megatron.evaluation.scoring import LossAccumulator
from megatron.evaluation.statistics import standard_error
from megatron.evaluation.text import Text
from megatron.utils.errors import UserError

SHORTEST = 64  # the smallest k
TARGETS = 16  # scored tokens of each text


@dataclass(frozen=True)
class ContextTask(EvalTask):
    """The context utilization at one length.

    Attributes:
        contexts: the values of k, ascending.
        parts: for each k, the segments of k + TARGETS - 1 tokens: the targets have k to k + TARGETS - 1 tokens of
            context, counting the token that is read last.
        full: the segments of the whole length.
        segments: those of `full`, all of whose positions count as progress.
    """

    text: Text
    contexts: tuple[int, ...]
    parts: tuple[Segments, ...]
    full: Segments

    def run(self, context: EvalContext, share: Segments, advance: Callable[[int], None]) -> list[Record]:
        """If the model has no positions for the length, the record has a note instead of values."""
        # Losses with all contexts. Long ones take more of the progress bar.
        rank, world_size = context.rank, context.world_size
        plans = [*self.parts, self.full]
        sums = [LossAccumulator(self.text, segments, rank, world_size) for segments in plans]
        tokens, read, advanced, note = sum(segments.length for segments in plans), 0.0, 0, None
        try:
            for segments, accumulator in zip(plans, sums, strict=True):
                part = segments.shard(rank, world_size)
                for chunk in context.reader.losses(self.text.tokens, part, self.mode.attention, self.text.bos):
                    accumulator.add(chunk)
                    read += chunk.losses.numel() / segments.targets * segments.length / tokens
                    advance(int(read * self.segments.targets) - advanced)
                    advanced = int(read * self.segments.targets)
        except PositionsExceeded as error:
            note = str(error)

        # All ranks have the same note, and add up their sums.
        note = context.share_note(note)
        if note is None:
            for accumulator in sums:
                accumulator.reduce()
            losses = [accumulator.loss for accumulator in sums]
            if not np.isfinite(losses).all():
                note = f"{LOSS_NOTE} {next(loss for loss in losses if not np.isfinite(loss))}"

        # The shorter contexts are compared with the full one.
        *shorter, full = sums
        measured = note is None
        compared = shorter if measured else []
        counts = full.counts.numpy()
        record: ContextRecord = {
            **self.planned[0],
            "note": note,
            "tokens": full.tokens if measured else 0,
            "documents": full.documents if measured else None,
            "loss": full.loss if measured else None,
            "targets": self.text.targets_digest(self.full),
            "contexts": list(self.contexts) if measured else [],
            "differences": [part.loss - full.loss for part in compared],
            "stderrs": [standard_error((part.losses - full.losses).numpy(), counts) for part in compared],
        }
        return [record]


def plan_context(
    text: Text, lengths: Sequence[int], modes: Sequence[str], texts: int, provenance: Provenance
) -> list[ContextTask]:
    """One task per mode and length, in this order, on `texts` evenly spaced segments of the text, or fewer if it is
    shorter. Raises UserError if a length is too short, or the text.
    """
    protocol, tasks = LastK(TARGETS), []
    for mode in parse_modes(modes, provenance.train_length):
        for length in lengths:
            contexts = [SHORTEST << power for power in range(length.bit_length())]
            contexts = [size for size in contexts if size + TARGETS - 1 < length]
            if not contexts:
                raise UserError(
                    f"--context-utilization: the targets of {length:,} tokens have no less than {SHORTEST} tokens of "
                    f"context; choose --lengths of at least {SHORTEST + TARGETS}"
                )
            sizes, budget = [*(size + TARGETS - 1 for size in contexts), length], texts * TARGETS
            plans = text.plan(protocol, sizes, budget)
            full = plans[-1]
            planned = provenance.record(
                "context",
                corpus=text.corpus,
                bos=text.bos,
                mode=mode.name,
                protocol=f"last-k@{TARGETS}" + (" by document" if text.row is not None else ""),
                length=length,
                determined_by=("context", texts, tuple(contexts), text.digest(full)),
            )
            task = ContextTask(
                mode, Segments(length, full.starts), (planned,), text, tuple(contexts), tuple(plans[:-1]), full
            )
            tasks.append(task)
    return tasks
