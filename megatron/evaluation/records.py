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

    corpus: the text's name, e.g. openwebtext2, also where the measure reads none of it: a method's checkpoints on
    several corpora differ in it. protocol: with its sizes, e.g. last-k@256. length: tokens of a segment.
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


class Resolution(Record):
    """Kind `resolution`: attention resolution (LEX, arXiv 2212.10554, equations 3 and 4).

    layers: of each layer, the mean over its heads and over so many `texts`. resolution: the mean over layers. Where
    nothing could be measured they are empty and None, and `note` says why.
    """

    texts: int
    layers: list[float]
    resolution: float | None


class Passkey(Record):
    """Kind `passkey`: in how many of `trials` prompts of `length` tokens the model gives back a hidden number, whole.

    depth: where it is hidden, from 0 at the beginning to 1 just before the question. accuracy: correct / trials.
    """

    depth: float
    trials: int
    correct: int
    accuracy: float | None


class EffectiveLengths(Record):
    """Kind `effective_length`: the smallest distance whose bias is below -2, of every head (KERPLE, Figure 6).

    `length` is the number of distances looked at, and stands for a head whose bias does not fall that low. layers: what
    each list in `effective_lengths` is of, "layer 3", or "all layers" where they share the method. Both are empty for a
    method without a bias.
    """

    layers: list[str]
    effective_lengths: list[list[int]]


KINDS: dict[str, type[Record]] = {
    "extrapolation": Row,
    "positions": Positions,
    "resolution": Resolution,
    "passkey": Passkey,
    "effective_length": EffectiveLengths,
}


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
