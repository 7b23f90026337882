"""Group evaluation records by setting, method and length, and aggregate their values over seeds."""

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pandas import DataFrame, Series, concat

from megatron.evaluation.records import model_of
from megatron.reporting.formatting import slug
from megatron.utils.errors import UserError

ALPHA = 0.05  # significance level
AnyRecord = Mapping[str, Any]  # of any kind, see megatron.evaluation.records
CELL = ["setting", "method", "length"]  # the columns that identify a cell of a table
# Further keys of a record, and of its checkpoint.
DETAILS = ("tokens", "targets", "trials", "bos", "precision", "trained_text", "note")
OF_CHECKPOINT = ("iteration", "recipe")


@dataclass(frozen=True)
class Method:
    """A positional method and the inference mode it is evaluated in.

    pos_emb: its `pos-emb` name; non-default options follow in parentheses, e.g. "dape_kerple
        (variant Concat)".
    """

    pos_emb: str
    mode: str = "full"

    @property
    def kind(self) -> "Method":
        """The method without the size of a window: `window@512` becomes `window`."""
        return Method(self.pos_emb, re.sub(r"^window@\d+$", "window", self.mode))


@dataclass(frozen=True)
class Setting:
    """Values are comparable if their settings are equal.

    model: (layers, hidden size). None: unknown.
    """

    corpus: str | None
    train_length: int | None
    protocol: str
    model: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The known parts, for file names."""
        return slug(self.corpus or "text", self.size, self.train_length, self.protocol).lower()

    @property
    def size(self) -> str:
        """12x768 for 12 layers with hidden size 768; empty if unknown."""
        return "x".join(map(str, self.model or ()))


def setting_of(record: AnyRecord) -> Setting:
    checkpoint = record.get("checkpoint") or {}
    model = None
    if checkpoint.get("layers"):
        model = checkpoint["layers"], checkpoint["hidden_size"]
    protocol = record.get("protocol") or ""
    return Setting(record.get("corpus"), record.get("train_length"), protocol, model)


def method_of(record: AnyRecord) -> Method:
    return Method(record.get("pos_emb") or "model", record.get("mode") or "full")


class Measurements:
    """The values of one quantity by setting, method, length and seed.

    Attributes:
        frame: one row per record, in the order of the records, with the columns `setting`,
            `method`, `length`, `depth` (of pass keys), `seed`, `value` (NaN if not available),
            those of `DETAILS` and `OF_CHECKPOINT`.
        settings, methods: those of the records, in their order.
        lengths: ascending.
    """

    def __init__(self, frame: DataFrame):
        self.frame = frame
        self.settings: list[Setting] = list(dict.fromkeys(frame["setting"]))
        self.methods: list[Method] = list(dict.fromkeys(frame["method"]))
        self.lengths: list[int] = sorted(set(frame["length"]))

    @cached_property
    def _values(self) -> dict[Any, Series]:
        cells = self.frame.groupby(CELL, sort=False)
        return {key: cell.set_index("seed")["value"] for key, cell in cells}

    @cached_property
    def seeds(self) -> Series:
        """The number of seeds with a value, if there is one: by setting, method, length, depth."""
        cells = [*CELL, "depth"]
        known = self.frame.dropna(subset="value").groupby(cells, sort=False, dropna=False)
        return known["seed"].nunique(dropna=False)

    @property
    def num_seeds(self) -> int:
        """The highest number of seeds; 0 without values."""
        return max(self.seeds, default=0)

    def values(self, setting: Setting, method: Method, length: int) -> Series | None:
        """The values indexed by seed, NaN if not available; None if there is no record."""
        return self._values.get((setting, method, length))

    def by_seed(self, setting: Setting, method: Method) -> DataFrame:
        """The values, NaN if there is none: a row per length, ascending, and a column per seed."""
        rows = self.select([setting], [method]).frame.dropna(subset="value")
        return rows.pivot(index="length", columns="seed", values="value").sort_index()

    def select(
        self, settings: Iterable[Setting], methods: Iterable[Method] | None = None
    ) -> "Measurements":
        """The values of these settings, and of these methods only."""
        rows = self.frame["setting"].isin(list(settings))
        if methods is not None:
            rows &= self.frame["method"].isin(list(methods))
        return Measurements(self.frame[rows])

    def over_depths(self) -> "Measurements":
        """Pass keys: the mean over all depths, for each seed that has a record at every depth of
        its setting; NaN if one of them has no value.
        """
        # Keep the seeds that have all depths of their setting.
        depths = self.frame.groupby("setting", sort=False)["depth"].transform("nunique")
        by_seed = self.frame.groupby([*CELL, "seed"], sort=False, dropna=False)
        complete = self.frame[by_seed["depth"].transform("nunique") == depths]

        # `mean` of a group would skip missing values.
        by_seed = complete.groupby([*CELL, "seed"], sort=False, dropna=False)
        means = by_seed["value"].agg(lambda values: values.mean(skipna=False))
        return Measurements(means.reset_index().assign(depth=math.nan))


def measurements(records: Iterable[AnyRecord], kind: str, value: str) -> Measurements:
    """The values under the key `value` of all records of this kind.

    Raises UserError if records of different weights have the same method, setting and seed, or
    those of different measurements also the same length, because it is ambiguous which one to
    report.
    """
    rows: dict[tuple[object, ...], tuple[object, ...]] = {}
    sources: dict[tuple[object, ...], AnyRecord] = {}
    models: dict[tuple[object, ...], AnyRecord] = {}
    for record in records:
        if record["kind"] != kind:
            continue

        # All lengths and modes of a method and a seed must be of the same weights.
        setting, method = setting_of(record), method_of(record)
        model = models.setdefault((setting, method.pos_emb, record.get("seed")), record)
        if _weights(model) != _weights(record):
            raise UserError(
                f"two checkpoints have results for {method.pos_emb} on {setting.corpus}, seed "
                f"{record.get('seed')}: {_source(model)} (length {model['length']:,}, mode "
                f"{method_of(model).mode}) and {_source(record)} (length {record['length']:,}, "
                f"mode {method.mode}); omit the results of one of them, or evaluate them again "
                "with different labels (kerple evaluate --label)"
            )

        # Two records of one key are a repetition only if their tokens are the same.
        key = (setting, method, record["length"], record.get("depth"), record.get("seed"))
        first = sources.setdefault(key, record)
        if first.get("measurement") != record.get("measurement"):
            raise UserError(
                f"{_source(record)} has been evaluated twice at length {record['length']:,} on "
                f"{setting.corpus} ({method.mode}), on different tokens or with "
                "different settings, such as the precision; omit the results of one evaluation, or "
                "give them different labels (kerple evaluate --label)"
            )

        # The last record counts.
        number = record.get(value)
        if number is None:
            number = math.nan
        checkpoint = record.get("checkpoint") or {}
        details = [*map(record.get, DETAILS), *map(checkpoint.get, OF_CHECKPOINT)]
        rows[key] = (*key, number, *details)
    columns = [*CELL, "depth", "seed", "value", *DETAILS, *OF_CHECKPOINT]
    return Measurements(DataFrame(list(rows.values()), columns=columns))


def _weights(record: AnyRecord) -> str:
    """Identifies the weights, independently of where they are stored."""
    return model_of(record) or _source(record)


def _source(record: AnyRecord) -> str:
    checkpoint = record.get("checkpoint") or {}
    return f"{checkpoint.get('path')} at iteration {checkpoint.get('iteration')}"


def comparable_means(cells: Iterable[Series | None]) -> list[float]:
    """The mean of each cell over its seeds; NaN if they are not those of the first cell with most
    seeds, because means over different seeds also differ because of the seeds. Of one seed each, as
    of imported models, all are compared.
    """
    known = [cell.dropna() for cell in cells if cell is not None]
    most = max((set(cell.index) for cell in known), key=len, default=set())
    means = []
    for cell in cells:
        mean = math.nan
        if cell is not None and (len(most) == 1 or set(cell.dropna().index) == most):
            mean = float(cell.mean())
        means.append(mean)
    return means


def significantly_better(first: Series, second: Series) -> bool:
    """Whether `first` has the lower mean over the seeds (the index) that both have, with p < ALPHA
    in the paired two-sided t-test of KERPLE's Table 3. False with fewer than two such seeds.
    """
    pairs = concat({"first": first, "second": second}, axis=1, join="inner").dropna()
    if len(pairs) < 2:
        return False
    from scipy.stats import ttest_rel  # large; `make demo` does not install it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about differences that are equal up to rounding
        p = float(ttest_rel(pairs["first"], pairs["second"]).pvalue)  # NaN if all pairs are equal
    return p < ALPHA and bool(pairs["first"].mean() < pairs["second"].mean())
