"""evaluate.py --eval-tasks: run tasks of lm-evaluation-harness on checkpoints, print a table and write `tasks.json`."""

import argparse
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kerple.attention import FULL_MODE
from megatron.checkpoint.configuration import evaluated_method
from megatron.checkpoint.directory import iteration_of, weights_fingerprint
from megatron.cli.model_options import chosen_step, load, saved_config, tokenizer_files
from megatron.config import Config, UserError
from megatron.convert.tokenizer_files import check_rows
from megatron.evaluation.modes import supported_modes
from megatron.reporting.terminal import print_rows
from megatron.utils.command_line import MAX_INT, integer, number, option_name, path_option
from megatron.utils.errors import install_command, visible
from megatron.utils.files import read_file, write_atomically
from megatron.utils.processes import Lock
from megatron.utils.typed_json import load_json

TASK_RESULTS = "tasks.json"
MAX_BYTES = 1 << 26
COLUMNS = ("checkpoint", "method", "mode", "task", "n-shot", "filter", "metric", "value", "± error")
Entry = dict[str, Any]  # of tasks.json: one checkpoint in one mode


@dataclasses.dataclass(frozen=True)
class HarnessOptions:
    """The tasks to run and the harness's settings, under the harness's names."""

    tasks: tuple[str, ...]
    num_fewshot: int | None
    limit: float | int | None
    include_path: tuple[str, ...]
    max_length: int | None


