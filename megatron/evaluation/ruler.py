"""Retrieval and tracing tasks at given lengths, as local tasks of lm-evaluation-harness.

The tasks are those of RULER (Hsieh et al., arXiv 2404.06654, section 3 and appendix B) that need no downloaded text,
with its numbers of needles, chains and hops, in our own words:

    niah_single        one needle (a key and a number of 7 digits) in repeated sentences
    niah_multikey      one needle among other needles with other keys
    niah_multivalue    four needles with the same key in repeated sentences; all four numbers are asked for
    niah_multiquery    four needles with different keys in repeated sentences; all four numbers are asked for
    variable_tracking  a chain of five variables with the same value in repeated sentences; all names are asked for

A task's prompts have as many sentences as fit into its length together with the answer, with the tokenizer of the
evaluated model. Needles are at random places. The score is RULER's: the share of the answers that the generated text
contains, regardless of case.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron.tokenizer import Tokenizer
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

TAG = "ruler_local"  # selects all written tasks
METRIC = "string_match"
NEEDLES, HOPS = 4, 4
SPARE_TOKENS = 16  # to generate besides the answers

NOISE = (
    "The lake is calm today.",
    "A train leaves the station every hour.",
    "The bread is still warm.",
    "Nobody has opened the window.",
    "The road follows the river to the sea.",
)
ADJECTIVES = (
    "amber brave calm clever cold dark deep dry early faint gentle golden happy heavy hollow humble icy jolly kind "
    "late light lively long loud mellow mild narrow noble pale plain proud quick quiet rapid rough round sharp silent "
    "simple slow small smooth soft solid steady sunny sweet tall thin tidy warm wide wild wise young"
)
NOUNS = (
    "anchor apple arrow basket beach bell bird boat bottle bridge brook cabin candle canyon castle cedar cloud coin "
    "coral desert dragon eagle engine falcon feather field forest garden hammer harbor hill island jacket kettle "
    "ladder lamp lantern lemon letter marble meadow mirror mountain needle ocean orchard paper pebble pencil planet "
    "pocket rabbit river rocket saddle shadow silver spoon stone table tiger tower valley violin wagon whale window"
)
KEYS = [f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split()]


@dataclass(frozen=True)
class Sample:
    """One prompt without its filler.

    Attributes:
        introduction, question: the first and the last sentences.
        facts: sentences to insert in this order.
        answers: the strings to generate.
        filler: the sentences around the facts, without end.
    """

    introduction: str
    facts: list[str]
    question: str
    answers: list[str]
    filler: Iterator[str]


Draw = Callable[[np.random.Generator], Sample]


def _number(generator: np.random.Generator) -> str:
    return str(generator.integers(1_000_000, 10_000_000))


def _needle(key: str, number: str) -> str:
    return f"The secret number of {key} is {number}."


def _noise() -> Iterator[str]:
    while True:
        yield from NOISE


def _needles(generator: np.random.Generator, *, keys: int, values: int, among_needles: bool = False) -> Sample:
    """`keys` keys with `values` numbers each, all of which are asked for."""
    names = [KEYS[index] for index in generator.choice(len(KEYS), keys, replace=False)]
    numbers = {name: [_number(generator) for _ in range(values)] for name in names}
    facts = [_needle(name, number) for name in names for number in numbers[name]]
    asked = ", ".join(names)
    several = keys * values > 1

    def others() -> Iterator[str]:
        while True:
            name = KEYS[generator.integers(len(KEYS))]
            if name not in names:
                yield _needle(name, _number(generator))

    return Sample(
        introduction="Some secret numbers are hidden in the following text. Remember them.",
        facts=[facts[index] for index in generator.permutation(len(facts))],
        question=f"Which secret numbers does the text give for {asked}? "
        + (f"The secret numbers of {asked} are" if several else f"The secret number of {asked} is"),
        answers=[number for name in names for number in numbers[name]],
        filler=others() if among_needles else _noise(),
    )


def niah_single(generator: np.random.Generator) -> Sample:
    """RULER's niah_single_1."""
    return _needles(generator, keys=1, values=1)


def niah_multikey(generator: np.random.Generator) -> Sample:
    """RULER's niah_multikey_2: the whole text consists of needles."""
    return _needles(generator, keys=1, values=1, among_needles=True)


def niah_multivalue(generator: np.random.Generator) -> Sample:
    """RULER's niah_multivalue, in repeated sentences instead of essays."""
    return _needles(generator, keys=1, values=NEEDLES)


