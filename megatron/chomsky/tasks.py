"""The fifteen tasks of the benchmark. Inputs are strings of a given length, outputs are strings or a class.

Each task is a function of (generator, samples, length) that draws inputs uniformly, as the appendix of arXiv 2207.02098
describes, and computes the targets. The same generator state gives the same batch, so nothing is stored.

Legend: b samples, n input tokens, m output tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Level = Literal["regular", "context-free", "context-sensitive"]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

MODULUS = 5
PLUS, MINUS, TIMES = MODULUS, MODULUS + 1, MODULUS + 2
OPEN, CLOSE, UNKNOWN, EQUALS = MODULUS + 2, MODULUS + 3, MODULUS + 4, MODULUS + 5
POP, PUSH = 2, 3  # PUSH pushes 0, PUSH + 1 pushes 1
END = 2  # follows the output if its length varies


class Batch(NamedTuple):
    """Inputs, int64 `[b, n]` below the task's `symbols`; targets, int64 `[b, m]` below its `classes`; and which targets
    count in loss and accuracy, bool `[b, m]`.
    """

    inputs: IntArray
    targets: IntArray
    counted: BoolArray


Draw = Callable[[np.random.Generator, int, int], tuple[IntArray, IntArray]]


@dataclass(frozen=True)
class Task:
    """One task of the benchmark.

    Attributes:
        level: of the Chomsky hierarchy: the weakest automaton that solves the task. Context-free means deterministic.
        symbols: size of the input alphabet.
        classes: size of the output alphabet.
        output_length: maps the input length n to the output length m.
        draw: (generator, samples, length) -> (inputs, targets).
        odd_only: all inputs have odd lengths; for an even length, inputs are one token shorter.
        ended: the output ends with the symbol `END`, and later targets do not count.
    """

    name: str
    level: Level
    symbols: int
    classes: int
    output_length: Callable[[int], int]
    draw: Draw
    odd_only: bool = False
    ended: bool = False

    def sample(self, generator: np.random.Generator, samples: int, length: int) -> Batch:
        """A batch with inputs of this length (or one less, see `odd_only`). Raises ValueError for a length below 1."""
        if length < 1:
            raise ValueError(f"{self.name}: the length must be at least 1, not {length}")
        if self.odd_only and length % 2 == 0:
            length -= 1
        inputs, targets = self.draw(generator, samples, length)
        counted = np.ones(targets.shape, dtype=np.bool_)
        if self.ended:
            counted = np.cumsum(targets == END, axis=1) - (targets == END) == 0
        return Batch(inputs.astype(np.int64), targets.astype(np.int64), counted)


TASKS: dict[str, Task] = {}


def _task(
    level: Level,
    symbols: int,
    classes: int,
    output_length: Callable[[int], int] = lambda n: 1,
    *,
    odd_only: bool = False,
    ended: bool = False,
) -> Callable[[Draw], Draw]:
    """Register a function as the task of its name."""

    def register(draw: Draw) -> Draw:
        name = draw.__name__
        TASKS[name] = Task(name, level, symbols, classes, output_length, draw, odd_only=odd_only, ended=ended)
        return draw

    return register


def _bits(generator: np.random.Generator, samples: int, length: int) -> IntArray:
    return generator.integers(0, 2, (samples, length))


# Regular


@_task("regular", 2, 2)
def even_pairs(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """Is the number of adjacent symbols that differ even? (Equivalently: do the first and last symbol agree?)"""
    strings = _bits(generator, samples, length)
    return strings, (strings[:, :1] == strings[:, -1:])


@_task("regular", MODULUS + 3, MODULUS, odd_only=True)
def modular_arithmetic_simple(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """The value modulo 5 of digits joined by +, - and *, with the usual precedence."""
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
def parity_check(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """Is the number of ones odd?"""
    strings = _bits(generator, samples, length)
    return strings, strings.sum(axis=1, keepdims=True) % 2


@_task("regular", 3, MODULUS)
def cycle_navigation(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """The final position on a cycle of five. Steps: 0 stay, 1 forward, 2 back."""
    steps = generator.integers(0, 3, (samples, length))
    moves = np.where(steps == 2, -1, steps)
    return steps, moves.sum(axis=1, keepdims=True) % MODULUS


# Context-free, deterministic


@_task("context-free", 5, 3, lambda n: n + 1, ended=True)
def stack_manipulation(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """Input: a stack of bits, bottom first, then actions (2 pop, 3 push 0, 4 push 1). Output: the final stack, top
    first, then END. A pop from an empty stack does nothing.
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


