"""evaluate.py --eval-tasks: run tasks of lm-evaluation-harness on checkpoints, print tables and
write a JSON file.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.configuration import evaluated_method
from megatron.checkpoint.directory import iteration_of
from megatron.checkpoint.layers import DTYPES
from megatron.cli.model_options import chosen_step, overrides_of, saved_config, tokenizer_files
from megatron.config import Config, UserError
from megatron.evaluation.modes import supported_modes
from megatron.evaluation.runner import BATCH_TOKENS_CPU, BATCH_TOKENS_GPU
from megatron.inference.loading import load_model
from megatron.utils.command_line import MAX_INT, integer, number, option_name, path_option
from megatron.utils.environment import choose_device
from megatron.utils.errors import install_command
from megatron.utils.files import write_atomically

MAX_LENGTH_FACTOR = 16  # the longest default length, as a multiple of the training length
TASK_OPTIONS = ("eval_tasks", "num_fewshot", "limit", "include_path", "max_length")


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of evaluate.py for tasks."""
    # Without these, the configuration's values count.
    group = parser.add_argument_group("tasks of lm-evaluation-harness (instead of extrapolation)")
    group.add_argument(
        "--eval-tasks",
        nargs="+",
        metavar="TASK",
        help="task names, groups or YAML files (default: eval_tasks)",
    )
    group.add_argument(
        "--num-fewshot",
        type=integer(0),
        metavar="N",
        help="examples before each question (default: set by the task)",
    )
    group.add_argument(
        "--limit",
        type=number(0, MAX_INT, above=True),
        metavar="N",
        help="number of documents per task, or a fraction of them if below 1",
    )
    group.add_argument(
        "--include-path",
        nargs="+",
        type=path_option,
        metavar="DIR",
        help="folders with your own task files",
    )
    group.add_argument(
        "--max-length",
        type=integer(1),
        metavar="N",
        help="tokens read at once: longer prompts are truncated on the left, longer documents are "
        "read in windows "
        f"(default: {MAX_LENGTH_FACTOR} times the training length, or the size of a learned table)",
    )


def task_options(config: Config, options: argparse.Namespace) -> dict[str, Any] | None:
    """The values of `TASK_OPTIONS` on the command line, or else in the configuration; None without
    tasks. Raises UserError.
    """
    values: dict[str, Any] = {}
    for name in TASK_OPTIONS:
        values[name] = getattr(options, name)
        if values[name] is None:
            values[name] = getattr(config.evaluation, f"eval_{name.removeprefix('eval_')}")
    if not values["eval_tasks"]:
        for name in TASK_OPTIONS[1:]:
            if getattr(options, name) is not None:
                raise UserError(f"{option_name(name)} requires tasks; add --eval-tasks")
        return None
    limit = values["limit"]
    if limit is not None and limit > 1 and limit != int(limit):
        raise UserError(
            f"--limit must be a number of documents, or a fraction below 1, not {limit}"
        )
    for folder in values["include_path"] or ():
        if not Path(folder).is_dir():
            raise UserError(f"--include-path {folder}: not a folder")
    return values


def evaluate_tasks(
    tasks: Mapping[str, Any],
    folders: Sequence[Path],
    config: Config,
    options: argparse.Namespace,
    output: Path,
) -> None:
    """Run the tasks (see `task_options`) on every checkpoint in every mode. Print a table of each,
    and write a new file in `output`. Raises UserError.
    """
    try:
        from lm_eval.utils import handle_non_serializable, make_table

        from megatron.evaluation.harness import find_tasks, harness_model, run_tasks
    except ImportError as error:
        raise UserError(
            f"eval_tasks: lm-evaluation-harness cannot be imported ({error}): "
            f"{install_command('eval')}"
        ) from error

    # Everything that can be checked before a model is loaded.
    device = choose_device(options.device)
    default = BATCH_TOKENS_CPU if device.type == "cpu" else BATCH_TOKENS_GPU
    batch_tokens = options.batch_tokens or default
    steps = [chosen_step(folder, config, options) for folder in folders]
    configs = [saved_config(step, config, options, check=len(folders) == 1) for step in steps]
    supported = supported_modes(configs, options.modes, skip_unsupported=options.skip_unsupported)
    positions = []
    for saved in configs:
        size = saved.model.max_position_embeddings
        if saved.model.pos_emb != "learned":
            size = sys.maxsize  # only a learned table has an end
        positions.append(size)
        if (tasks["max_length"] or 0) > size:
            raise UserError(
                f"--max-length must be at most {size}, the number of positions of pos_emb learned"
            )
    found = find_tasks(tasks["eval_tasks"], tasks["include_path"])

    # Each checkpoint in each mode that it supports. The file is written again after each.
    path = output / time.strftime(f"tasks_%Y%m%d-%H%M%S_{os.getpid()}.json")
    entries: list[dict[str, Any]] = []
    checkpoints = zip(folders, steps, configs, supported, positions, strict=True)
    for folder, step, saved, (modes, unsupported), size in checkpoints:
        checkpoint = options.hub_names.get(str(folder), str(folder))
        for name, reason in unsupported.items():
            print(f"{checkpoint}: inference mode {name} {reason} (not measured)", flush=True)
        if not modes:
            continue

        # If the configuration is the first checkpoint's own, each checkpoint has its own tokenizer.
        tokenizer = tokenizer_files(config, saved)
        if options.from_checkpoint and config.tokenizer == configs[0].tokenizer:
            tokenizer = tokenizer_files(saved, saved)
        iteration, method = iteration_of(step), evaluated_method(saved)
        overrides = overrides_of(step, config, options)
        model, _ = load_model(step.parent, iteration, overrides=overrides)
        max_length = tasks["max_length"] or min(MAX_LENGTH_FACTOR * saved.model.seq_length, size)
        source = {
            "checkpoint": checkpoint,
            "iteration": iteration,
            "pos_emb": method,
            "precision": options.precision,
            "max_length": max_length,
        }
        for mode in modes:
            print(
                f"{checkpoint}, {method}, mode {mode.name}, max_length {max_length:,}:", flush=True
            )

            # Batches are padded, which changes the length of their texts.
            batch_size = max(1, batch_tokens // max_length)
            if mode.attention.length_dependent:
                batch_size = 1
            language_model = harness_model(
                model,
                saved,
                tokenizer,
                mode=mode.name,
                dtype=DTYPES[options.precision],
                device=device,
                allow_other_tokenizer=config.checkpoint.allow_other_tokenizer,
                max_length=max_length,
                batch_size=batch_size,
            )
            results = run_tasks(language_model, tasks, found)
            entries.append({**source, "mode": mode.name, **results})
            report = {"checkpoints": entries}
            content = json.dumps(report, indent=1, default=handle_non_serializable)
            output.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{content}\n".encode())
            for column in ("results", "groups"):
                if results.get(column):
                    print(make_table(results, column), flush=True)
    if entries:
        print(path, flush=True)
