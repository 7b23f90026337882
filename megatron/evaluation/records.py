"""Evaluation records, and reading the file that stores them, `results.jsonl`.

`results.jsonl` holds one JSON object per line. Its key `kind` selects one of the record types
below; the keys of `Record` are common to all of them. A value that is not known is null. Each
record is appended and flushed to disk before the next measurement starts, so an interrupted
evaluation resumes with the first record that is missing. An incomplete last line, which a killed
process can leave, is ignored and overwritten.
"""

import hashlib
import io
import itertools
import math
import operator
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_type_hints, overload

from pydantic import FailFast, Field, TypeAdapter

# Pydantic does not accept the TypedDict of `typing` before Python 3.12.
from typing_extensions import NotRequired, TypedDict

from megatron.utils.errors import UserError
from megatron.utils.files import read_file
from megatron.utils.typed_json import Count, Float, Fraction, Int, Name, Text, check_json, load_json

if TYPE_CHECKING:
    import pandas

RESULTS = "results.jsonl"
MAX_BYTES = 1 << 30  # of a results.jsonl, whose records have up to 10 KB

Counts = Annotated[list[Count], FailFast()]
# A mean negative log-likelihood is at least 0, except for rounding.
Loss = Annotated[Float, Field(ge=-1e-3)]
Losses = Annotated[list[Loss], FailFast()]
Floats = Annotated[list[Float], FailFast()]
NonNegative = Annotated[Float, Field(ge=0)]
Length = Annotated[Int, Field(ge=1)]


class Checkpoint(TypedDict):
    """The evaluated model. path: the folder with `latest`. fingerprint: digest of the weights.
    model: digest of the configuration and of the code of an external method. recipe: digest of how
    it was trained, except for the seed. Earlier versions did not record the last two.
    """

    path: Text | None
    iteration: Count | None
    fingerprint: Name
    layers: Count
    hidden_size: Count
    model: NotRequired[Name]
    recipe: NotRequired[Name]


class Environment(TypedDict):
    """What measured a record. commit: of this project, with -dirty if files were changed. machine:
    the GPU, or the processor and its cores. versions: of Python and torch.
    """

    commit: Name | None
    machine: Name
    versions: Name


class Record(TypedDict):
    """Keys of every kind of record.

    Attributes:
        corpus: name of the text, e.g. openwebtext2. Set for every kind, including those that read
            no text.
        protocol: with its size, e.g. last-k@256.
        length: tokens per segment.
        note: the reason if there is no value.
        measurement: digest of everything except the weights that determines the value, e.g. the
            scored tokens. A record with the same digest does not have to be measured again.
        environment: None if it is not known, e.g. for results of `evaluate_extrapolation`.
        complete_segments: why a transformers model read complete segments instead of chunks through
            its KV cache; the key is missing otherwise.
        bos: the token that `--bos` put at the start of each segment, or the tokenizer at the start
            of each passkey prompt; None if there was none. Files of earlier versions lack the key
            in this case.
        precision: of the weights and the computation, e.g. fp32. The key is missing if it is not
            known.
        trained_text: how many of the documents of the text the model may have been trained on; the
            key is missing if there are none, or it is not known.
    """

    kind: Name
    corpus: Name | None
    checkpoint: Checkpoint | None
    pos_emb: Name | None
    seed: Int | None
    train_length: Count | None
    mode: Name
    protocol: Name
    length: Length
    note: Text | None
    measurement: Name
    environment: Environment | None
    complete_segments: NotRequired[Text]
    bos: NotRequired[Count | None]
    precision: NotRequired[Name]
    trained_text: NotRequired[Text]


class DocumentGroups(TypedDict):
    """The scored documents in at most 256 groups of consecutive ones with about equal numbers of
    tokens; segments if `documents` is None or 1. tokens: number of scored tokens. losses: mean loss
    in nats.
    """

    tokens: Counts
    losses: Losses


