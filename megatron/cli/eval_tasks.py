"""evaluate.py --eval-tasks: the tasks of lm-evaluation-harness on checkpoints, as a table and as `tasks.json`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron.checkpoint.directory import iteration_of
from megatron.cli.model_options import chosen_step, load, load_tokenizer
from megatron.config import Config, UserError
from megatron.config.command_line import option_name
from megatron.reporting.terminal import compact_table, standard_output
from megatron.utils.files import write_atomically

RESULTS = "tasks.json"
ROLLING = 16  # times the training length: the longest window of a document, where max_length is not given
# Of what the harness returns, what a reader of the numbers needs; the rest tells of the machine.
KEPT = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better", "configs")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of evaluate.py that are about tasks."""
    group = parser.add_argument_group("tasks of lm-evaluation-harness, instead of extrapolation")
    group.add_argument("--eval-tasks", nargs="+", metavar="TASK", help="names, groups, YAML files; default: eval_tasks")
    group.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before each question; default: the task's"
    )
    group.add_argument(
        "--limit", type=float, metavar="N", help="documents per task at most; below 1: the share of them"
    )
    group.add_argument("--include-path", nargs="+", metavar="DIR", help="folders with task files of your own")
    group.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens given to the model at once, longer prompts losing their beginning; default: as many as a prompt "
        f"has; documents are read in windows of up to {ROLLING} times the training length",
    )


@dataclasses.dataclass(frozen=True)
class Request:
    """What to run: the harness's names of tasks and its settings of the same names."""

    tasks: tuple[str, ...]
    num_fewshot: int | None
    limit: float | int | None
    include_path: tuple[str, ...]
    max_length: int | None

    @classmethod
    def of(cls, config: Config, options: argparse.Namespace) -> "Request | None":
        """Options first, then the configuration; None where no tasks are named. Raises UserError."""
        given = config.evaluation
        chosen = {
            name: given_value if option is None else option
            for name, given_value, option in (
                ("tasks", given.eval_tasks, options.eval_tasks),
                ("num_fewshot", given.eval_num_fewshot, options.num_fewshot),
                ("limit", given.eval_limit, options.limit),
                ("include_path", given.eval_include_path, options.include_path),
                ("max_length", given.eval_max_length, options.max_length),
            )
        }
        if not chosen["tasks"]:
            for name in ("num_fewshot", "limit", "include_path", "max_length"):
                if getattr(options, name) is not None:
                    raise UserError(f"{option_name(name)} is about tasks, and none is named; give --eval-tasks")
            return None
        for name, least in (("num_fewshot", 0), ("max_length", 1)):
            if chosen[name] is not None and chosen[name] < least:
                raise UserError(f"{option_name(name)} must be at least {least}, not {chosen[name]}")
        limit = chosen["limit"]
        if limit is not None and (limit <= 0 or (limit > 1 and limit != int(limit))):
            raise UserError(f"--limit must be a number of documents, or a share below 1, not {limit}")
        chosen["limit"] = int(limit) if limit is not None and limit >= 1 else limit
        return cls(**{**chosen, "tasks": tuple(chosen["tasks"]), "include_path": tuple(chosen["include_path"] or ())})


def run_tasks(
    request: Request, folders: Sequence[Path], config: Config, options: argparse.Namespace, output: Path
) -> None:
    """Run the tasks on every checkpoint; write what is known after each, and print the table. Raises UserError."""
    _require_harness()
    checkpoints: list[dict[str, Any]] = []
    first: Config | None = None
    for folder in folders:
        model, saved = load(folder, config, options, check=len(folders) == 1)
        first = first or saved
        # Where the configuration is the first checkpoint's own, the others' tokenizers are theirs.
        named = saved if options.own and config.tokenizer == first.tokenizer else config
        tokenizer = load_tokenizer(named, saved, model.settings.padded_vocab_size)
        origin = {
            "checkpoint": str(folder),
            "iteration": iteration_of(chosen_step(folder, config, options)),
            "pos_emb": saved.model.pos_emb,
            "seed": saved.training.seed,
            "train_length": saved.model.seq_length,
            "precision": options.precision,
        }
        print(f"{folder}, {saved.model.pos_emb}, trained at {saved.model.seq_length:,} tokens:", flush=True)
        found = evaluate_tasks(
            model, tokenizer, request, train_length=saved.model.seq_length, seed=saved.training.seed, report=_say
        )
        checkpoints.append({**origin, **found})
        path = write_tasks(request, checkpoints, output)
        del model  # before the next one is loaded
    print_tasks(checkpoints)
    print(path, flush=True)


