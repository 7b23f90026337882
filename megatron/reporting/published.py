"""The numbers that the papers report, from `published.yml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron.config.yaml_files import read_file
from megatron.reporting.results import Method, Setting, kind_of

FILE = Path(__file__).with_name("published.yml")
FULL = "full"


@dataclass(frozen=True)
class Published:
    """One table. Methods are (pos-emb, mode); `mode` may be the name of a kind of mode, `window` for any window@W.

    `methods` gives their names in the paper, in its order; `values[corpus][method]` the texts in the order of
    `lengths` (a single text where there are none). `model`: (layers, hidden size).
    """

    source: str
    title: str
    measure: str
    protocols: tuple[str, ...]
    train_length: int
    lengths: tuple[int, ...]
    methods: Mapping[Method, str]
    values: Mapping[str, Mapping[Method, tuple[str, ...]]]
    model: tuple[int, int]
    note: str | None

    def serves(self, setting: Setting) -> bool:
        """Whether the paper's numbers may stand beside those of a setting, the corpus left aside."""
        ours = (setting.protocol in self.protocols, setting.train_length, setting.model)
        return ours == (True, self.train_length, self.model)

    def value(self, corpus: str, method: Method, length: int | None) -> str | None:
        """The text for this setting; None where the paper has none."""
        texts = self.values.get(corpus.lower(), {}).get(kind_of(method))
        if texts is None or (length is not None and length not in self.lengths):
            return None
        return texts[self.lengths.index(length) if length is not None else 0]

    def name(self, method: Method) -> str:
        """The method as the paper calls it, or another paper where this one does not have it; what the paper does not
        have of its options and mode behind it.
        """
        pos_emb, mode = method
        if kind_of(method) in self.methods:
            name = self.methods[kind_of(method)]
            return name if mode == kind_of(method)[1] else f"{name}, {mode}"
        plain, bracket, options = pos_emb.partition(" (")
        known = (self.methods.get((plain, FULL)) or _names().get(plain, plain)) + bracket + options
        return known if mode == FULL else f"{known}, {mode}"


@cache
def published(name: str) -> Published:
    """The table of that name in the file."""
    return _read()[name]


def display_name(method: Method) -> str:
    """The method as the first table that has it calls it."""
    pos_emb, mode = method
    plain, bracket, options = pos_emb.partition(" (")
    name = _names().get(plain, plain) + bracket + options
    return name if mode == FULL else f"{name}, {mode}"


@cache
def _names() -> dict[str, str]:
    """`pos-emb` -> its name in the first table that has it."""
    found: dict[str, str] = {}
    for table in _read().values():
        for (pos_emb, mode), name in table.methods.items():
            # "Absolute", as LEX calls learned positions, would mean sinusoidal ones as well elsewhere.
            if mode == FULL and name != "Absolute":
                found.setdefault(pos_emb, name)
    return found


@cache
def _read() -> dict[str, Published]:
    tables = {}
    for entry in read_file(FILE):
        value = entry.value
        tables[entry.key] = Published(
            source=value["source"],
            title=value["title"],
            measure=value["measure"],
            protocols=tuple(value.get("protocols", ())),
            train_length=value["train_length"],
            lengths=tuple(value.get("lengths", ())),
            methods={_method(key): text for key, text in value["methods"].items()},
            values={
                corpus: {_method(key): _texts(found) for key, found in methods.items()}
                for corpus, methods in value["values"].items()
            },
            model=tuple(value["model"]),
            note=value.get("note"),
        )
    return tables


def names() -> tuple[str, ...]:
    """Of all tables in the file."""
    return tuple(_read())


def _method(key: str) -> Method:
    pos_emb, _, mode = key.partition(" ")
    return pos_emb, mode or FULL


def _texts(value: object) -> tuple[str, ...]:
    texts = tuple(value if isinstance(value, list) else [value])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{FILE}: {texts}: a number without quotes may lose its last digits")
    return texts