class ExtrapolationRecord(Record):
    """Kind `extrapolation`: the loss at one length. If it could not be measured, the values are
    None and tokens is 0.

    Attributes:
        tokens: number of scored tokens.
        segments: number of segments they are in.
        documents: number of documents they are in; None if document boundaries are not known.
        loss: mean negative log-likelihood per token, in nats.
        stderr: standard error of the loss over documents, or over segments if `documents` is None
            or 1; None with fewer than two of them.
        bits_per_byte: bits of all scored tokens divided by the UTF-8 bytes of their text; None
            without a tokenizer.
        perplexity: exp(loss); None if it overflows a float.
        targets: digest of the scored tokens, which does not depend on their context. Losses with
            the same digest belong to the same tokens, so their differences can be paired by
            document.
        groups: the losses of groups of documents, for these differences.
    """

    tokens: Count
    segments: Count
    documents: Count | None
    loss: Loss | None
    stderr: NonNegative | None
    bits_per_byte: NonNegative | None
    perplexity: NonNegative | None
    targets: Name
    groups: DocumentGroups | None


class PositionsRecord(Record):
    """Kind `positions`: the loss by position in the segment. Bin i covers the positions `edges[i]`
    to `edges[i + 1] - 1`; `losses[i]` is its mean loss in nats and `counts[i]` its number of scored
    tokens. targets: see `ExtrapolationRecord`.
    """

    edges: Counts
    losses: Losses
    counts: Counts
    targets: Name


class ResolutionRecord(Record):
    """Kind `resolution`: attention resolution (LEX, arXiv 2212.10554, equations 3 and 4).

    Attributes:
        texts: number of segments averaged over.
        layers: mean over the heads and segments, per layer.
        resolution: mean over the layers; None if it could not be measured.
        targets: see `ExtrapolationRecord`. Earlier versions did not record it.
    """

    texts: Count
    targets: NotRequired[Name]
    layers: Floats
    resolution: Float | None


class PasskeyRecord(Record):
    """Kind `passkey`: passkey retrieval.

    Attributes:
        depth: position of the pass key, from 0 (start of the prompt) to 1 (just before the
            question).
        trials: number of prompts.
        correct: number of prompts answered with the complete pass key.
        accuracy: correct / trials; None if it could not be measured.
    """

    depth: Fraction
    trials: Count
    correct: Count
    accuracy: Fraction | None


class EffectiveLengthRecord(Record):
    """Kind `effective_length`: per head, the smallest distance with a bias below -2 (KERPLE, Figure
    6).

    `length` is the number of distances examined, and also the value for a head whose bias stays
    above -2.

    Attributes:
        layers: label of each list in `effective_lengths`: "layer 3", or "all layers" if the layers
            share the method.
        effective_lengths: one list per entry of `layers`, with one number per head. Empty for a
            method without a bias.
    """

    layers: Annotated[list[Text], FailFast()]
    effective_lengths: Annotated[list[Counts], FailFast()]


KINDS: dict[str, type[Record]] = {
    "extrapolation": ExtrapolationRecord,
    "positions": PositionsRecord,
    "resolution": ResolutionRecord,
    "passkey": PasskeyRecord,
    "effective_length": EffectiveLengthRecord,
}


# The key of a record's value. It is null, or an empty list, if it could not be measured.
VALUES = {
    "extrapolation": "loss",
    "positions": "losses",
    "resolution": "resolution",
    "passkey": "accuracy",
    "effective_length": "effective_lengths",
}


class UnknownKindError(UserError):
    """A record of a kind that another version of this project writes."""


class _Kind(TypedDict):
    kind: Name


_KIND = TypeAdapter(_Kind)
_ADAPTERS = {kind: TypeAdapter(record_type) for kind, record_type in KINDS.items()}


@dataclass(frozen=True)
class Provenance:
    """Where the values of records come from. settings: whatever changes the values for given
    weights, e.g. the precision. precision, trained_text: see `Record`; None if the key is missing.
    """

    checkpoint: Checkpoint | None = None
    pos_emb: str | None = None
    seed: int | None = None
    train_length: int | None = None
    settings: str = ""
    environment: Environment | None = None
    precision: str | None = None
    trained_text: str | None = None

    def record(
        self,
        kind: str,
        *,
        corpus: str | None,
        mode: str,
        protocol: str,
        length: int,
        determined_by: object,
        bos: int | None = None,
    ) -> Record:
        """A record without values. `determined_by` and `settings` together determine the values."""
        digest = hashlib.sha256(repr((determined_by, self.settings)).encode()).hexdigest()[:16]
        record = Record(
            kind=kind,
            corpus=corpus,
            checkpoint=self.checkpoint,
            pos_emb=self.pos_emb,
            seed=self.seed,
            train_length=self.train_length,
            mode=mode,
            protocol=protocol,
            length=length,
            note=None,
            measurement=digest,
            environment=self.environment,
            bos=bos,
        )
        if self.precision is not None:
            record["precision"] = self.precision
        if self.trained_text is not None:
            record["trained_text"] = self.trained_text
        return record


