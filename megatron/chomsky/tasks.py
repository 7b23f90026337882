"""The fifteen tasks of the benchmark. Inputs are strings of a given length, outputs are strings or
a class.

Each task is a function of (generator, samples, length) that draws inputs with the distribution of
the benchmark's public code (https://github.com/google-deepmind/neural_networks_chomsky_hierarchy,
arXiv 2207.02098), and computes the targets. The same generator state gives the same batch, so
nothing is stored.

Legend: b samples, n input tokens, m output tokens.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.random import Generator

Level = Literal["regular", "context-free", "context-sensitive"]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

MODULUS = 5
PLUS, MINUS, TIMES = MODULUS, MODULUS + 1, MODULUS + 2
OPEN, CLOSE, UNKNOWN, EQUALS = MODULUS + 3, MODULUS + 4, MODULUS + 5, MODULUS + 6
POP, PUSH = 2, 3  # PUSH pushes 0, PUSH + 1 pushes 1
END = 2  # follows the output if its length varies


class Batch(NamedTuple):
    """Inputs, int64 `[b, n]` below the task's `symbols`; targets, int64 `[b, m]` below its
    `classes`; and which targets count in the accuracy, bool `[b, m]`. All of them count in the
    loss.
    """

    inputs: IntArray
    targets: IntArray
    counted: BoolArray


Drawn = tuple[IntArray, IntArray]  # inputs and targets
Draw = Callable[[Generator, int, int], Drawn]


@dataclass(frozen=True)
class Task:
    """One task of the benchmark.

    Attributes:
        level: of the Chomsky hierarchy: the weakest automaton that solves the task. Context-free
            means deterministic.
        symbols: size of the input alphabet.
        classes: size of the output alphabet.
        output_length: maps the input length n to the output length m.
        draw: (generator, samples, length) -> (inputs, targets).
        odd_only: all inputs have odd lengths; for an even length, inputs are one token shorter.
        ended: the output ends with the symbol `END`; later targets are 0 and do not count in the
            accuracy.
    """

    name: str
    level: Level
    symbols: int
    classes: int
    output_length: Callable[[int], int]
    draw: Draw
    odd_only: bool = False
    ended: bool = False

    def sample(self, generator: Generator, samples: int, length: int) -> Batch:
        """A batch with inputs of this length, at least 1 (or of one less, see `odd_only`)."""
        if self.odd_only and length % 2 == 0:
            length -= 1
        inputs, targets = self.draw(generator, samples, length)

        # Targets after the first END do not count.
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
        TASKS[name] = Task(name, level, symbols, classes, output_length, draw, odd_only, ended)
        return draw

    return register


def _bits(generator: Generator, samples: int, length: int) -> IntArray:
    return generator.integers(0, 2, (samples, length))


# Regular


@_task("regular", 2, 2)
def even_pairs(generator: Generator, samples: int, length: int) -> Drawn:
    """0 if the number of adjacent symbols that differ is even, otherwise 1. (Equivalently: do the
    first and last symbol differ?)
    """
    strings = _bits(generator, samples, length)
    return strings, (strings[:, :1] != strings[:, -1:])


@_task("regular", MODULUS + 3, MODULUS, odd_only=True)
def modular_arithmetic_simple(generator: Generator, samples: int, length: int) -> Drawn:
    """The value modulo 5 of digits joined by +, - and *, with the usual precedence."""
    digits = generator.integers(0, MODULUS, (samples, length // 2 + 1))
    signs = generator.integers(PLUS, TIMES + 1, (samples, length // 2))
    strings = np.empty((samples, length), dtype=np.int64)
    strings[:, ::2], strings[:, 1::2] = digits, signs

    # From left to right: the sum of all products before the current one.
    total, product = np.zeros(samples, dtype=np.int64), digits[:, 0].copy()
    for index in range(length // 2):
        sign, digit = signs[:, index], digits[:, index + 1]
        times = sign == TIMES
        total += np.where(times, 0, product)
        signed = np.where(sign == MINUS, -digit, digit)
        product = np.where(times, product * digit, signed) % MODULUS
    return strings, ((total + product) % MODULUS)[:, None]


@_task("regular", 2, 2)
def parity_check(generator: Generator, samples: int, length: int) -> Drawn:
    """Is the number of ones odd?"""
    strings = _bits(generator, samples, length)
    return strings, strings.sum(axis=1, keepdims=True) % 2


@_task("regular", 3, MODULUS)
def cycle_navigation(generator: Generator, samples: int, length: int) -> Drawn:
    """The final position on a cycle of five. Steps: 0 back, 1 stay, 2 forward."""
    steps = generator.integers(0, 3, (samples, length))
    return steps, (steps - 1).sum(axis=1, keepdims=True) % MODULUS


# Context-free, deterministic


@_task("context-free", 5, 3, lambda n: n + 1, ended=True)
def stack_manipulation(generator: Generator, samples: int, length: int) -> Drawn:
    """Input: a stack of bits, bottom first, then actions (2 pop, 3 push 0, 4 push 1). Output: the
    final stack, top first, then END. A pop from an empty stack does nothing.
    """
    strings = _bits(generator, samples, length)
    targets = np.zeros((samples, length + 1), dtype=np.int64)

    # Stacks of random depths; actions fill the rest of the string.
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
def reverse_string(generator: Generator, samples: int, length: int) -> Drawn:
    """The reversed string."""
    strings = _bits(generator, samples, length)
    return strings, strings[:, ::-1]


@_task("context-free", MODULUS + 5, MODULUS)
def modular_arithmetic(generator: Generator, samples: int, length: int) -> Drawn:
    """The value modulo 5 of an expression of digits, brackets, +, * and - (also as a sign)."""
    strings, values = [], []
    for _ in range(samples):
        tokens, value = _expression(generator, length, (PLUS, MINUS, TIMES))
        strings.append(tokens)
        values.append([value])
    return np.array(strings), np.array(values)


@_task("context-free", MODULUS + 7, MODULUS)
def solve_equation(generator: Generator, samples: int, length: int) -> Drawn:
    """Input: an expression as in `modular_arithmetic`, but without *, with one digit replaced by
    UNKNOWN, `=` and its value. Output: the digit, the first one after a random place. Inputs of
    fewer than three tokens are zeros, as are their outputs.
    """
    if length < 3:
        return np.zeros((samples, length), dtype=np.int64), np.zeros((samples, 1), dtype=np.int64)
    equations, solutions = [], []
    for _ in range(samples):
        tokens, value = _expression(generator, length - 2, (PLUS, MINUS))

        # Hide the first digit after a random place.
        place = int(generator.integers(len(tokens)))
        while tokens[place] >= MODULUS:
            place = (place + 1) % len(tokens)
        solutions.append([tokens[place]])
        tokens[place] = UNKNOWN
        equations.append([*tokens, EQUALS, value])
    return np.array(equations), np.array(solutions)


def _expression(generator: Generator, length: int, signs: tuple[int, ...]) -> tuple[list[int], int]:
    """An expression of `length` tokens and its value modulo 5: a digit, -digit, (digit), (-digit)
    or (expression sign expression), with one of these signs.
    """
    # A digit, perhaps with a sign and in parentheses.
    if length <= 4:
        value = int(generator.integers(MODULUS))
        tokens = [value]
        if length in (2, 4):
            tokens, value = [MINUS, value], -value
        if length > 2:
            tokens = [OPEN, *tokens, CLOSE]
        return tokens, value % MODULUS

    # Two expressions in parentheses, with a sign between them.
    left_length = int(generator.integers(1, length - 3))
    left, first = _expression(generator, left_length, signs)
    right, second = _expression(generator, length - 3 - left_length, signs)
    sign = signs[generator.integers(len(signs))]
    values = {PLUS: first + second, MINUS: first - second, TIMES: first * second}
    return [OPEN, *left, sign, *right, CLOSE], values[sign] % MODULUS


# Context-sensitive


@_task("context-sensitive", 2, 2, lambda n: 2 * n)
def duplicate_string(generator: Generator, samples: int, length: int) -> Drawn:
    """The string twice."""
    strings = _bits(generator, samples, length)
    return strings, np.concatenate((strings, strings), axis=1)


@_task("context-sensitive", 4, 2)
def missing_duplicate(generator: Generator, samples: int, length: int) -> Drawn:
    """Input: a string twice, with one symbol hidden (2), and a 3 if the length is odd. Output: the
    hidden symbol.
    """
    if length == 1:
        ones = np.ones((samples, 1), dtype=np.int64)
        return ones, ones.copy()
    half = _bits(generator, samples, length // 2)
    strings = np.concatenate((half, half, np.full((samples, length % 2), 3)), axis=1)
    rows = np.arange(samples)
    hidden = generator.integers(0, 2 * half.shape[1], samples)
    answers = strings[rows, hidden].copy()
    strings[rows, hidden] = 2
    return strings, answers[:, None]


@_task("context-sensitive", 2, 2, lambda n: n)
def odds_first(generator: Generator, samples: int, length: int) -> Drawn:
    """The second, fourth, sixth ... symbol, followed by the first, third ... This is the order of
    the benchmark's code, which counts from 0; its description says the opposite.
    """
    strings = _bits(generator, samples, length)
    return strings, np.concatenate((strings[:, 1::2], strings[:, ::2]), axis=1)


@_task("context-sensitive", 3, 3, lambda n: n + 1, ended=True)
def binary_addition(generator: Generator, samples: int, length: int) -> Drawn:
    """Input: two numbers above 0 separated by 2, least significant bit first. Output: their sum in
    the same order, then END. Inputs of fewer than three tokens are one number, which is the output.
    """
    return _calculation(generator, samples, length, operator.add)


@_task("context-sensitive", 3, 3, lambda n: n, ended=True)
def binary_multiplication(generator: Generator, samples: int, length: int) -> Drawn:
    """Like `binary_addition`, but with the product. The output is 0 for inputs of two tokens, and
    empty for one.
    """
    return _calculation(generator, samples, length, operator.mul)


def _calculation(
    generator: Generator, samples: int, length: int, operation: Callable[[int, int], int]
) -> Drawn:
    # A product and END are at most as long as the input, a sum and END at most one longer.
    product = operation is operator.mul
    strings = np.empty((samples, length), dtype=np.int64)
    targets = np.zeros((samples, length + (not product)), dtype=np.int64)
    for row in range(samples):
        if length > 2:
            # Two numbers, with a random place for the sign between them.
            place = int(generator.integers(1, length - 1))
            width = length - 1 - place
            first, second = _above_zero(generator, place), _above_zero(generator, width)
            digits = _digits(operation(first, second))
            strings[row] = [*_digits(first, place), 2, *_digits(second, width)]
        else:
            # One number, without a second one.
            number = int(generator.integers(2**length - 1))
            digits = _digits(number)
            if product:
                digits = [0] * (length - 1)
            strings[row] = _digits(number, length)
        targets[row, : len(digits) + 1] = [*digits, END]
    return strings, targets


def _above_zero(generator: Generator, width: int) -> int:
    """A uniform number from 1 to 2^width - 1."""
    while True:
        number = int.from_bytes(generator.bytes(-(-width // 8)), "little") >> (-width % 8)
        if number:
            return number


def _digits(number: int, width: int = 1) -> list[int]:
    """The bits of a number, least significant bit first, at least `width` of them."""
    return [int(digit) for digit in reversed(f"{number:0{width}b}")]


@_task("context-sensitive", 2, 2, lambda n: math.ceil(n / 2))
def compute_sqrt(generator: Generator, samples: int, length: int) -> Drawn:
    """The integer part of the square root of a number above 0, both most significant bit first."""
    numbers = [_above_zero(generator, length) for _ in range(samples)]
    width = math.ceil(length / 2)
    strings = [_digits(number, length)[::-1] for number in numbers]
    roots = [_digits(math.isqrt(number), width)[::-1] for number in numbers]
    return np.array(strings), np.array(roots)


@_task("context-sensitive", 5, 5, lambda n: n)
def bucket_sort(generator: Generator, samples: int, length: int) -> Drawn:
    """The symbols 0 to 4 of the string, sorted."""
    strings = generator.integers(0, 5, (samples, length))
    return strings, np.sort(strings, axis=1)