def niah_multiquery(generator: np.random.Generator) -> Sample:
    """RULER's niah_multiquery, in repeated sentences instead of essays."""
    return _needles(generator, keys=NEEDLES, values=1)


def variable_tracking(generator: np.random.Generator) -> Sample:
    """RULER's vt: one chain of four hops, without its example before the question."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(map(chr, generator.integers(ord("A"), ord("Z") + 1, 5)))
        names += [] if name in names else [name]
    number = str(generator.integers(10_000, 100_000))
    sources = [number, *(f"VAR {name}" for name in names[:-1])]
    return Sample(
        introduction="The following text contains assignments of variables. Keep track of them.",
        facts=[f"VAR {name} = {source}." for name, source in zip(names, sources, strict=True)],
        question=f"Which variables have the value {number}? The {len(names)} variables with the value {number} are",
        answers=names,
        filler=_noise(),
    )


RULER_TASKS: dict[str, Draw] = {
    draw.__name__: draw for draw in (niah_single, niah_multikey, niah_multivalue, niah_multiquery, variable_tracking)
}


def documents(
    name: str, tokenizer: Tokenizer, length: int, samples: int, seed: int
) -> tuple[list[dict[str, Any]], int]:
    """(the documents of a task with the keys `input`, `answers` and `tokens`; the number of tokens to generate).

    Prompts and generated tokens take at most `length` tokens. The same arguments give the same documents. Raises
    UserError if the length is too short.
    """
    generators = [
        np.random.default_rng([seed, list(RULER_TASKS).index(name), length, index]) for index in range(samples)
    ]
    drawn = [RULER_TASKS[name](generator) for generator in generators]
    new_tokens = SPARE_TOKENS + max(len(tokenizer.tokenize(" " + ", ".join(sample.answers))) for sample in drawn)
    count, found = 0, []
    for sample, generator in zip(drawn, generators, strict=True):
        filler: list[str] = []
        order = generator.random(len(sample.facts))

        def prompt(sentences: int, sample: Sample = sample, filler: list[str] = filler, order: Any = order) -> str:
            """The prompt with this many sentences of filler; the facts are at the same relative places for each."""
            while len(filler) < sentences:
                filler.append(next(sample.filler))
            places = np.sort((order * (sentences + 1)).astype(np.int64)).tolist()
            parts, start = [], 0
            for place, fact in zip(places, sample.facts, strict=True):
                parts += [*filler[start:place], fact]
                start = place
            return "\n".join((sample.introduction, " ".join([*parts, *filler[start:sentences]]), sample.question))

        def fits(sentences: int, prompt: Callable[[int], str] = prompt) -> bool:
            return len(tokenizer.tokenize(prompt(sentences))) + new_tokens <= length

        if not fits(0):
            minimum = len(tokenizer.tokenize(prompt(0))) + new_tokens
            raise UserError(
                f"--lengths {length}: {name} takes at least {minimum:,} tokens with this tokenizer; choose longer ones"
            )
        # From the number of the previous prompt, in steps that double, then half.
        step = 1
        while fits(count + step):
            count, step = count + step, 2 * step
        while step:
            if fits(count + step):
                count += step
            step //= 2
        while not fits(count):
            count -= 1
        text = prompt(count)
        found.append({"input": text, "answers": sample.answers, "tokens": len(tokenizer.tokenize(text)) + new_tokens})
    return found, new_tokens


def write_task(
    folder: Path, name: str, length: int, seed: int, lines: Sequence[Mapping[str, Any]], new_tokens: int
) -> str:
    """Write `ruler_NAME_LENGTH.yaml`, and the result of `documents` as `.jsonl`; returns the name of the task. Raises
    UserError.
    """
    task = f"ruler_{name}_{length}"
    data = folder.resolve() / f"{task}.jsonl"
    settings = {
        "task": task,
        "tag": TAG,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{answers | join(', ')}}",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": new_tokens},
        "metric_list": [{"metric": METRIC, "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1, "length": length, "seed": seed},
    }
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    text += f"process_results: !function {__name__}.process_results\n"
    write_atomically(data, "".join(json.dumps(line) + "\n" for line in lines).encode())
    write_atomically(folder / f"{task}.yaml", text.encode())
    return task


def process_results(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The score of a generated text, called by the harness: the share of the answers that it contains."""
    text = results[0].lower()
    return {METRIC: sum(answer.lower() in text for answer in document["answers"]) / len(document["answers"])}
