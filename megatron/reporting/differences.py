"""Paired differences of losses measured on the same tokens, with a standard error over documents
(or segments).
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap

import numpy as np

from megatron.evaluation.statistics import standard_error
from megatron.reporting.aggregate import AnyRecord, Method, Setting, method_of, setting_of
from megatron.reporting.formatting import NOT_MEASURED, format_difference
from megatron.reporting.tables import Cell, Row

Key = tuple[Setting, Method, int]  # int: the length
PairedRows = Sequence[tuple[tuple[str, ...], Sequence[tuple[Key, Key]]]]  # labels, pairs of cells


@dataclass(frozen=True)
class Difference:
    """A difference of two mean losses, in nats per token. stderr: over documents; None with fewer
    than two of them.

    Losses of several seeds are averaged first, so `stderr` reflects the choice of text, not of the
    seeds.
    """

    mean: float
    stderr: float | None
    seeds: int

    @property
    def significant(self) -> bool:
        """Whether the mean is more than two standard errors from 0."""
        return self.stderr is not None and abs(self.mean) > 2 * self.stderr

    def __str__(self) -> str:
        return format_difference(self.mean, self.stderr)


class PairedLosses:
    """Losses of document groups (`ExtrapolationRecord.groups`) by setting, method, length, seed."""

    def __init__(self, records: Iterable[AnyRecord]):
        self._records: dict[Key, dict[int | None, AnyRecord]] = {}
        for record in records:
            if record["kind"] == "extrapolation" and record.get("groups"):
                key = setting_of(record), method_of(record), record["length"]
                self._records.setdefault(key, {})[record.get("seed")] = record

    def difference(self, first: Key, second: Key) -> Difference | None:
        """The loss of `first` minus that of `second`, averaged over the seeds that both have.

        None if they have no seed in common, or did not score the same tokens.
        """
        records, others = self._records.get(first, {}), self._records.get(second, {})
        seeds = records.keys() & others.keys()
        losses: list[float] = []
        differences: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
        text: tuple[str, list[int]] | None = None
        for seed in seeds:
            # All, also of different seeds, must have scored the same tokens, in the same groups.
            one, other = records[seed], others[seed]
            groups, other_groups = one["groups"], other["groups"]
            for record in (one, other):
                own = record["targets"], record["groups"]["tokens"]
                if text not in (None, own):
                    return None
                text = own
            losses.append(one["loss"] - other["loss"])
            differences.append(np.subtract(groups["losses"], other_groups["losses"]))
        if text is None:
            return None
        counts = np.array(text[1])
        sums = np.mean(differences, axis=0) * counts
        mean = statistics.fmean(losses)
        return Difference(mean, standard_error(sums, counts), len(seeds))

    def rows(self, rows: PairedRows) -> tuple[Row, ...]:
        """The rows of a table, from their labels and the pairs of their cells. The last label says
        if a row has fewer seeds than others; those of a row are the fewest of its cells.
        """
        seeds = []
        for _, pairs in rows:
            found = filter(None, starmap(self.difference, pairs))
            seeds.append(min((difference.seeds for difference in found), default=0))
        result = []
        for (labels, pairs), number in zip(rows, seeds, strict=True):
            *others, last = labels
            if 0 < number < max(seeds):
                unit = "seed" if number == 1 else "seeds"
                last += f" ({number} {unit})"
            cells = map(Cell, starmap(self.text, pairs))
            result.append(Row((*others, last), tuple(cells)))
        return tuple(result)

    def note(self, rows: PairedRows) -> str:
        """What the cells of `rows` are."""
        pairs = [pair for _, pairs in rows for pair in pairs]
        found = list(filter(None, starmap(self.difference, pairs)))
        note = "Differences of the loss (nats per token) compare the same tokens."
        if any(difference.seeds > 1 for difference in found):
            note += " Several seeds are averaged."
        if all(difference.stderr is None for difference in found):
            return note

        # A group of losses is a document, or a segment if there is at most one document.
        counts = set()
        for first, _ in pairs:
            counts |= {record.get("documents") for record in self._records.get(first, {}).values()}
        unit = "documents"
        if counts <= {None}:
            unit = "segments"
        elif counts <= {None, 1}:
            unit = "segments, because the text is one document"
        return (
            f"{note} ± is the standard error over {unit}: it does not include the variation "
            "between training runs with different seeds, so a difference of several ± does not yet "
            "show that one method is better."
        )

    def text(self, first: Key, second: Key) -> str:
        """The difference for a cell of a table."""
        return str(self.difference(first, second) or NOT_MEASURED)
