"""Writing evaluation records to `results.jsonl`."""

import contextlib
import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.evaluation.modes import UNSUPPORTED_NOTE
from megatron.evaluation.records import (
    RESULTS,
    Record,
    identity,
    model_of,
    parse_record,
    read_results_file,
)
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically, write_errors
from megatron.utils.processes import Lock


class ResultsFile:
    """The results.jsonl of a folder, opened to add records. Use as a context manager.

    Args:
        folder: created if needed.
        models: those to evaluate, as `model_of` names them.
        replace: drop stored records of other models.

    Entering raises UserError if the folder cannot be written to, if another process is writing to
    it, or if it contains records of other models and `replace` is False.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        models: Sequence[str],
        *,
        replace: bool = False,
    ):
        self.folder = Path(folder)
        self.path = self.folder / RESULTS
        self.records: list[Record] = []
        self._models = set(models)
        self._replace = replace
        self._lock = Lock(
            self.folder / f"{RESULTS}.lock",
            f"{self.path}: another evaluation is writing to it; wait until it ends, or choose "
            "another --output",
        )

    def __enter__(self) -> "ResultsFile":
        # Fail before anything is measured.
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

        # Locked, so that no other process writes at the same time.
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._lock)
            stored = read_results_file(self.path) if self.path.exists() else []
            self.records = []
            other = None
            for record in stored:
                if model_of(record) in self._models:
                    self.records.append(record)
                else:
                    other = other or record
            if other is not None and not self._replace:
                checkpoint: Mapping[str, object] = other["checkpoint"] or {}
                raise UserError(
                    f"{self.folder}: contains results of another model, {other['pos_emb']} with "
                    f"seed {other['seed']} ({checkpoint.get('path')} at iteration "
                    f"{checkpoint.get('iteration')}, weights {checkpoint.get('fingerprint')}); "
                    "choose another --output, evaluate checkpoints together (--checkpoint A B), or "
                    "drop its results with --replace"
                )
            if other is not None:
                lines = b"".join(json.dumps(record).encode() + b"\n" for record in self.records)
                write_atomically(self.path, lines)

            # A process that was killed may have left an incomplete line.
            with write_errors(self.path):
                self._file = stack.enter_context(open(self.path, "a+b", buffering=0))
                self._file.seek(0)
                self._file.truncate(self._file.read().rfind(b"\n") + 1)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def find(self, planned: Record) -> Record | None:
        """The stored record with the same identity and measurement digest, if there is one."""
        key = identity(planned)
        for record in self.records:
            if identity(record) == key and record["measurement"] == planned["measurement"]:
                return record
        return None

    def is_measured(self, planned: Record) -> bool:
        """Whether `find` has a result. A record that an earlier run stored for a mode that was not
        supported, e.g. with another `attention-backend`, is none.
        """
        record = self.find(planned)
        return record is not None and not str(record["note"]).startswith(UNSUPPORTED_NOTE)

    def add(self, record: Record) -> None:
        """Append a record and flush it to disk.

        Raises UserError if it is not valid or cannot be written.
        """
        # Never write what cannot be read.
        line = json.dumps(record).encode() + b"\n"
        parse_record(line[:-1], f"cannot write {self.path}")
        with write_errors(self.path):
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        key = identity(record)
        self.records = [stored for stored in self.records if identity(stored) != key] + [record]
