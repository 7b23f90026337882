"""The tasks compared with solutions in plain Python."""

import itertools
import math
import re

import numpy as np
import pytest

from megatron.chomsky.tasks import TASKS

LENGTHS = [1, 2, 3, 4, 5, 6, 40, 41]


def until_end(targets):
    return targets[: targets.index(2)]


def value(text):
    """The value of an expression of digits, brackets and operators, modulo 5."""
    return eval(text) % 5  # the characters come from the tables below


def text(tokens, table):
    return "".join(str(token) if token < 5 else table[token - 5] for token in tokens)


def number(bits):
    return sum(bit << place for place, bit in enumerate(bits))


def stack_after(tokens):
    stack = []
    bottom = re.match("[01]+", "".join(map(str, tokens))).end()
    for token in tokens[:bottom]:
        stack.append(token)
    for token in tokens[bottom:]:
        stack = stack[:-1] if token == 2 else [*stack, token - 3]
    return stack[::-1]


def split(tokens, separator):
    place = tokens.index(separator)
    return tokens[:place], tokens[place + 1 :]


def calculated(tokens, operation):
    if 2 not in tokens:
        return number(tokens)
    return operation(*map(number, split(tokens, 2)))


SOLVERS = {
    "even_pairs": lambda x: [sum(a != b for a, b in itertools.pairwise(x)) % 2],
    "modular_arithmetic_simple": lambda x: [value(text(x, "+-*"))],
    "parity_check": lambda x: [x.count(1) % 2],
    "cycle_navigation": lambda x: [(x.count(2) - x.count(0)) % 5],
    "reverse_string": lambda x: list(reversed(x)),
    "modular_arithmetic": lambda x: [value(text(x, "+-*()"))],
    "duplicate_string": lambda x: x + x,
    "odds_first": lambda x: (
        [s for i, s in enumerate(x) if i % 2] + [s for i, s in enumerate(x) if i % 2 == 0]
    ),
    "compute_sqrt": lambda x: [
        int(digit) for digit in format(math.isqrt(number(x[::-1])), f"0{(len(x) + 1) // 2}b")
    ],
    "bucket_sort": lambda x: sorted(x),
}
ENDED = {
    "stack_manipulation": stack_after,
    "binary_addition": lambda x: calculated(x, lambda a, b: a + b),
    "binary_multiplication": lambda x: calculated(x, lambda a, b: a * b),
}


def sample(name, length, samples=32):
    batch = TASKS[name].sample(np.random.default_rng([7, length]), samples, length)
    return batch.inputs.tolist(), batch.targets.tolist(), batch.counted.tolist()


@pytest.mark.parametrize("name", SOLVERS)
def test_targets(name):
    for length in LENGTHS:
        for tokens, targets, counted in zip(*sample(name, length), strict=True):
            assert targets == [int(answer) for answer in SOLVERS[name](tokens)]
            assert all(counted)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ENDED)
def test_targets_with_an_end_symbol(name, length):
    for tokens, targets, counted in zip(*sample(name, length), strict=True):
        answer = ENDED[name](tokens)
        output = until_end(targets)
        if name == "binary_multiplication" and length < 3:
            assert output == [0] * (length - 1)
        else:
            assert (output if name == "stack_manipulation" else number(output)) == answer
        assert counted == [place <= len(output) for place in range(len(targets))]
        assert not any(targets[len(output) + 1 :])
        if name != "stack_manipulation" and length > 2:
            assert output[-1] == 1
            assert min(number(part) for part in split(tokens, 2)) > 0


@pytest.mark.parametrize("length", [n for n in LENGTHS if n > 2])
def test_the_target_solves_the_equation(length):
    for tokens, targets, _ in zip(*sample("solve_equation", length), strict=True):
        assert tokens.count(10) == 1
        assert tokens[-2] == 11
        assert 7 not in tokens  # no multiplication, so that the solution is unique
        left = text([targets[0] if token == 10 else token for token in tokens[:-2]], "+-*()")
        assert value(left) == tokens[-1]


@pytest.mark.parametrize("length", [n for n in LENGTHS if n > 1])
def test_the_target_completes_the_duplicate(length):
    for tokens, targets, _ in zip(*sample("missing_duplicate", length), strict=True):
        assert tokens.count(2) == 1
        string = [targets[0] if token == 2 else token for token in tokens]
        half = length // 2
        assert string[:half] == string[half : 2 * half]
        assert string[2 * half :] == [3] * (length % 2)


@pytest.mark.parametrize("name", TASKS)
def test_lengths_and_alphabets(name):
    task = TASKS[name]
    for length in LENGTHS:
        batch = task.sample(np.random.default_rng(length), 16, length)
        real = length - 1 if task.odd_only and length % 2 == 0 else length
        assert batch.inputs.shape == (16, real)
        assert batch.targets.shape == batch.counted.shape == (16, task.output_length(real))
        assert 0 <= batch.inputs.min() <= batch.inputs.max() < task.symbols
        assert 0 <= batch.targets.min() <= batch.targets.max() < task.classes
        again = task.sample(np.random.default_rng(length), 16, length)
        assert (again.inputs == batch.inputs).all()


@pytest.mark.parametrize("name", TASKS)
def test_targets_cover_their_classes(name):
    batch = TASKS[name].sample(np.random.default_rng(3), 2000, 41)
    counts = np.bincount(batch.targets[batch.counted], minlength=TASKS[name].classes)
    # End symbols are rare; none of the other classes may be.
    rarest = counts[:2].min() if TASKS[name].ended else counts.min()
    assert rarest > 0.5 * counts[: len(counts) - TASKS[name].ended].mean()


def test_a_third_of_the_signs_of_modular_arithmetic_multiply():
    inputs = TASKS["modular_arithmetic"].sample(np.random.default_rng(0), 500, 40).inputs
    plus, times = (
        int((inputs == token).sum()) for token in (5, 7)
    )  # - is also the sign of a digit
    assert times == pytest.approx(plus, rel=0.1)


def test_the_unknown_is_the_first_digit_after_a_random_place():
    """So a digit after many other symbols is chosen more often, as in the benchmark's code."""
    inputs = TASKS["solve_equation"].sample(np.random.default_rng(0), 4000, 6).inputs
    assert (inputs[:, :4] == [8, 6, 10, 9]).all()  # (-x)
    inputs = (
        TASKS["solve_equation"].sample(np.random.default_rng(0), 4000, 7).inputs
    )  # (d+d), (d-d): the digits
    first = (inputs[:, 1] == 10).mean()
    assert first == pytest.approx(
        3 / 5, abs=0.03
    )  # from the places 4, 0 and 1; the other from 2 and 3


def test_numbers_are_uniform_above_zero():
    inputs = TASKS["compute_sqrt"].sample(np.random.default_rng(0), 7000, 3).inputs
    counts = np.bincount(inputs @ [4, 2, 1], minlength=8)
    assert counts[0] == 0
    assert counts[1:].min() > 900
    assert TASKS["compute_sqrt"].sample(np.random.default_rng(0), 50, 1).inputs.min() == 1
    inputs = TASKS["binary_addition"].sample(np.random.default_rng(0), 3000, 2).inputs
    assert set(map(tuple, inputs.tolist())) == {(0, 0), (1, 0), (0, 1)}  # the code leaves out 3


def test_there_are_fifteen_tasks_of_three_levels():
    assert len(TASKS) == 15
    assert {task.level for task in TASKS.values()} == {
        "regular",
        "context-free",
        "context-sensitive",
    }
