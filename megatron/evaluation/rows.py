"""One row of results: a method, an inference mode, a seed and a length, with the loss measured there."""

import math
from typing import TypedDict

from megatron.evaluation.protocols import Segments


class Row(TypedDict):
    """What a results file holds, one per measurement. Unknown origins are None.

    `tokens` were scored in segments of `length`; `loss` is their mean negative log-likelihood in nats, `perplexity` its
    exponential (None where that is beyond a float). Where nothing could be measured both are None and `note` says why.
    """

    pos_emb: str | None
    mode: str
    protocol: str
    seed: int | None
    train_length: int | None
    length: int
    tokens: int
    loss: float | None
    perplexity: float | None
    note: str | None


def make_row(
    segments: Segments,
    loss: float | None,
    note: str | None,
    *,
    mode: str,
    protocol: str,
    pos_emb: str | None,
    seed: int | None,
    train_length: int | None,
) -> Row:
    """The row of one measurement; a loss that is no finite number is reported as such, not as a number."""
    if loss is not None and not math.isfinite(loss):
        loss, note = None, f"the loss is {loss}"
    return Row(
        pos_emb=pos_emb,
        mode=mode,
        protocol=protocol,
        seed=seed,
        train_length=train_length,
        length=segments.length,
        tokens=segments.targets if loss is not None else 0,
        loss=loss,
        perplexity=perplexity(loss),
        note=note,
    )


def perplexity(loss: float | None) -> float | None:
    """exp(loss), or None where there is no loss or no float holds it."""
    if loss is None:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return None
