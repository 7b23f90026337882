"""tools/chomsky.py: the benchmark from one command; results as table, JSON and picture."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron.chomsky.encoder import check_method
from megatron.chomsky.experiment import Run, Settings
from megatron.chomsky.report import Result, draw, markdown, rich_table
from megatron.chomsky.tasks import TASKS
from megatron.config.command_line import OptionParser, option_name
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

DESCRIPTION = "Train small transformers on the tasks of the Chomsky hierarchy, and test them on longer inputs."
METHODS = ("none", "sinusoidal", "rotary", "alibi", "kerple_log", "fire", "dape_kerple")
HELP = {
    "steps": "optimizer steps of each run",
    "batch": "samples in a batch",
    "learning_rate": "of Adam",
    "train_longest": "training inputs have 1 to so many tokens",
    "test_longest": "test inputs have more than train_longest, and up to so many",
    "test_every": "test every so many lengths",
    "test_samples": "samples at each test length",
    "num_layers": "of the encoder",
    "hidden_size": "of the encoder",
    "num_heads": "of the encoder",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Do the runs that are missing, then write `chomsky.{json,md,png}`. Raises UserError."""
    options = _parse(argv)
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    for name in options.methods:
        check_method(name)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options.output.mkdir(parents=True, exist_ok=True)
    results = _read(options.output / "chomsky.json", settings)
    wanted = [(task, method, seed) for task in options.tasks for method in options.methods for seed in options.seeds]
    done = {(one["task"], one["pos_emb"], one["seed"]) for one in results}
    missing = [run for run in wanted if run not in done]
    console = Console()
    console.print(f"{len(wanted)} runs on {device}, {len(wanted) - len(missing)} of them done before", highlight=False)
    for number, (task, method, seed) in enumerate(missing, 1):
        title = f"[{number}/{len(missing)}] {task}, {method}, seed {seed}"
        saved = options.output / "unfinished" / f"{task}-{method}-{seed}.pt"
        run = Run(task, method, seed, settings, device, saved)
        results.append(_perform(run, title, task, method, seed, console))
        _write(options.output, settings, results)
        run.discard()
    shown = [one for one in results if (one["task"], one["pos_emb"], one["seed"]) in set(wanted)]
    console.print(rich_table(shown))
    for path in _write(options.output, settings, results):
        console.print(str(path), highlight=False, soft_wrap=True)


def _perform(run: Run, title: str, task: str, method: str, seed: int, console: Console) -> Result:
    settings = run.settings
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )
    loss = float("nan")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        training = progress.add_task(title, total=settings.steps, completed=run.step, state="")

        def report(step: int, value: float) -> None:
            nonlocal loss
            loss = value
            progress.update(training, completed=step, state=f"loss {value:.4f}")

        run.train(report)
        testing = progress.add_task(f"{title}: test", total=len(settings.test_lengths), state="")
        accuracies = {}
        for length in settings.test_lengths:
            accuracies[str(length)] = run.accuracy(length)
            progress.update(testing, advance=1, state=f"length {length}")
    score = sum(accuracies.values()) / len(accuracies)
    trained = f"last loss {loss:.4f}, " if loss == loss else ""
    console.print(f"{title}: {trained}accuracy beyond length {settings.train_longest} {score:.1%}", markup=False)
    return Result(task=task, pos_emb=method, seed=seed, score=score, accuracies=accuracies)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=DESCRIPTION, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="POS_EMB", help="positional methods")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/chomsky"), metavar="DIR", help="folder of the results"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...; the GPU where there is one")
    sizes = parser.add_argument_group("training, testing and the model")
    for field in fields(Settings):
        sizes.add_argument(
            option_name(field.name),
            type=field.type,
            default=field.default,
            metavar="N",
            help=HELP[field.name],
        )
    return parser.parse_args(argv)


def _read(path: Path, settings: Settings) -> list[Result]:
    """The results of earlier commands. Raises UserError when they were made with other settings."""
    if not path.is_file():
        return []
    try:
        stored = json.loads(path.read_text())
        made_with, results = stored["settings"], stored["results"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no file of results ({error}); remove it, or give another --output") from error
    differing = [name for name, value in asdict(settings).items() if made_with.get(name) != value]
    if differing:
        changes = ", ".join(f"{name} {made_with.get(name)}, not {getattr(settings, name)}" for name in differing)
        raise UserError(f"{path} holds results of other settings ({changes}): give the same ones, or another --output")
    return results


def _write(folder: Path, settings: Settings, results: Sequence[Result]) -> list[Path]:
    contents = {
        "chomsky.json": json.dumps({"settings": asdict(settings), "results": results}, indent=1).encode() + b"\n",
        "chomsky.md": markdown(results, settings).encode(),
        "chomsky.png": draw(results, settings),
    }
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]
