"""The results that the papers report, read from `published.yml`, and the papers' names."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BeforeValidator, TypeAdapter

from megatron.reporting.aggregate import Method, Setting

FILE = Path(__file__).with_name("published.yml")
CORPORA = {
    "openwebtext2": "OpenWebText2",
    "github": "GitHub",
    "arxiv": "ArXiv",
    "pg22": "PG22",
    "books3": "Books3",
    "debian_c": "C",
    "debian_prose": "Prose",
    "debian_latex": "LaTeX",
}


# A key of the file, `pos-emb` or `pos-emb mode`.
MethodKey = Annotated[Method, BeforeValidator(lambda key: Method(*key.split(" ")))]


def _as_list(value: object) -> object:
    if isinstance(value, list):
        return value
    return [value]


# One value or a list of values, which must be strings, because numbers would lose trailing zeros.
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_list)]


@dataclass(frozen=True)
class Published:
    """One table of a paper.

    Attributes:
        methods: the paper's names, in its order. `mode`: `window` stands for any `window@W`.
        protocols: a name without a size stands for any size.
        values: corpus -> method -> one text per entry of `lengths`, or a single text if `lengths`
            is empty.
        model: (layers, hidden size).
        note: how the paper's setting differs from ours, or what is unknown about it.
    """

    source: str
    title: str
    train_length: int
    methods: Mapping[MethodKey, str]
    values: Mapping[str, Mapping[MethodKey, Texts]]
    model: tuple[int, int]
    measure: str = ""
    protocols: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    note: str | None = None

    def matches(self, setting: Setting) -> bool:
        """Whether the paper's values are comparable with this setting, apart from the corpus."""
        if (setting.train_length, setting.model) != (self.train_length, self.model):
            return False
        name, _, _ = setting.protocol.partition("@")
        return setting.protocol in self.protocols or name in self.protocols

    def value(self, corpus: str | None, method: Method, length: int | None) -> str | None:
        """The text printed in the paper; None if it has none for these arguments."""
        of_corpus = self.values.get((corpus or "").lower(), {})
        texts = of_corpus.get(method.kind)
        if texts is None:
            return None
        if length is None:
            return texts[0]
        return dict(zip(self.lengths, texts, strict=False)).get(length)

    def name(self, method: Method) -> str:
        """The paper's name of the method; a mode that the paper does not have is appended."""
        if method.kind not in self.methods:
            return display_name(method, self.methods)
        name = self.methods[method.kind]
        if method.mode != method.kind.mode:
            name += f", {method.mode}"
        return name

    def ordered(self, methods: Iterable[Method]) -> list[Method]:
        """The methods in the paper's order. Modes that the paper does not have follow their method;
        methods that it does not have come last, in the given order.
        """
        methods = list(methods)
        listed = list(self.methods)
        pos_embs = [method.pos_emb for method in (*listed, *methods)]

        def key(method: Method) -> tuple[int, bool, str]:
            if method.kind in self.methods:
                return listed.index(method.kind), False, method.mode
            rank = pos_embs.index(method.pos_emb)
            is_listed = rank < len(listed)
            return rank, is_listed or method.mode != "full", method.mode

        return sorted(methods, key=key)


@cache
def published_tables() -> dict[str, Published]:
    """All tables in `published.yml`, by name."""
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, Published]).validate_python(content)


def load_published(name: str) -> Published:
    """The table with this name in `published.yml`."""
    return published_tables()[name]


def display_name(method: Method, names: Mapping[Method, str] | None = None) -> str:
    """The name of the method with its options and a mode other than `full`.

    names: those of a paper. The first table that has the method names the others.
    """
    plain, bracket, options = method.pos_emb.partition(" (")
    name = (names or {}).get(Method(plain)) or _names().get(plain, plain)
    name += bracket + options
    if method.mode != "full":
        name += f", {method.mode}"
    return name


def line_numbers(labels: Mapping[str, str], pos_embs: Iterable[str] = ()) -> dict[str, int]:
    """The number of the style of each line (see `line_style`). Methods in the papers' tables have
    the same number in all figures. Other methods have the lowest numbers that are left, the same in
    all figures of a report.

    Args:
        labels: the label of each line -> its `pos-emb`. If a method has several lines, the first
            one has its number.
        pos_embs: all methods of the report.
    """
    known = list(_names())
    methods = dict.fromkeys([*pos_embs, *labels.values()])
    numbers = {method: known.index(method) for method in methods if method in known}
    free = (number for number in itertools.count() if number not in numbers.values())
    numbers |= {method: next(free) for method in methods if method not in known}
    result: dict[str, int] = {}
    for label, method in labels.items():
        number = numbers[method]
        if number in result.values():
            number = next(free)
        result[label] = number
    return result


def corpus_name(corpus: str | None) -> str:
    """The name of the corpus in the papers, or the corpus itself."""
    return CORPORA.get((corpus or "").lower(), corpus or "text")


def corpus_sort_key(corpus: str | None) -> int:
    """The position of the corpus in the papers; other corpora come last."""
    names = [*CORPORA, (corpus or "").lower()]
    return names.index(names[-1])


@cache
def _names() -> dict[str, str]:
    """`pos-emb` -> the name in the first table that has it."""
    names: dict[str, str] = {}
    for table in published_tables().values():
        for method, name in table.methods.items():
            # LEX calls learned positions "Absolute"; elsewhere these could be sinusoidal ones.
            if method.mode == "full" and name != "Absolute":
                names.setdefault(method.pos_emb, name)
    return names