def _say(line: str) -> None:
    print(line, flush=True)


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    request: Request,
    *,
    train_length: int,
    seed: int = 1234,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run tasks on one model of this project; returns the harness's results and, under `lengths`, what was read.

    Raises UserError where the harness is not installed, a task is not known or cannot be had, or a text is longer than
    the positional method knows.
    """
    _require_harness()
    with _installed_packages_first():
        from lm_eval.evaluator import simple_evaluate

        from megatron.evaluation.harness import HarnessModel

        manager, names = _find(request)
        adapted = HarnessModel(
            model,
            tokenizer,
            max_length=request.max_length,
            rolling_length=ROLLING * train_length,
            seed=seed,
            report=report,
        )
        try:
            results = simple_evaluate(
                adapted,
                tasks=names,
                num_fewshot=request.num_fewshot,
                limit=request.limit,
                task_manager=manager,
                log_samples=False,
            )
        except UserError:
            raise
        except (OSError, ValueError, KeyError, ImportError) as error:
            # Task files and data sets fail in ways of their own; the harness's message is the best there is.
            raise UserError(
                f"eval_tasks {' '.join(request.tasks)}: {type(error).__name__}: {str(error).strip()}. Without a "
                "network only tasks on local files run; see docs/evaluation.md"
            ) from error
    lengths = {kind: dataclasses.asdict(length) for kind, length in adapted.lengths.items()}
    return {"lengths": lengths, **{key: results[key] for key in KEPT if key in results}}


def _require_harness() -> None:
    try:
        import lm_eval.api.model  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"eval_tasks: lm-evaluation-harness cannot be imported ({error}): pip install -r requirements/eval.txt"
        ) from error


def _find(request: Request) -> tuple[Any, list[str]]:
    """The harness's task manager and the names of the tasks, patterns resolved."""
    from lm_eval.tasks import TaskManager

    folders = list(request.include_path)
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"--include-path {folder}: no such folder")
    wanted = list(request.tasks)
    if folders:
        manager = TaskManager(include_path=folders, include_defaults=False)
        if set(wanted) <= set(manager.all_subtasks):  # reading the harness's own fourteen thousand takes seconds
            return manager, wanted
    manager = TaskManager(include_path=folders or None)
    names = []
    for name in wanted:
        found = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not found:
            import difflib

            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise UserError(
                f"eval_tasks: lm-evaluation-harness has no task {name!r}{hint}; --include-path DIR adds task files"
            )
        names += found
    return manager, names


@contextmanager
def _installed_packages_first() -> Iterator[None]:
    """Tasks import Hugging Face's package `evaluate`; where evaluate.py was started, Python would find that instead."""
    here, before = Path(__file__).resolve().parents[2], sys.path[:]
    sys.path.sort(key=lambda entry: Path(entry).resolve() == here)
    try:
        yield
    finally:
        sys.path[:] = before


# -- report -----------------------------------------------------------------------------------------------------------


def write_tasks(request: Request, checkpoints: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Write `tasks.json`: the request, and for each checkpoint what `evaluate_tasks` returned with its origin."""
    import lm_eval

    content = {**dataclasses.asdict(request), "lm_eval": lm_eval.__version__, "checkpoints": list(checkpoints)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the results to {folder}: {error.strerror or error}") from error
    path = folder / RESULTS
    write_atomically(path, (json.dumps(content, indent=1, default=str) + "\n").encode())
    return path


COLUMNS = ("checkpoint", "method", "task", "n-shot", "filter", "metric", "value", "± error")


def print_tasks(checkpoints: Sequence[dict[str, Any]], console: Console | None = None) -> None:
    """The table on the screen: a line per checkpoint, task and metric."""
    lines = [line for found in checkpoints for line in _lines(found)]
    # A column is shown where its lines differ: most tasks have no filters, and most checkpoints are told by the method.
    methods = [found["pos_emb"] for found in checkpoints]
    told = {"checkpoint": len(set(methods)) < len(methods), "filter": {line["filter"] for line in lines} != {"none"}}
    titles = [name for name in COLUMNS if told.get(name, True)]
    cells = [[line[name] for name in titles] for line in lines]
    table = compact_table("Tasks", titles, cells, len(titles) - 2)
    for line in cells:
        table.add_row(*line)
    (console or standard_output()).print(table, crop=False)


def _lines(found: dict[str, Any]) -> Iterator[dict[str, str]]:
    """By column, the lines of one checkpoint."""
    for task, values in {**found["results"], **found.get("groups", {})}.items():
        for metric, name, value, error in _metrics(values):
            better = found.get("higher_is_better", {}).get(task, {}).get(metric)
            where = (found["checkpoint"], found["pos_emb"], values.get("alias", task))
            shots = str(found.get("n-shot", {}).get(task, ""))
            arrow = {True: " ↑", False: " ↓"}.get(better, "")
            yield dict(zip(COLUMNS, (*where, shots, name, metric + arrow, value, error), strict=True))


def _metrics(values: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(metric, filter, value, standard error) of one task; the harness keys them `metric,filter`."""
    for key, value in values.items():
        metric, comma, name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = values.get(f"{metric}_stderr,{name}")
        yield metric, name, _number(value), _number(error)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4e}"
    return "" if value in (None, "N/A") else str(value)