def perplexity(loss: float) -> float | None:
    """exp(loss); None if it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return None


def extrapolation_records(records: Iterable[Record]) -> list[ExtrapolationRecord]:
    """The records of kind `extrapolation`."""
    found = [record for record in records if record["kind"] == "extrapolation"]
    return cast(list[ExtrapolationRecord], found)


def model_of(record: Mapping[str, Any]) -> str | None:
    """Identifies the weights, configuration and code that were measured; None if they are not
    known.
    """
    checkpoint = record.get("checkpoint") or {}
    known = [checkpoint[name] for name in ("fingerprint", "model") if name in checkpoint]
    return " ".join(known) or None


def identity(record: Record) -> tuple[object, ...]:
    """What a record measures. A later record with the same identity replaces an earlier one."""
    keys = ("corpus", "pos_emb", "seed", "train_length", "mode", "protocol", "length", "depth")
    checkpoint = record.get("checkpoint") or cast(Checkpoint, {})
    return (
        record["kind"],
        model_of(record) or checkpoint.get("path"),
        *(record.get(key) for key in keys),
    )


# -- reading --------------------------------------------------------------------------------------


def has_results(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder contains a results.jsonl."""
    return (Path(folder) / RESULTS).is_file()


Folders = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@overload
def read_results(folders: Folders, *, as_frame: Literal[False] = False) -> list[Record]: ...


@overload
def read_results(folders: Folders, *, as_frame: Literal[True]) -> "pandas.DataFrame": ...


def read_results(folders: Folders, *, as_frame: bool = False) -> "list[Record] | pandas.DataFrame":
    """The evaluation records stored in one or more folders, in file order.

    Args:
        folders: one folder or several; each contains results.jsonl itself, in subfolders, or both.
        as_frame: return a pandas DataFrame with one row per record and one column per key. The keys
            of `checkpoint` become columns of their own, such as `checkpoint_path`. Keys that a
            kind does not have are NaN, so select a kind first:
            `frame[frame.kind == "extrapolation"].pivot_table("perplexity", "pos_emb", "length")`.

    If a file has several records with the same identity (measured on other tokens or in another
    precision), the last one is returned. Raises UserError if a folder has no results or a line is
    not a record; it names the file, the line and the key.
    """
    if isinstance(folders, str | os.PathLike):
        folders = [folders]
    records: list[Record] = []
    for folder in map(Path, folders):
        paths = sorted(folder.rglob(RESULTS))
        if not paths:
            if folder.is_file():
                raise UserError(f"{folder} is a file; give the folder that contains {RESULTS}")
            raise UserError(
                f"{folder}: no {RESULTS} in this folder or below it; kerple evaluate writes it"
            )
        for path in paths:
            records += read_results_file(path)
    if not as_frame:
        return records
    import pandas

    # A column per key; the keys of the checkpoint are columns of their own.
    rows = []
    for record in records:
        columns: dict[str, Any] = dict(record)
        checkpoint = columns.pop("checkpoint", None) or {}
        for name in get_type_hints(Checkpoint):
            columns[f"checkpoint_{name}"] = checkpoint.get(name)
        rows.append(columns)
    return pandas.DataFrame(rows)


def read_results_file(path: Path) -> list[Record]:
    """The records of one results.jsonl, the last one of each identity. Skips records of unknown
    kinds and an incomplete last line, with a line on standard error each. Raises UserError.
    """
    records: dict[tuple[object, ...], Record] = {}
    unknown: list[UnknownKindError] = []
    for number, line in enumerate(io.BytesIO(read_file(path, MAX_BYTES)), start=1):
        place = f"{path}, line {number}"
        if not line.endswith(b"\n"):
            # Left by a process that was killed, or another one is still writing it.
            print(f"skipped {place}, because it is incomplete; evaluate again", file=sys.stderr)
            continue
        try:
            record = parse_record(line[:-1], place)
        except UnknownKindError as error:
            unknown.append(error)
            continue
        except UserError as error:
            raise UserError(f"{error}; correct or remove the line") from None
        records[identity(record)] = record
    if unknown:
        print(f"skipped {len(unknown):,} record(s) of unknown kinds: {unknown[0]}", file=sys.stderr)
    return list(records.values())


