"""The records of a results file: what was measured, of which checkpoint, on which text.

`results.jsonl` (see `megatron.evaluation.results`) holds one record per line. Its `kind` says which of the types below
it is; the keys of `Record` are in every one of them. What is not known is None.
"""

import math
from typing import TypedDict


class Checkpoint(TypedDict):
    """The weights measured: the folder that holds `latest`, the step, a digest of the weights, and their sizes."""

    path: str | None
    iteration: int | None
    fingerprint: str
    layers: int
    hidden_size: int


class Record(TypedDict):
    """Common to all kinds.

    corpus: the text's name, e.g. openwebtext2. protocol: with its sizes, e.g. last-k@256. length: tokens of a segment.
    note: why there is no value. measurement: a digest of everything that decides the value beside the weights, e.g. of
    the scored tokens; a record whose digest is the same need not be measured again.
    """

    kind: str
    corpus: str | None
    checkpoint: Checkpoint | None
    pos_emb: str | None
    seed: int | None
    train_length: int | None
    mode: str
    protocol: str
    length: int
    note: str | None
    measurement: str


class Row(Record):
    """Kind `extrapolation`: the loss of one method and seed, in one mode and protocol, at one length.

    tokens: targets scored, in so many segments, which are of so many documents (None: boundaries not known).
    loss: mean negative log-likelihood of a target, in nats. stderr: its standard error over documents, or over segments
    where documents are not known; None with fewer than two of them. bits_per_byte: bits of all targets over the bytes
    of their text; None without a tokenizer. perplexity: exp(loss), None beyond a float. Where nothing could be measured
    all are None, `tokens` is 0 and `note` says why.
    """

    tokens: int
    segments: int
    documents: int | None
    loss: float | None
    stderr: float | None
    bits_per_byte: float | None
    perplexity: float | None


class Positions(Record):
    """Kind `positions`: the mean loss by position in the segment.

    Bin i holds the positions from edges[i] up to edges[i + 1], not itself: `losses[i]` is the mean of `counts[i]`
    targets, in nats.
    """

    edges: list[int]
    losses: list[float]
    counts: list[int]


KINDS: dict[str, type[Record]] = {"extrapolation": Row, "positions": Positions}


def rows_of(records: list[Record]) -> list[Row]:
    """The records of kind `extrapolation`."""
    return [record for record in records if record["kind"] == "extrapolation"]


def perplexity(loss: float | None) -> float | None:
    """exp(loss), or None where there is no loss or no float holds it."""
    if loss is None:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return None
