"""The store of results: `results.jsonl` in the output folder, one record per line, appended as it becomes known.

A line is on the disk before the next measurement starts, so that a run that is killed goes on where it stopped. A last
line without its end is what such a run left of a record; it is dropped.
"""

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from megatron.evaluation.records import KINDS, Record
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

RESULTS = "results.jsonl"


def has_results(folder: str | os.PathLike[str]) -> bool:
    return (Path(folder) / RESULTS).is_file()


def read_results(folder: str | os.PathLike[str]) -> list[Record]:
    """The records of a folder in the order of the file; of several measurements of one thing (other tokens, another
    precision) the last. Raises UserError when there is no such file, or a line is no record.
    """
    path = Path(folder) / RESULTS
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{folder}: holds no {RESULTS}; evaluate.py writes it") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    lines = content.split(b"\n")[:-1]
    return latest([_record(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)])


def latest(records: Sequence[Record]) -> list[Record]:
    """The last record of each identity, where the first of them stood."""
    return list({identity(record): record for record in records}.values())


def identity(record: Record) -> tuple:
    """What a record is the value of; a later one with the same identity replaces it."""
    keys = ("corpus", "pos_emb", "seed", "train_length", "mode", "protocol", "length", "depth")
    origin = record.get("checkpoint") or {}
    return (record["kind"], origin.get("fingerprint") or origin.get("path"), *(record.get(key) for key in keys))


class Results:
    """The results of one folder, open for more: a context manager.

    checkpoints: fingerprints of the models that this run measures. Raises UserError when the folder cannot be written
    to, when another process is writing there, or when it holds results of another model; with `replace` those are
    dropped instead.
    """

    def __init__(self, folder: str | os.PathLike[str], checkpoints: Sequence[str] = (), *, replace: bool = False):
        self.folder = Path(folder)
        self._checkpoints = set(checkpoints)
        self._replace = replace
        self.records: list[Record] = []

    def __enter__(self) -> "Results":
        if has_results(self.folder):
            self._check_models(read_results(self.folder))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self._locked()
        except OSError as error:
            raise UserError(f"cannot write the report to {self.folder}: {error.strerror or error}") from error
        self._drop_torn_line()
        self.records = [record for record in read_results(self.folder) if _fingerprint(record) in self._checkpoints]
        if self._replace and len(self.records) < len(read_results(self.folder)):
            self._rewrite()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def find(self, wanted: Record) -> Record | None:
        """The record of the same identity and measurement, if there is one."""
        key = identity(wanted)
        return next((one for one in self.records if identity(one) == key and _same_measurement(one, wanted)), None)

    def add(self, record: Record) -> None:
        """Append a record; it is on the disk when this returns. Raises UserError when it cannot be written."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            self._file.write(line)
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.folder / RESULTS}: {error.strerror}") from error
        key = identity(record)
        self.records = [one for one in self.records if identity(one) != key] + [record]

    def _check_models(self, records: Sequence[Record]) -> None:
        for record in records:
            if _fingerprint(record) not in self._checkpoints and not self._replace:
                origin = record["checkpoint"] or {}
                raise UserError(
                    f"{self.folder}: holds results of another model, {record['pos_emb']} with seed {record['seed']} "
                    f"({origin.get('path')} at iteration {origin.get('iteration')}, weights "
                    f"{origin.get('fingerprint')}); give another --output, evaluate that model too (--checkpoint A B), "
                    "or drop its results with --replace"
                )

    def _locked(self) -> BinaryIO:
        """The file, open to append; the lock ends with the process that holds it."""
        path = self.folder / RESULTS
        file = open(path, "a+b", buffering=0)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError:
            pass
        file.close()
        raise UserError(f"{path}: another evaluation is writing to it; let it end, or give another --output")

    def _rewrite(self) -> None:
        """The file with `records` alone, in one step: what is stored outlives a process that is killed here."""
        content = b"".join(json.dumps(record).encode() + b"\n" for record in self.records)
        write_atomically(self.folder / RESULTS, content)
        self._file.close()
        self._file = self._locked()

    def _drop_torn_line(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)


def _record(line: bytes, place: str) -> Record:
    try:
        record = json.loads(line)
        missing = [key for key in KINDS[record["kind"]].__annotations__ if key not in record]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{place}: is no result of evaluate.py ({error!r}); remove the line or the file") from error
    if missing:
        raise UserError(f"{place}: a result without {', '.join(missing)}; remove the line or the file")
    return record


def _fingerprint(record: Record) -> str | None:
    return (record["checkpoint"] or {}).get("fingerprint")


def _same_measurement(one: Record, other: Record) -> bool:
    return one["measurement"] == other["measurement"]
