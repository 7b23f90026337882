"""Synthetic tasks of decoders at any length: copying, induction, associative recall and variable
tracking.

Each task is a function of (generator, samples, length) that draws token sequences, the targets at
some of their positions, and for each target the distance to the token that determines it. The
number of facts to remember does not depend on the length, except in copying, so longer inputs only
add distance and tokens to ignore. The same generator state gives the same batch, so nothing is
stored.

Legend: b samples, n tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from megatron.chomsky.tasks import IntArray

IGNORED = -100  # the target of positions that are not scored, as in torch's cross_entropy

LETTERS = 26
BEGIN, COPY = LETTERS, LETTERS + 1

ORDINARY = 16  # symbols of induction
MARK = ORDINARY

PAIRS = 4
KEYS, VALUES, RECALL_NOISE = 64, 64, 64
QUERY_POWER = 0.01

CHAINS, HOPS = 2, 3
ASK, VAR, FIRST_NUMBER = 0, 1, 2
NUMBERS, NAMES, TRACKING_NOISE = 10, 26, 26
FIRST_NAME = FIRST_NUMBER + NUMBERS
FIRST_NOISE = FIRST_NAME + NAMES


class LengthBatch(NamedTuple):
    """Tokens, int64 `[b, n]` below the task's `symbols`; targets, int64 `[b, n]`: the token to
    predict at a position, or IGNORED; and distances, int64 `[b, n]`: the number of positions from
    the key of a target to its query, the position of the target; 0 where nothing is scored.
    """

    tokens: IntArray
    targets: IntArray
    distances: IntArray


Draw = Callable[[Generator, int, int], LengthBatch]


@dataclass(frozen=True)
class LengthTask:
    """One task.

    Attributes:
        symbols: size of the alphabet, of tokens and targets.
        shortest: the smallest length in tokens.
        guess: accuracy of random guessing among the possible answers.
        sample: (generator, samples, length) -> batch with sequences of `length` tokens, at least
            `shortest`; copying draws one less for an even length.
    """

    name: str
    symbols: int
    shortest: int
    guess: float
    sample: Draw


LENGTH_TASKS: dict[str, LengthTask] = {}


def _task(symbols: int, shortest: int, choices: int) -> Callable[[Draw], Draw]:
    """Register a function as the task of its name. choices: the number of possible answers."""

    def register(draw: Draw) -> Draw:
        name = draw.__name__
        LENGTH_TASKS[name] = LengthTask(name, symbols, shortest, 1 / choices, draw)
        return draw

    return register


@_task(LETTERS + 2, 3, LETTERS)
def copying(generator: Generator, samples: int, length: int) -> LengthBatch:
    """BEGIN, m = (length - 1) // 2 letters, COPY, and the same letters again except the last; from
    COPY on, the next letter is to be predicted.

    The task of Jelassi et al. (arXiv 2402.01032): letters are uniform over an alphabet of 26. The
    key of a target is the first occurrence of the token that precedes it, always m + 1 positions
    before.
    """
    count = (length - 1) // 2
    letters = generator.integers(0, LETTERS, (samples, count))
    tokens = np.empty((samples, 2 * count + 1), dtype=np.int64)
    tokens[:, 0], tokens[:, count + 1] = BEGIN, COPY
    tokens[:, 1 : count + 1], tokens[:, count + 2 :] = letters, letters[:, :-1]
    batch = _unscored(tokens)
    batch.targets[:, count + 1 :] = letters
    batch.distances[:, count + 1 :] = count + 1
    return batch


@_task(ORDINARY + 1, 3, ORDINARY)
def induction(generator: Generator, samples: int, length: int) -> LengthBatch:
    """Random symbols with MARK at a random place and at the end; the symbol that followed the first
    MARK is to be predicted at the second.

    The task of Fu et al. (arXiv 2212.14052, section 3.1), with the 16 symbols and the uniform place
    of Gu and Dao (arXiv 2312.00752, section 4.1.2), who also test it beyond the training length.
    The key is the first MARK.
    """
    tokens = generator.integers(0, ORDINARY, (samples, length))
    rows = np.arange(samples)
    places = generator.integers(0, length - 2, samples)
    tokens[rows, places] = tokens[:, -1] = MARK
    batch = _unscored(tokens)
    batch.targets[:, -1] = tokens[rows, places + 1]
    batch.distances[:, -1] = length - 1 - places
    return batch


@_task(KEYS + VALUES + RECALL_NOISE, 4 * PAIRS, VALUES)
def associative_recall(generator: Generator, samples: int, length: int) -> LengthBatch:
    """Multi-query associative recall: PAIRS pairs of a key and a value, followed by each key once
    more at an even distance from the end of the pairs; its value is to be predicted there. Other
    tokens are noise.

    The task of Arora et al. (Zoology, arXiv 2312.04927) with the distributions of their code
    (https://github.com/HazyResearch/zoology): distinct keys, distinct values, and distinct places
    for the queries, of which the i-th has probability proportional to i^(QUERY_POWER - 1). Two
    things differ. Keys, values and noise have alphabets of their own, of 64 symbols each, where the
    code has 8,192 symbols and draws noise from all of them. And the number of pairs does not grow
    with the length: it is always 4, the paper's number at length 64.
    """
    keys = _distinct(generator, samples, KEYS, PAIRS)
    values = KEYS + _distinct(generator, samples, VALUES, PAIRS)
    tokens = KEYS + VALUES + generator.integers(0, RECALL_NOISE, (samples, length))
    tokens[:, : 2 * PAIRS : 2], tokens[:, 1 : 2 * PAIRS : 2] = keys, values
    count = (length - 2 * PAIRS) // 2

    # The first arrivals of exponential variables with these rates are successive draws without
    # replacement.
    rates = np.arange(1, count + 1) ** (QUERY_POWER - 1)
    arrivals = generator.exponential(size=(samples, count)) / rates
    places = 2 * PAIRS + 2 * np.argsort(arrivals, axis=1)[:, :PAIRS]
    batch = _unscored(tokens)
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(batch.targets, places, values, axis=1)
    np.put_along_axis(batch.distances, places, places - 2 * np.arange(PAIRS), axis=1)
    return batch


@_task(FIRST_NOISE + TRACKING_NOISE, 3 * CHAINS * (HOPS + 1) + HOPS + 2, NAMES)
def variable_tracking(generator: Generator, samples: int, length: int) -> LengthBatch:
    """Assignments `VAR name source` among noise; then ASK, a number, and the variables with this
    value in order, which are to be predicted from the number on.

    The task of RULER (Hsieh et al., arXiv 2404.06654, section 3.2; https://github.com/NVIDIA/RULER)
    in tokens instead of text. The first variable of each of CHAINS chains is assigned a number, and
    each of HOPS further ones the variable before it. Assignments are at random places in the order
    of their chain; chains are interleaved. RULER has one chain of 4 hops by default, and repeats
    one sentence as noise. The key of a target is the source of the assignment to it.
    """
    # Names and numbers of the chains, and the order of the statements.
    steps = HOPS + 1
    statements = CHAINS * steps
    rows = np.arange(samples)[:, None]
    names = FIRST_NAME + _distinct(generator, samples, NAMES, statements)
    names = names.reshape(samples, CHAINS, steps)
    numbers = FIRST_NUMBER + _distinct(generator, samples, NUMBERS, CHAINS)
    in_order = np.repeat(np.arange(CHAINS), steps)
    chain = generator.permuted(np.tile(in_order, (samples, 1)), axis=1)
    step = np.zeros_like(chain)
    for index in range(CHAINS):
        step += (chain == index) * (np.cumsum(chain == index, axis=1) - 1)

    # The statements at random places of the noise.
    tokens = FIRST_NOISE + generator.integers(0, TRACKING_NOISE, (samples, length))
    context = length - HOPS - 2
    slots = _distinct(generator, samples, context - 2 * statements, statements)
    slots.sort(axis=1)
    places = slots + 2 * np.arange(statements)  # an assignment takes three tokens, but one slot
    np.put_along_axis(tokens, places, VAR, axis=1)
    np.put_along_axis(tokens, places + 1, names[rows, chain, step], axis=1)
    source = np.where(step == 0, numbers[rows, chain], names[rows, chain, step - 1])
    np.put_along_axis(tokens, places + 2, source, axis=1)

    # The question at the end, and the sources of the answers.
    asked = generator.integers(0, CHAINS, samples)
    answer = names[rows[:, 0], asked]
    tokens[:, context], tokens[:, context + 1] = ASK, numbers[rows[:, 0], asked]
    tokens[:, context + 2 :] = answer[:, :-1]
    batch = _unscored(tokens)
    batch.targets[:, context + 1 :] = answer
    keys = (places + 2)[chain == asked[:, None]].reshape(samples, steps)
    batch.distances[:, context + 1 :] = np.arange(context + 1, length) - keys
    return batch


def _distinct(generator: Generator, samples: int, choices: int, count: int) -> IntArray:
    """`count` different numbers below `choices` in random order, `[b, count]`."""
    return np.argsort(generator.random((samples, choices)), axis=1)[:, :count]


def _unscored(tokens: IntArray) -> LengthBatch:
    """A batch without scored positions."""
    return LengthBatch(tokens, np.full_like(tokens, IGNORED), np.zeros_like(tokens))