def parse_record(line: bytes, place: str) -> Record:
    """The record in a line. Raises UserError, starting with `place`, if it is not one, or its
    values contradict each other; UnknownKindError if its kind is unknown.
    """
    value = load_json(line, place)
    kind = check_json(value, _KIND, place)["kind"]
    if kind not in KINDS:
        raise UnknownKindError(
            f"{place}: kind {kind!r} is unknown; kerple evaluate writes {', '.join(KINDS)}"
        )
    record = check_json(value, _ADAPTERS[kind], place)
    for contradiction in _contradictions(record):
        raise UserError(f"{place}: {contradiction}")
    return record


def _contradictions(record: Mapping[str, Any]) -> Iterator[str]:
    """Why the values of a record contradict each other."""
    # Every kind: a value or a note. Then what the values of a kind have to do with each other.
    kind, value = record["kind"], record[VALUES[record["kind"]]]
    is_measured = value is not None and value != []
    if is_measured != (record["note"] is None):
        yield f"it must have either a value ({VALUES[kind]}) or a note that says why there is none"
    elif kind == "extrapolation":
        yield from _contradictions_of_losses(record, is_measured)
    elif kind == "positions" and is_measured:
        edges, counts = record["edges"], record["counts"]
        if len(edges) != len(value) + 1 or any(a >= b for a, b in itertools.pairwise(edges)):
            yield "edges must increase, with one more edge than losses"
        if len(counts) != len(value) or 0 in counts:
            yield "counts must have one positive number for each loss"
    elif kind == "resolution" and is_measured:
        layers = record["layers"]
        if not record["texts"] or not layers or not _is_close(value, sum(layers) / len(layers)):
            yield f"resolution {value} is not the mean over layers, of at least one text"
    elif kind == "passkey":
        correct, trials = record["correct"], record["trials"]
        if correct > trials or (is_measured and not _is_close(value * trials, correct)):
            yield f"accuracy {value} is not correct / trials, {correct} / {trials}"
    elif kind == "effective_length" and is_measured:
        if len(record["layers"]) != len(value):
            yield "effective_lengths must have one list for each of the layers"
        if max(map(max, filter(None, value)), default=0) > record["length"]:
            yield f"effective_lengths must be at most length {record['length']}"


def _contradictions_of_losses(record: Mapping[str, Any], is_measured: bool) -> Iterator[str]:
    """The same for a record of kind `extrapolation`."""
    loss, tokens, groups = record["loss"], record["tokens"], record["groups"]
    if not is_measured:
        others = ("stderr", "bits_per_byte", "perplexity", "groups")
        if tokens or any(record[key] is not None for key in others):
            yield f"loss is null, so tokens must be 0, and {', '.join(others)} null"
        return

    # A measured loss and what follows from it.
    if not tokens or not record["segments"] or record["documents"] == 0:
        yield "tokens, segments and documents must be positive, because there is a loss"
    expected = perplexity(loss)
    if expected is None or record["perplexity"] is None:
        matches = expected == record["perplexity"]
    else:
        matches = _is_close(record["perplexity"], expected)
    if not matches:
        yield f"perplexity {record['perplexity']} is not exp(loss), {expected}"

    # The groups add up to the tokens and the loss.
    if groups is None:
        return
    counts, losses = groups["tokens"], groups["losses"]
    if len(counts) != len(losses) or 0 in counts or sum(counts) != tokens:
        yield f"groups must have one loss for each positive number of tokens, {tokens:,} in total"
        return
    mean = math.fsum(map(operator.mul, counts, losses)) / tokens
    if not math.isclose(mean, loss, rel_tol=1e-3, abs_tol=1e-3):  # the losses of groups are rounded
        yield f"loss {loss} is not the mean of groups, {mean}"


def _is_close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
