"""Reading stored results: the `results.jsonl` of any number of evaluations."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.evaluation.results import RESULTS, latest
from megatron.utils.errors import UserError


def collect(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """The records of all results in and below these folders. Raises UserError for one that holds none."""
    records: list[dict[str, Any]] = []
    for folder in folders:
        files = [folder / RESULTS] if (folder / RESULTS).is_file() else sorted(folder.rglob(RESULTS))
        if not files:
            raise UserError(f"{folder}: holds no {RESULTS}, nor does any folder below it; evaluate.py writes it")
        for file in files:
            records += _read(file)
    return records


def _read(path: Path) -> list[dict[str, Any]]:
    """Records of any kind, also of kinds that evaluate.py does not write itself; of several of one thing, the last."""
    try:
        # What follows the last end of a line is what a killed run left of a record.
        return latest(list(map(json.loads, path.read_text(encoding="utf-8").split("\n")[:-1])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: does not hold the results of evaluate.py ({error!r})") from error
