"""What stored results say, sorted for tables and figures: one value per setting and seed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.errors import UserError
from megatron.model.positional.registry import canonical_name

# A method as the tables see it: (pos-emb, inference mode).
Method = tuple[str, str]

NO_NAME = "text"


@dataclass(frozen=True)
class Setting:
    """What the numbers of one table row or column have in common."""

    corpus: str
    train_length: int | None
    protocol: str


@dataclass(frozen=True)
class Measurements:
    """`values[setting][method][length][seed]`: a number, or None where there is none; `reasons` says why, by method and
    length.
    """

    values: Mapping[Setting, Mapping[Method, Mapping[int, Mapping[int | None, float | None]]]]
    reasons: Mapping[tuple[Method, int], str]

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
    reasons: dict[tuple[Method, int], str] = {}
    origins: dict[tuple, str] = {}
    for record in records:
        if record["kind"] != kind:
            continue
        setting, method = setting_of(record), method_of(record)
        length, seed = record["length"], record.get("seed")
        key, origin = (setting, method, length, seed), _origin(record)
        if origins.setdefault(key, origin) != origin:
            raise UserError(
                f"two checkpoints give results for {method[0]} ({method[1]}), seed {seed}, length {length:,} on "
                f"{setting.corpus}: {origins[key]} and {origin}; leave out the results of one of them"
            )
        by_length = values.setdefault(setting, {}).setdefault(method, {})
        by_length.setdefault(length, {})[seed] = record[value]
        if record[value] is None:
            reasons[method, length] = record.get("note") or "no float holds it"
    return Measurements(values, reasons)


def setting_of(record: Mapping[str, Any]) -> Setting:
    return Setting(record.get("corpus") or NO_NAME, record.get("train_length"), record.get("protocol") or "")


def method_of(record: Mapping[str, Any]) -> Method:
    return canonical_name(record.get("pos_emb") or "model"), record.get("mode") or "full"


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
