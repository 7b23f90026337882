"""Reading stored results from the folders of evaluations.

`results.jsonl` holds one JSON object per line, each with its `kind`. A folder without it may hold `extrapolation.json`,
whose rows are of kind `extrapolation`; corpus and checkpoint are then those of the run that the folder lies in.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.directory import find_step, has_checkpoint, iteration_of
from megatron.config import Config
from megatron.config.errors import UserError
from megatron.evaluation.results import RESULTS, latest

ROWS = "extrapolation.json"


def has_results(folder: Path) -> bool:
    return (folder / RESULTS).is_file() or (folder / ROWS).is_file()


def collect(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """The records of all results in and below these folders. Raises UserError for one that holds none."""
    records: list[dict[str, Any]] = []
    for folder in folders:
        below = sorted({path.parent for name in (RESULTS, ROWS) for path in folder.rglob(name)})
        holders = [folder] if has_results(folder) else below
        if not holders:
            raise UserError(f"{folder}: holds no {RESULTS}, nor does any folder below it; evaluate.py writes results")
        for holder in holders:
            records += read_results(holder)
    return records


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The records of one folder. Raises UserError where a file is not what it should be."""
    path = folder / (RESULTS if (folder / RESULTS).is_file() else ROWS)
    try:
        text = path.read_text(encoding="utf-8")
        if path.name == RESULTS:
            # What follows the last end of a line is what a killed run left of a record.
            records = latest(list(map(json.loads, text.split("\n")[:-1])))
        else:
            records = _rows(folder, json.loads(text))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: does not hold the results of evaluate.py ({error!r})") from error
    return records


def corpus_of(config: Config) -> str | None:
    """The name of the text that a configuration trains on: its dataset's file without `_text_document`."""
    data = config.data
    prefix = data.data_path or next(iter(data.valid_data_paths or data.train_data_paths or ()), None)
    return Path(prefix).name.removesuffix("_document").removesuffix("_text") if prefix else None


def _rows(folder: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    origin: dict[str, Any] = {"kind": "extrapolation"}
    holder = next((one for one in (folder.parent, folder.parent / "checkpoints") if has_checkpoint(one)), None)
    if holder is not None:
        step = find_step(holder)
        origin["corpus"] = corpus_of(checkpoint_config(step))
        origin["checkpoint"] = {"path": str(holder), "iteration": iteration_of(step)}
    return [{**origin, **row} for row in content["rows"]]