# What an entry measures. A later entry with the same values of these keys replaces an earlier one.
IDENTITY = (
    *("checkpoint", "iteration", "pos_emb", "precision", "mode"),
    *("tasks", "num_fewshot", "limit", "include_path", "max_length"),
)


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of evaluate.py for tasks."""
    group = parser.add_argument_group("tasks of lm-evaluation-harness (instead of extrapolation)")
    group.add_argument(
        "--eval-tasks", nargs="+", metavar="TASK", help="task names, groups or YAML files (default: eval_tasks)"
    )
    group.add_argument(
        "--num-fewshot", type=integer(0), metavar="N", help="examples before each question (default: set by the task)"
    )
    group.add_argument(
        "--limit",
        type=number(0, MAX_INT, above=True),
        metavar="N",
        help="number of documents per task, or a fraction of them if below 1",
    )
    group.add_argument(
        "--include-path", nargs="+", type=path_option, metavar="DIR", help="folders with your own task files"
    )
    group.add_argument(
        "--max-length",
        type=integer(1),
        metavar="N",
        help="tokens read at once: longer prompts are truncated on the left, longer documents are read in windows "
        "(default: prompts are never truncated, windows have up to 16 times the training length)",
    )


def harness_options(config: Config, options: argparse.Namespace) -> HarnessOptions | None:
    """The options on the command line, or else those in the configuration; None without tasks. Raises UserError."""
    configured = config.evaluation

    def choose(name: str, default: Any) -> Any:
        value = getattr(options, name)
        return default if value is None else value

    tasks = choose("eval_tasks", configured.eval_tasks)
    if not tasks:
        for name in ("num_fewshot", "limit", "include_path", "max_length"):
            if getattr(options, name) is not None:
                raise UserError(f"{option_name(name)} requires tasks; add --eval-tasks")
        return None
    num_fewshot = choose("num_fewshot", configured.eval_num_fewshot)
    max_length = choose("max_length", configured.eval_max_length)
    limit = choose("limit", configured.eval_limit)
    if limit is not None and limit > 1 and limit != int(limit):
        raise UserError(f"--limit must be a number of documents, or a fraction below 1, not {limit}")
    return HarnessOptions(
        tasks=tuple(tasks),
        num_fewshot=num_fewshot,
        limit=int(limit) if limit is not None and limit >= 1 else limit,
        include_path=tuple(choose("include_path", configured.eval_include_path) or ()),
        max_length=max_length,
    )


def run_harness(
    harness: HarnessOptions,
    folders: Sequence[Path],
    config: Config,
    options: argparse.Namespace,
    output: Path,
    lock: Lock,
) -> None:
    """Run the tasks on every checkpoint in every mode, add an entry for each to `tasks.json` as soon as it is measured,
    and print the table. What the file already contains is not measured again. lock: that of the file, held.

    Raises UserError.
    """
    try:
        import lm_eval.api.model

        from megatron.evaluation.harness import evaluate_tasks
    except ImportError as error:
        raise UserError(
            f"eval_tasks: lm-evaluation-harness cannot be imported ({error}): {install_command('eval')}"
        ) from error

    # Everything that can be checked before a model is loaded.
    check = len(folders) == 1
    steps = [chosen_step(folder, config, options) for folder in folders]
    configs = [saved_config(step, config, options, check=check) for step in steps]
    supported = supported_modes(configs, options.modes, skip_unsupported=options.skip_unsupported)
    path = output / TASK_RESULTS
    entries = {_identity(entry): entry for entry in read_task_results(path)}
    shown: list[str] = []

    def store(entry: Entry) -> None:
        entries[_identity(entry)] = entry
        lock.check()
        content = json.dumps({"checkpoints": list(entries.values())}, indent=1, default=str)
        write_atomically(path, (content + "\n").encode())

    own_files = _own_files(harness, output)
    for folder, step, saved, (modes, unsupported) in zip(folders, steps, configs, supported, strict=True):
        print(f"{folder}, {evaluated_method(saved)}, trained at {saved.model.seq_length:,} tokens:", flush=True)
        # If the configuration is the first checkpoint's own, each checkpoint has its own tokenizer.
        tokenizer_config = saved if options.from_checkpoint and config.tokenizer == configs[0].tokenizer else config
        files = tokenizer_files(tokenizer_config, saved)
        tokenizer = files.build()
        # Everything that determines the results, except the mode.
        source: Entry = {
            "checkpoint": str(folder),
            "iteration": iteration_of(step),
            "fingerprint": weights_fingerprint(step),
            "pos_emb": evaluated_method(saved),
            "seed": saved.training.seed,
            "train_length": saved.model.seq_length,
            "precision": options.precision,
            "release_bf16_distances": saved.model.release_bf16_distances,
            "tokenizer": list(dataclasses.astuple(files)),
            "tokenizer_fingerprint": tokenizer.fingerprint,
            **dataclasses.asdict(harness),
            "tasks": list(harness.tasks),
            "include_path": list(harness.include_path),
            "own_files": own_files,
            "lm_eval": lm_eval.__version__,
        }

        # A mode that is not supported has an entry too.
        for name, reason in unsupported.items():
            print(f"inference mode {name} {reason} (not in the table)", flush=True)
            store({**source, "mode": name, "note": reason, "results": {}})

        # Entries whose source is the same are not measured again.
        planned = {mode: {**source, "mode": mode.name, "note": None} for mode in modes}
        shown += map(_identity, planned.values())
        stored = {mode: entries.get(_identity(entry), {}) for mode, entry in planned.items()}
        missing = [mode for mode, entry in planned.items() if not entry.items() <= stored[mode].items()]
        if len(missing) < len(modes):
            print(f"{len(modes) - len(missing)} of {len(modes)} results exist from an earlier run", flush=True)
        if not missing:
            continue  # without loading the model

        # Measure the others.
        model, _ = load(step, config, options, check=check)
        check_rows(tokenizer, model.settings.padded_vocab_size)
        for mode in missing:
            if mode != FULL_MODE:
                print(f"inference mode {mode.name}:", flush=True)
            results = evaluate_tasks(
                model,
                tokenizer,
                harness.tasks,
                train_length=saved.model.seq_length,
                num_fewshot=harness.num_fewshot,
                limit=harness.limit,
                include_path=harness.include_path,
                max_length=harness.max_length,
                mode=mode.attention,
                seed=saved.training.seed,
                report=partial(print, flush=True),
            )
            store({**planned[mode], **results})
        del model  # free its memory before the next one is loaded
    print_tasks([entries[key] for key in shown])
    print(path, flush=True)


def read_task_results(path: Path) -> list[Entry]:
    """The entries of a `tasks.json`; none if it does not exist. Raises UserError for any other file."""
    if not path.exists():
        return []
    try:
        entries: list[Entry] = load_json(read_file(path, MAX_BYTES), str(path), allow_nan=True)["checkpoints"]
        for entry in entries:
            _identity(entry)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not written by evaluate.py ({error!r}); move or remove it, or choose another --output"
        ) from None
    except UserError as error:
        raise UserError(f"{error}; move or remove it, or choose another --output") from None
    return entries


def _identity(entry: Mapping[str, Any]) -> str:
    """The values of the keys `IDENTITY`."""
    return json.dumps([entry[key] for key in IDENTITY])


def _own_files(harness: HarnessOptions, output: Path) -> str:
    """A digest of the names, sizes and times of the files in `include_path`, and of those in the folders of tasks that
    are files. If one of them has changed, earlier results may be those of another task.
    """
    digest = hashlib.sha256()
    folders = [*harness.include_path, *(os.path.dirname(task) or "." for task in harness.tasks if os.path.isfile(task))]
    for root, subfolders, names in (found for folder in folders for found in os.walk(folder)):
        subfolders[:] = sorted(set(subfolders) - {"__pycache__"})
        for path in (Path(root, name) for name in sorted(names)):
            is_output = path.name.startswith(TASK_RESULTS) and path.parent.samefile(output)
            if path.is_file() and not is_output:
                status = path.stat()
                digest.update(os.fsencode(f"{path} {status.st_size} {status.st_mtime_ns}\n"))
    return digest.hexdigest()[:16]


def print_tasks(checkpoints: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print a table with a row per checkpoint, mode, task and metric."""
    lines = [line for checkpoint in checkpoints for line in _table_lines(checkpoint)]
    # Omit columns that do not distinguish rows: most tasks have no filters, and most checkpoints differ in
    # their method.
    methods = {checkpoint["checkpoint"]: checkpoint["pos_emb"] for checkpoint in checkpoints}
    shown = {
        "checkpoint": len(set(methods.values())) < len(methods),
        "mode": any(line["mode"] != "full" for line in lines),
        "filter": any(line["filter"] != "none" for line in lines),
    }
    titles = [name for name in COLUMNS if shown.get(name, True)]
    cells = [[Text(line[name]) for name in titles] for line in lines]
    print_rows(console or Console(), "Tasks", titles, cells, len(titles) - 2)


def _table_lines(checkpoint: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The rows of one checkpoint in one mode, by column. The harness stores metrics under `metric,filter`."""
    for task, values in {**checkpoint["results"], **checkpoint.get("groups", {})}.items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            higher_is_better = checkpoint.get("higher_is_better", {}).get(task, {}).get(metric)
            arrow = " ↑" if higher_is_better is True else " ↓" if higher_is_better is False else ""
            cells = (
                checkpoint["checkpoint"],
                checkpoint["pos_emb"],
                checkpoint["mode"],
                values.get("alias", task),
                checkpoint.get("n-shot", {}).get(task, ""),
                filter_name,
                metric + arrow,
                _number(value),
                _number(values.get(f"{metric}_stderr,{filter_name}")),
            )
            yield {column: visible(str(cell)) for column, cell in zip(COLUMNS, cells, strict=True)}


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4e}"
    return "" if value in (None, "N/A") else str(value)
