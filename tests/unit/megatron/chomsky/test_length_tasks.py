"""The length tests: answers and distances recomputed in plain Python, and the distributions of what
is drawn.
"""

import numpy as np
import pytest

from megatron.chomsky import length_tasks
from megatron.chomsky.length_tasks import IGNORED, LENGTH_TASKS


def sample(name, length, samples=32, seed=7):
    return LENGTH_TASKS[name].sample(np.random.default_rng([seed, length]), samples, length)


def copying(tokens):
    (middle,) = [i for i, token in enumerate(tokens) if token == length_tasks.COPY]
    text = tokens[1:middle]
    assert tokens[0] == length_tasks.BEGIN
    assert tokens[middle + 1 :] == text[:-1]
    assert all(0 <= letter < 26 for letter in text)
    return {middle + i: (letter, i) for i, letter in enumerate(text)}


def induction(tokens):
    first, last = [i for i, token in enumerate(tokens) if token == length_tasks.MARK]
    assert last == len(tokens) - 1 > first + 1
    return {last: (tokens[first + 1], first)}


def associative_recall(tokens):
    pairs = {tokens[i]: (tokens[i + 1], i) for i in range(0, 8, 2)}
    assert len(pairs) == len({value for value, _ in pairs.values()}) == 4
    assert all(key < 64 <= value < 128 for key, (value, _) in pairs.items())
    queries = {i: pairs[token] for i, token in enumerate(tokens) if i >= 8 and token in pairs}
    assert all(token >= 128 for i, token in enumerate(tokens) if i >= 8 and i not in queries)
    assert sorted(key for _, key in queries.values()) == list(range(0, 8, 2)), (
        "each key is asked for once"
    )
    assert all(i % 2 == 0 for i in queries)
    return queries


def variable_tracking(tokens):
    assignments = {
        i + 2: (tokens[i + 1], tokens[i + 2]) for i, token in enumerate(tokens) if token == 1
    }
    assert len(assignments) == 8
    assert len({name for name, _ in assignments.values()}) == 8
    ask = tokens.index(0)
    assert all(
        token >= 38
        for i, token in enumerate(tokens[:ask])
        if not {i, i + 1, i + 2} & {*assignments}
    )
    answers, value, after = {}, tokens[ask + 1], -1
    for query in range(ask + 1, len(tokens)):
        assert tokens[query] == value
        ((place, name),) = [
            (place, name) for place, (name, source) in assignments.items() if source == value
        ]
        assert place > after, "a variable is assigned before it is used"
        answers[query], value, after = (name, place), name, place
    assert value not in {source for _, source in assignments.values()}, (
        "the whole chain is asked for"
    )
    return answers


SOLVERS = {
    solver.__name__: solver
    for solver in (copying, induction, associative_recall, variable_tracking)
}


@pytest.mark.parametrize("length", ["shortest", 64, 65, 200])
@pytest.mark.parametrize("name", SOLVERS)
def test_answers_and_distances(name, length):
    task = LENGTH_TASKS[name]
    length = task.shortest if length == "shortest" else length
    tokens, targets, distances = sample(name, length)
    assert (
        tokens.shape
        == targets.shape
        == distances.shape
        == (32, length - (name == "copying" and length % 2 == 0))
    )
    assert tokens.min() >= 0
    assert tokens.max() < task.symbols
    for row, expected, distance in zip(
        tokens.tolist(), targets.tolist(), distances.tolist(), strict=True
    ):
        answers = SOLVERS[name](row)
        assert {i: target for i, target in enumerate(expected) if target != IGNORED} == {
            query: answer for query, (answer, _) in answers.items()
        }
        assert {i: d for i, d in enumerate(distance) if d} == {
            query: query - key for query, (_, key) in answers.items()
        }
    assert set(SOLVERS) == set(LENGTH_TASKS)


def frequencies(values, size):
    return np.bincount(values, minlength=size) / len(values)


def assert_probabilities(values, expected):
    """Each frequency is within five standard errors of its probability."""
    errors = np.sqrt(np.multiply(expected, np.subtract(1, expected)) / len(values))
    assert (np.abs(frequencies(values, len(expected)) - expected) <= 5 * errors + 1e-12).all()


def test_queries_of_associative_recall_follow_zoology_s_power_law():
    count = (64 - 8) // 2
    power_law = 0.01 * np.arange(1, count + 1) ** (0.01 - 1)
    power_law /= power_law.sum()
    tokens, targets, _ = sample("associative_recall", 64, 20_000)
    first_key = tokens[:, :1]
    places = np.argmax((tokens[:, 8:] == first_key) & (targets[:, 8:] != IGNORED), axis=1) // 2
    assert_probabilities(places, power_law)  # the first key's place is drawn first
    # All places, as drawn one after another without replacement.
    generator = np.random.default_rng(0)
    drawn = np.concatenate(
        [generator.choice(count, 4, replace=False, p=power_law) for _ in range(4000)]
    )
    scored = (np.nonzero(targets[:, 8:] != IGNORED)[1] // 2)[: 4 * 4000]
    difference = 4 * (
        frequencies(drawn, count) - frequencies(scored, count)
    )  # of the probabilities that a place is drawn
    assert np.abs(difference).max() < 5 * np.sqrt(2 * 0.25 / 4000)
    assert_probabilities(tokens[:, 0], np.full(64, 1 / 64))


def test_other_distributions_are_uniform():
    tokens, targets, distances = sample("induction", 20, 20_000)
    assert_probabilities(19 - distances[:, -1], np.full(18, 1 / 18))
    assert_probabilities(targets[:, -1], np.full(16, 1 / 16))
    tokens, targets, _ = sample("copying", 11, 20_000)
    assert_probabilities(targets[:, 6], np.full(26, 1 / 26))
    tokens, targets, distances = sample("variable_tracking", 60, 20_000)
    assert_probabilities(targets[:, -1] - 12, np.full(26, 1 / 26))
    # The first of 8 assignments is as often of the queried chain as of the other; its place is that
    # of the smallest of 8 slots among 39.
    places = np.argmax(tokens == 1, axis=1)
    assert places.mean() == pytest.approx((39 + 1) / 9 - 1, abs=0.15)
    queried = tokens[np.arange(20_000), places + 2] == tokens[:, 56]
    assert queried.mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("name", LENGTH_TASKS)
def test_batches_are_determined_by_the_generator(name):
    first, again, other = (sample(name, 64, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.tokens, other.tokens)
