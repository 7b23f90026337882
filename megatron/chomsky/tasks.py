"""The fifteen tasks: strings of an exact length in, strings or a class out.

Each is a function of (generator, samples, length) that draws its inputs uniformly, as the appendix of arXiv 2207.02098
describes them, and a rule for how long the output is. Nothing is stored: the same generator gives the same batch.

Legend: b samples, n input tokens, m output tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Level = Literal["regular", "context-free", "context-sensitive"]
Ints = np.ndarray

MODULUS = 5
PLUS, MINUS, TIMES = MODULUS, MODULUS + 1, MODULUS + 2
OPEN, CLOSE, UNKNOWN, EQUALS = MODULUS + 2, MODULUS + 3, MODULUS + 4, MODULUS + 5
POP, PUSH = 2, 3  # PUSH pushes a 0, PUSH + 1 a 1
END = 2  # ends an output that is shorter than its room


class Batch(NamedTuple):
    """int64 `[b, n]` inputs below the task's `symbols`, int64 `[b, m]` targets below its `classes`, and which of them
    count, bool `[b, m]`.
    """

    inputs: Ints
    targets: Ints
    counted: Ints


@dataclass(frozen=True)
class Task:
    """One task of the benchmark.

    Attributes:
        level: of the Chomsky hierarchy, the weakest automaton that solves it; context-free means deterministic.
        symbols: of the input alphabet.
        classes: of the output alphabet.
        output_length: input length -> output length m.
        odd_only: there are no inputs of an even length; those asked for are one token shorter.
        ended: the output ends with the sign 2, and what follows it does not count.
    """

    name: str
    level: Level
    symbols: int
    classes: int
    output_length: Callable[[int], int]
    draw: Callable[[np.random.Generator, int, int], tuple[Ints, Ints]]
    odd_only: bool = False
    ended: bool = False

    def sample(self, generator: np.random.Generator, samples: int, length: int) -> Batch:
        """A batch whose inputs have exactly this length (one less where only odd ones exist).

        Raises ValueError for a length below 1.
        """
        if length < 1:
            raise ValueError(f"{self.name}: an input has at least 1 token, not {length}")
        if self.odd_only and length % 2 == 0:
            length -= 1
        inputs, targets = self.draw(generator, samples, length)
        counted = np.ones(targets.shape, dtype=bool)
        if self.ended:
            # Up to the end sign; what follows it is filling.
            counted = np.cumsum(targets == END, axis=1) - (targets == END) == 0
        return Batch(inputs.astype(np.int64), targets.astype(np.int64), counted)


TASKS: dict[str, Task] = {}


def _one(_: int) -> int:
    return 1


def _same(length: int) -> int:
    return length


def _longer(length: int) -> int:
    return length + 1


def _task(level: Level, symbols: int, classes: int, output_length: Callable[[int], int] = _one, **options: bool):
    def add(draw):
        TASKS[draw.__name__] = Task(draw.__name__, level, symbols, classes, output_length, draw, **options)
        return draw

    return add


def _bits(generator: np.random.Generator, samples: int, length: int) -> Ints:
    return generator.integers(0, 2, (samples, length))


# Regular


@_task("regular", 2, 2)
def even_pairs(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """Is the number of neighbours that differ even? (That is: is the last symbol the first?)"""
    strings = _bits(generator, samples, length)
    return strings, (strings[:, :1] == strings[:, -1:])


@_task("regular", MODULUS + 3, MODULUS, odd_only=True)
def modular_arithmetic_simple(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """The value modulo 5 of digits joined by +, - and *, the products first; only odd lengths exist."""
    digits = generator.integers(0, MODULUS, (samples, length // 2 + 1))
    signs = generator.integers(PLUS, TIMES + 1, (samples, length // 2))
    strings = np.empty((samples, length), dtype=np.int64)
    strings[:, ::2], strings[:, 1::2] = digits, signs
    total, product = np.zeros(samples, dtype=np.int64), digits[:, 0].copy()
    for index in range(length // 2):
        sign, digit = signs[:, index], digits[:, index + 1]
        times = sign == TIMES
        total += np.where(times, 0, product)
        product = np.where(times, product * digit, np.where(sign == MINUS, -digit, digit)) % MODULUS
    return strings, ((total + product) % MODULUS)[:, None]


@_task("regular", 2, 2)
def parity_check(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """Is the number of ones odd?"""
    strings = _bits(generator, samples, length)
    return strings, strings.sum(axis=1, keepdims=True) % 2


@_task("regular", 3, MODULUS)
def cycle_navigation(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """Where on a cycle of five the steps lead: 0 stay, 1 forward, 2 back."""
    steps = generator.integers(0, 3, (samples, length))
    moves = np.where(steps == 2, -1, steps)
    return steps, moves.sum(axis=1, keepdims=True) % MODULUS


# Context-free, deterministic


@_task("context-free", 5, 3, _longer, ended=True)
def stack_manipulation(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """A stack of bits, bottom first, then actions: 2 pop, 3 push 0, 4 push 1. Out: the stack, top first, then the end
    sign. A pop from an empty stack does nothing.
    """
    strings, targets = _bits(generator, samples, length), np.zeros((samples, length + 1), dtype=np.int64)
    depths = generator.integers(1, max(length, 2), samples)
    actions = generator.integers(POP, PUSH + 2, (samples, length))
    for row, depth in enumerate(depths):
        strings[row, depth:] = actions[row, depth:]
        stack = strings[row, :depth].tolist()
        for action in strings[row, depth:].tolist():
            if action >= PUSH:
                stack.append(action - PUSH)
            elif stack:
                stack.pop()
        targets[row, : len(stack) + 1] = [*reversed(stack), END]
    return strings, targets


@_task("context-free", 2, 2, _same)
def reverse_string(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """The string from its end."""
    strings = _bits(generator, samples, length)
    return strings, strings[:, ::-1]


@_task("context-free", MODULUS + 4, MODULUS)
def modular_arithmetic(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """The value modulo 5 of an expression of digits, brackets, + and -, signs before a digit among them."""
    expressions = [_expression(generator, length) for _ in range(samples)]
    return np.array([tokens for tokens, _ in expressions]), np.array([[value] for _, value in expressions])


@_task("context-free", MODULUS + 6, MODULUS)
def solve_equation(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """Such an expression with one digit unknown, `=` and its value; out: the digit. Below three tokens nothing can be
    asked, and the answer is 0.
    """
    if length < 3:
        return np.zeros((samples, length)), np.zeros((samples, 1))
    equations, solutions = [], []
    for _ in range(samples):
        tokens, value = _expression(generator, length - 2)
        digits = [place for place, token in enumerate(tokens) if token < MODULUS]
        place = digits[generator.integers(len(digits))]
        solutions.append([tokens[place]])
        tokens[place] = UNKNOWN
        equations.append([*tokens, EQUALS, value])
    return np.array(equations), np.array(solutions)


def _expression(generator: np.random.Generator, length: int) -> tuple[list[int], int]:
    """An expression of exactly so many tokens and its value modulo 5: a digit, -digit, (digit), (-digit) or (expression
    sign expression).
    """
    if length <= 4:
        digit = int(generator.integers(MODULUS))
        negated = length in (2, 4)
        tokens = [MINUS, digit] if negated else [digit]
        return [OPEN, *tokens, CLOSE] if length > 2 else tokens, (-digit if negated else digit) % MODULUS
    left = int(generator.integers(1, length - 3))
    first, second = _expression(generator, left), _expression(generator, length - 3 - left)
    sign = PLUS if generator.integers(2) else MINUS
    value = first[1] + second[1] if sign == PLUS else first[1] - second[1]
    return [OPEN, *first[0], sign, *second[0], CLOSE], value % MODULUS


# Context-sensitive


@_task("context-sensitive", 2, 2, lambda length: 2 * length)
def duplicate_string(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """The string twice."""
    strings = _bits(generator, samples, length)
    return strings, np.concatenate((strings, strings), axis=1)


@_task("context-sensitive", 4, 2)
def missing_duplicate(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """A string twice, with one symbol hidden (2), and 3 at the end of an odd length; out: the hidden symbol."""
    if length == 1:
        return np.ones((samples, 1)), np.ones((samples, 1))
    half = _bits(generator, samples, length // 2)
    strings = np.concatenate((half, half, np.full((samples, length % 2), 3)), axis=1)
    rows, hidden = np.arange(samples), generator.integers(0, 2 * half.shape[1], samples)
    answers = strings[rows, hidden].copy()
    strings[rows, hidden] = 2
    return strings, answers[:, None]


@_task("context-sensitive", 2, 2, _same)
def odds_first(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """The first, third, fifth ... symbol, then the second, fourth ..."""
    strings = _bits(generator, samples, length)
    return strings, np.concatenate((strings[:, ::2], strings[:, 1::2]), axis=1)


@_task("context-sensitive", 3, 3, _longer, ended=True)
def binary_addition(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """Two numbers with 2 between them, least bit first; out: their sum, least bit first, then the end sign."""
    return _calculation(generator, samples, length, lambda first, second: first + second)


@_task("context-sensitive", 3, 3, _longer, ended=True)
def binary_multiplication(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """As the addition, with the product."""
    return _calculation(generator, samples, length, lambda first, second: first * second)


def _calculation(
    generator: np.random.Generator, samples: int, length: int, operation: Callable[[int, int], int]
) -> tuple[Ints, Ints]:
    """Below three tokens there is no room for two numbers: the one that there is, is the answer."""
    strings, targets = _bits(generator, samples, length), np.zeros((samples, length + 1), dtype=np.int64)
    places = generator.integers(1, length - 1, samples) if length > 2 else [length] * samples
    for row, place in enumerate(places):
        first = _number(strings[row, :place])
        if place < length:
            strings[row, place] = 2
            result = operation(first, _number(strings[row, place + 1 :]))
        else:
            result = first
        digits = [int(digit) for digit in reversed(f"{result:b}")]
        targets[row, : len(digits) + 1] = [*digits, END]
    return strings, targets


def _number(bits: Ints) -> int:
    """The number with these bits, the least first."""
    return int("".join(map(str, bits[::-1].tolist())), 2)


@_task("context-sensitive", 2, 2, lambda length: math.ceil(length / 2))
def compute_sqrt(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """The whole part of a number's square root, both greatest bit first."""
    strings = _bits(generator, samples, length)
    width = math.ceil(length / 2)
    roots = [math.isqrt(_number(row[::-1])) for row in strings]
    return strings, np.array([[int(digit) for digit in f"{root:0{width}b}"] for root in roots])


@_task("context-sensitive", 5, 5, _same)
def bucket_sort(generator: np.random.Generator, samples: int, length: int) -> tuple[Ints, Ints]:
    """The symbols 0 ... 4 of the string, in order."""
    strings = generator.integers(0, 5, (samples, length))
    return strings, np.sort(strings, axis=1)