@_task("context-free", 2, 2, lambda n: n)
def reverse_string(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """The reversed string."""
    strings = _bits(generator, samples, length)
    return strings, strings[:, ::-1]


@_task("context-free", MODULUS + 4, MODULUS)
def modular_arithmetic(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """The value modulo 5 of an expression of digits, brackets, +, and - (also as a sign)."""
    expressions = [_expression(generator, length) for _ in range(samples)]
    return np.array([tokens for tokens, _ in expressions]), np.array([[value] for _, value in expressions])


@_task("context-free", MODULUS + 6, MODULUS)
def solve_equation(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """Input: an expression as in `modular_arithmetic` with one digit replaced by UNKNOWN, `=` and its value. Output:
    the digit. Inputs of fewer than three tokens are zeros, and so are their outputs.
    """
    if length < 3:
        return np.zeros((samples, length), dtype=np.int64), np.zeros((samples, 1), dtype=np.int64)
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
    """An expression of `length` tokens and its value modulo 5: a digit, -digit, (digit), (-digit) or
    (expression sign expression).
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


@_task("context-sensitive", 2, 2, lambda n: 2 * n)
def duplicate_string(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """The string twice."""
    strings = _bits(generator, samples, length)
    return strings, np.concatenate((strings, strings), axis=1)


@_task("context-sensitive", 4, 2)
def missing_duplicate(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """Input: a string twice, with one symbol hidden (2), and a 3 if the length is odd. Output: the hidden symbol."""
    if length == 1:
        return np.ones((samples, 1), dtype=np.int64), np.ones((samples, 1), dtype=np.int64)
    half = _bits(generator, samples, length // 2)
    strings = np.concatenate((half, half, np.full((samples, length % 2), 3)), axis=1)
    rows, hidden = np.arange(samples), generator.integers(0, 2 * half.shape[1], samples)
    answers = strings[rows, hidden].copy()
    strings[rows, hidden] = 2
    return strings, answers[:, None]


@_task("context-sensitive", 2, 2, lambda n: n)
def odds_first(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """The first, third, fifth ... symbol, followed by the second, fourth ..."""
    strings = _bits(generator, samples, length)
    return strings, np.concatenate((strings[:, ::2], strings[:, 1::2]), axis=1)


@_task("context-sensitive", 3, 3, lambda n: n + 1, ended=True)
def binary_addition(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """Input: two numbers separated by 2, least significant bit first. Output: their sum in the same order, then END."""
    return _calculation(generator, samples, length, lambda first, second: first + second)


@_task("context-sensitive", 3, 3, lambda n: n + 1, ended=True)
def binary_multiplication(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """As `binary_addition`, with the product."""
    return _calculation(generator, samples, length, lambda first, second: first * second)


def _calculation(
    generator: np.random.Generator, samples: int, length: int, operation: Callable[[int, int], int]
) -> tuple[IntArray, IntArray]:
    """Inputs of fewer than three tokens are one number, which is the output."""
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


def _number(bits: IntArray) -> int:
    """The number with these bits, least significant bit first."""
    return int("".join(map(str, bits[::-1].tolist())), 2)


@_task("context-sensitive", 2, 2, lambda n: math.ceil(n / 2))
def compute_sqrt(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """The integer part of the square root of a number, both most significant bit first."""
    strings = _bits(generator, samples, length)
    width = math.ceil(length / 2)
    roots = [math.isqrt(_number(row[::-1])) for row in strings]
    return strings, np.array([[int(digit) for digit in f"{root:0{width}b}"] for root in roots])


@_task("context-sensitive", 5, 5, lambda n: n)
def bucket_sort(generator: np.random.Generator, samples: int, length: int) -> tuple[IntArray, IntArray]:
    """The symbols 0 to 4 of the string, sorted."""
    strings = generator.integers(0, 5, (samples, length))
    return strings, np.sort(strings, axis=1)
