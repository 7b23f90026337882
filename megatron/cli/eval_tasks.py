"""evaluate.py --eval-tasks: run tasks of lm-evaluation-harness on checkpoints, print a table and write `tasks.json`."""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kerple.attention import FULL_MODE
from megatron.checkpoint.directory import iteration_of
from megatron.cli.model_options import chosen_step, load, load_tokenizer, saved_config
from megatron.config import Config, UserError
from megatron.config.command_line import integer, number, option_name
from megatron.config.schema.base import MAX_INT
from megatron.evaluation.modes import supported_modes
from megatron.reporting.terminal import print_rows, standard_output
from megatron.utils.errors import install_command
from megatron.utils.files import write_atomically

TASK_RESULTS = "tasks.json"
COLUMNS = ("checkpoint", "method", "mode", "task", "n-shot", "filter", "metric", "value", "± error")


@dataclasses.dataclass(frozen=True)
class HarnessOptions:
    """The tasks to run and the harness's settings, under the harness's names."""

    tasks: tuple[str, ...]
    num_fewshot: int | None
    limit: float | int | None
    include_path: tuple[str, ...]
    max_length: int | None


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
    group.add_argument("--include-path", nargs="+", metavar="DIR", help="folders with your own task files")
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
    for name, value, minimum in (("num_fewshot", num_fewshot, 0), ("max_length", max_length, 1)):
        if value is not None and value < minimum:
            raise UserError(f"{option_name(name)} must be at least {minimum}, not {value}")
    limit = choose("limit", configured.eval_limit)
    if limit is not None and (limit <= 0 or (limit > 1 and limit != int(limit))):
        raise UserError(f"--limit must be a number of documents, or a fraction below 1, not {limit}")
    return HarnessOptions(
        tasks=tuple(tasks),
        num_fewshot=num_fewshot,
        limit=int(limit) if limit is not None and limit >= 1 else limit,
        include_path=tuple(choose("include_path", configured.eval_include_path) or ()),
        max_length=max_length,
    )


def run_harness(
    harness: HarnessOptions, folders: Sequence[Path], config: Config, options: argparse.Namespace, output: Path
) -> None:
    """Run the tasks on every checkpoint in every mode, update `tasks.json` (an entry per checkpoint and mode) after
    each run, and print the table. Raises UserError.
    """
    try:
        import lm_eval.api.model

        from megatron.evaluation.harness import evaluate_tasks
    except ImportError as error:
        raise UserError(
            f"eval_tasks: lm-evaluation-harness cannot be imported ({error}): {install_command('eval')}"
        ) from error
    check = len(folders) == 1
    steps = [chosen_step(folder, config, options) for folder in folders]
    configs = [saved_config(step, config, options, check=check) for step in steps]
    supported = supported_modes(configs, options.modes, skip_unsupported=options.skip_unsupported)
    checkpoints: list[dict[str, Any]] = []
    content = {**dataclasses.asdict(harness), "lm_eval": lm_eval.__version__, "checkpoints": checkpoints}
    for folder, step, saved, (modes, unsupported) in zip(folders, steps, configs, supported, strict=True):
        print(f"{folder}, {saved.model.pos_emb}, trained at {saved.model.seq_length:,} tokens:", flush=True)
        source = {
            "checkpoint": str(folder),
            "iteration": iteration_of(step),
            "pos_emb": saved.model.pos_emb,
            "seed": saved.training.seed,
            "train_length": saved.model.seq_length,
            "precision": options.precision,
        }
        for name, reason in unsupported.items():
            print(f"inference mode {name} {reason} (not in the table)", flush=True)
            checkpoints.append({**source, "mode": name, "note": reason, "results": {}})
        if not modes:
            continue
        model, _ = load(step, config, options, check=check)
        # If the configuration is the first checkpoint's own, each checkpoint has its own tokenizer.
        tokenizer_config = saved if options.own and config.tokenizer == configs[0].tokenizer else config
        tokenizer = load_tokenizer(tokenizer_config, saved, model.settings.padded_vocab_size)
        for mode in modes:
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
            checkpoints.append({**source, "mode": mode.name, "note": None, **results})
            _write(content, output)
        del model  # free its memory before the next one is loaded
    path = _write(content, output)
    print_tasks(checkpoints)
    print(path, flush=True)


def _write(content: Mapping[str, Any], output: Path) -> Path:
    """Write `tasks.json` and return its path. Raises UserError."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write results to {output}: {error.strerror or error}") from error
    path = output / TASK_RESULTS
    write_atomically(path, (json.dumps(content, indent=1, default=str) + "\n").encode())
    return path


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
    print_rows(console or standard_output(), "Tasks", titles, cells, len(titles) - 2)


def _table_lines(checkpoint: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The rows of one checkpoint in one mode, by column. The harness stores metrics under `metric,filter`."""
    for task, values in {**checkpoint["results"], **checkpoint.get("groups", {})}.items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            higher_is_better = checkpoint.get("higher_is_better", {}).get(task, {}).get(metric)
            arrow = {True: " ↑", False: " ↓"}.get(higher_is_better, "")
            cells = (
                checkpoint["checkpoint"],
                checkpoint["pos_emb"],
                checkpoint["mode"],
                values.get("alias", task),
                str(checkpoint.get("n-shot", {}).get(task, "")),
                filter_name,
                metric + arrow,
                _number(value),
                _number(values.get(f"{metric}_stderr,{filter_name}")),
            )
            yield dict(zip(COLUMNS, cells, strict=True))


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4e}"
    return "" if value in (None, "N/A") else str(value)
