"""What stored results say, sorted for tables and figures: one value per setting and seed."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerple.positional.registry import canonical_name
from megatron.utils.errors import UserError

# A method as the tables see it: (pos-emb, inference mode).
Method = tuple[str, str]

NO_NAME = "text"


@dataclass(frozen=True)
class Setting:
    """What the numbers of one table row or column have in common. `model`: (layers, hidden size)."""

    corpus: str
    train_length: int | None
    protocol: str
    model: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """For files: what is known of it, the corpus apart from the rest by its place."""
        return slug(self.corpus, self.size, self.train_length, self.protocol)

    @property
    def size(self) -> str:
        """12x768: 12 layers of 768; empty where that is not known."""
        return f"{self.model[0]}x{self.model[1]}" if self.model else ""


def slug(*parts: object) -> str:
    """Parts of a file's name, those that are empty left out."""
    return re.sub(r"[^\w.+-]+", "-", "-".join(str(part) for part in parts if part).lower()).strip("-")


@dataclass(frozen=True)
class Measurements:
    """`values[setting][method][length][seed]`: a number, or None where there is none; `reasons` says why, by setting,
    method and length. `tokens`: how many were scored, by setting and length; several numbers where texts differed.
    """

    values: Mapping[Setting, Mapping[Method, Mapping[int, Mapping[int | None, float | None]]]]
    reasons: Mapping[tuple[Setting, Method, int], str]
    tokens: Mapping[tuple[Setting, int], set[int]]

    def methods(self, settings: Iterable[Setting] | None = None) -> list[Method]:
        """Every method of these settings, in the order of the records."""
        return list(dict.fromkeys(method for setting in settings or self.values for method in self.values[setting]))

    def lengths(self, settings: Iterable[Setting] | None = None) -> list[int]:
        """Every length, ascending."""
        found = (lengths for setting in settings or self.values for lengths in self.values[setting].values())
        return sorted({length for lengths in found for length in lengths})

    def of(self, setting: Setting, method: Method, length: int) -> dict[int | None, float]:
        """Seed -> value; empty where there is none."""
        found = self.values[setting].get(method, {}).get(length, {})
        return {seed: value for seed, value in found.items() if value is not None}

    def tried(self, setting: Setting, method: Method, length: int) -> bool:
        """Whether there is a record, be it one without a value."""
        return length in self.values[setting].get(method, {})


def measurements(records: Iterable[Mapping[str, Any]], kind: str, value: str) -> Measurements:
    """The field `value` of all records of this kind.

    Raises UserError where two records of different checkpoints are of the same method, seed and setting: which of them
    a table should show is not for this to guess.
    """
    values: dict[Setting, dict[Method, dict[int, dict[int | None, float | None]]]] = {}
    reasons: dict[tuple[Setting, Method, int], str] = {}
    tokens: dict[tuple[Setting, int], set[int]] = {}
    origins: dict[tuple, Mapping[str, Any]] = {}
    for record in records:
        if record["kind"] != kind:
            continue
        setting, method = setting_of(record), method_of(record)
        length, seed = record["length"], record.get("seed")
        first = origins.setdefault((setting, method, length, seed), record)
        if _weights(first) != _weights(record):
            raise UserError(
                f"two checkpoints give results for {method[0]} ({method[1]}), seed {seed}, length {length:,} on "
                f"{setting.corpus}: {_origin(first)} and {_origin(record)}; leave out the results of one of them, or "
                "evaluate them again under different names (evaluate.py --label)"
            )
        by_length = values.setdefault(setting, {}).setdefault(method, {})
        by_length.setdefault(length, {})[seed] = record[value]
        if record[value] is None:
            reasons[setting, method, length] = record.get("note") or "no float holds it"
        if record.get("tokens"):
            tokens.setdefault((setting, length), set()).add(record["tokens"])
    return Measurements(values, reasons, tokens)


def setting_of(record: Mapping[str, Any]) -> Setting:
    checkpoint = record.get("checkpoint") or {}
    model = (checkpoint["layers"], checkpoint["hidden_size"]) if checkpoint.get("layers") else None
    return Setting(record.get("corpus") or NO_NAME, record.get("train_length"), record.get("protocol") or "", model)


def method_of(record: Mapping[str, Any]) -> Method:
    pos_emb, bracket, options = (record.get("pos_emb") or "model").partition(" (")
    return canonical_name(pos_emb) + bracket + options, record.get("mode") or "full"


def _weights(record: Mapping[str, Any]) -> str:
    """Alike for the same weights, wherever they lie."""
    return (record.get("checkpoint") or {}).get("fingerprint") or _origin(record)


def _origin(record: Mapping[str, Any]) -> str:
    checkpoint = record.get("checkpoint") or {}
    return f"{checkpoint.get('path')} at iteration {checkpoint.get('iteration')}"


def kind_of(method: Method) -> Method:
    """(pos-emb, the mode without its number): window@512 is a window."""
    return method[0], method[1].partition("@")[0]


def in_order(methods: Sequence[Method], known: Iterable[Method]) -> list[Method]:
    """Methods in the order of the kinds `known`, their further modes behind them; then the others as they come."""
    order = {kind: place for place, kind in enumerate(known)}
    first = {pos_emb: place for (pos_emb, _), place in reversed(order.items())}
    others = list(dict.fromkeys(pos_emb for pos_emb, _ in methods if pos_emb not in first))

    def place(method: Method) -> tuple[int, int, str]:
        kind, (pos_emb, mode) = kind_of(method), method
        if pos_emb not in first:
            return len(order) + others.index(pos_emb), mode != "full", mode
        return order.get(kind, first[pos_emb]), kind not in order, mode

    return sorted(methods, key=place)
