"""`kerple chomsky`: run the Chomsky-hierarchy benchmark, or with --architecture decoder the length
tests of decoders, and write the results as JSON, tables and figure.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from kerple.positional import ModelShape, primary_names
from kerple.positional.registry import canonical_name
from megatron.chomsky.decoder import DecoderExperiment
from megatron.chomsky.encoder import ARCHITECTURES, build_methods
from megatron.chomsky.experiment import (
    DECODER,
    DECODER_SETTINGS,
    EncoderExperiment,
    Experiment,
    ExperimentSettings,
    Result,
    read_chomsky_results,
    write_chomsky_results,
)
from megatron.chomsky.length_tasks import LENGTH_TASKS
from megatron.chomsky.tasks import TASKS
from megatron.reporting.chomsky import chomsky_figure, chomsky_table
from megatron.reporting.length_tests import distance_table, length_figure, length_table
from megatron.reporting.style import render
from megatron.reporting.tables import markdown
from megatron.reporting.terminal import print_table
from megatron.utils.command_line import OptionParser, integer, number, option_name
from megatron.utils.environment import choose_device
from megatron.utils.errors import UserError
from megatron.utils.files import check_writable, write_atomically
from megatron.utils.processes import Lock
from megatron.utils.progress import Progress

DESCRIPTION = (
    "Train small transformers on the tasks of the Chomsky hierarchy, or decoders on recall tasks "
    "(--architecture decoder), and test them on longer inputs."
)
METHODS = ("none", "sinusoidal", "rotary", "alibi", "kerple_log", "fire", "dape_kerple")
SETTINGS_HELP = {
    "steps": "optimizer steps per experiment",
    "batch": "samples per batch",
    "learning_rate": "learning rate of Adam",
    "train_longest": "longest training input, in tokens",
    "test_longest": "longest test input, in tokens",
    "test_every": "test every N-th length above train_longest; 0: train_longest and its doublings",
    "test_samples": "samples per test length",
    "num_layers": "layers of the model",
    "hidden_size": "hidden size of the model",
    "num_heads": "attention heads of the model",
    "architecture": "pre-norm; original: the benchmark's own layers, for comparisons with "
    "published numbers; or decoder: this project's GPT on the recall tasks",
}

_TYPES: dict[str, Callable[[str], Any]] = {
    "architecture": str,
    "learning_rate": number(0, 1e6, above=True),
    "batch": integer(1, 2**20),
    "test_every": integer(0, 10**9),
    "test_longest": integer(1, 2**16),
    "test_samples": integer(1, 2**20),
    "num_layers": integer(1, 1000),
    "hidden_size": integer(1, 2**16),
    "num_heads": integer(1, 2**16),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the experiments without results, then write `chomsky.json`, `chomsky.md` and
    `chomsky.png`.

    Raises UserError.
    """
    options = _parse(argv)
    check_writable(options.output, "--output")
    busy_message = (
        f"{options.output}: another process is using this folder; wait until it ends, or choose "
        "another --output"
    )
    with Lock(options.output / "chomsky.lock", busy_message):
        _run_experiments(options)


def _run_experiments(options: argparse.Namespace) -> None:
    # Check the methods and the device before the first experiment.
    settings = options.settings
    head_size = settings.hidden_size // settings.num_heads
    shape = ModelShape(
        settings.num_heads,
        head_size,
        settings.hidden_size,
        settings.num_layers,
        settings.test_longest,
    )
    for name in options.methods:
        build_methods(name, shape)
    device = choose_device(options.device)

    # Experiments in chomsky.json are not run again.
    path = options.output / "chomsky.json"
    results = read_chomsky_results(path, settings)
    keys = itertools.product(options.tasks, options.methods, options.seeds)
    requested = list(dict.fromkeys(keys))
    finished = {_key(result) for result in results}
    missing = [key for key in requested if key not in finished]
    console = Console(soft_wrap=True)
    console.print(
        f"{len(requested)} experiments on {device}, {len(requested) - len(missing)} of them "
        "already finished",
        highlight=False,
    )

    # Decoders have experiments, tables and a figure of their own.
    kind: type[Experiment] = EncoderExperiment
    tables, draw = [chomsky_table], chomsky_figure
    if settings.architecture == DECODER:
        kind, tables, draw = DecoderExperiment, [length_table, distance_table], length_figure

    # Save each result, so that an interruption loses only one experiment.
    for index, (task, method, seed) in enumerate(missing, start=1):
        title = f"[{index}/{len(missing)}] {task}, {method}, seed {seed}"
        experiment = kind(task, method, seed, settings, device)
        results.append(_run(experiment, title, console))
        write_chomsky_results(path, settings, results)

    # Tables of the requested experiments.
    shown = [result for result in results if _key(result) in requested]
    for table in tables:
        print_table(console, table(shown, settings))

    # Files with all results. Without new experiments, the first is written only here.
    write_chomsky_results(path, settings, results)
    texts = [markdown(table(results, settings), heading="#") for table in tables]
    write_atomically(options.output / "chomsky.md", "\n".join(texts).encode())
    write_atomically(options.output / "chomsky.png", render(partial(draw, results, settings)))
    for name in ("chomsky.json", "chomsky.md", "chomsky.png"):
        console.print(str(options.output / name), highlight=False)


def _key(result: Result) -> tuple[str, str, int]:
    """What identifies an experiment."""
    return result["task"], result["pos_emb"], result["seed"]


def _run(experiment: Experiment, title: str, console: Console) -> Result:
    """Train and test with a progress line, then print the result."""
    settings = experiment.settings
    loss_text = ""
    progress = Progress(title, settings.steps, unit="steps", log_interval=60.0, console=console)
    with progress as display:

        def report_loss(step: int, loss: float) -> None:
            nonlocal loss_text
            loss_text = f"loss {loss:.4f}"
            display.update(step, loss_text)

        experiment.train(report_loss)
    lengths = len(settings.test_lengths)
    with Progress(f"{title}: test", lengths, log_interval=None, console=console) as display:
        result = experiment.test(lambda tested, length: display.update(tested, f"length {length}"))
    trained = result["accuracies"].get(str(settings.train_longest))
    parts = [loss_text, f"accuracy beyond length {settings.train_longest} {result['score']:.1%}"]
    if trained is not None:
        parts.append(f"at it {trained:.1%}")
    console.print(f"{title}: {', '.join(filter(None, parts))}", markup=False)
    return result


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    # Options of the run.
    parser = OptionParser(description=DESCRIPTION)
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=[*TASKS, *LENGTH_TASKS],
        metavar="TASK",
        help=f"tasks to run (default: all: {', '.join(TASKS)}; of decoders: "
        f"{', '.join(LENGTH_TASKS)})",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=METHODS,
        metavar="POS_EMB",
        help=f"positional methods, or all (default: {' '.join(METHODS)})",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=integer(0, 2**32 - 1),
        default=[0],
        metavar="N",
        help="random seeds (default: 0)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the results (default: runs/chomsky; of decoders: runs/lengths)",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if available)")

    # Settings, whose defaults depend on the architecture.
    group = parser.add_argument_group("training, testing and the model")
    defaults = ExperimentSettings()
    for field in fields(ExperimentSettings):
        default, of_decoders = field.default, getattr(DECODER_SETTINGS, field.name)
        text, choices, metavar = SETTINGS_HELP[field.name], None, "N"
        if field.name == "architecture":
            choices, metavar = (*ARCHITECTURES, DECODER), "NAME"
        else:
            default = f"{default}; of decoders: {of_decoders}"
        group.add_argument(
            option_name(field.name),
            type=_TYPES.get(field.name, integer(1, 10**9)),
            help=f"{text} (default: {default})",
            choices=choices,
            metavar=metavar,
        )

    # The defaults of the architecture, and the values given.
    options = parser.parse_args(argv)
    settings, output = defaults, "runs/chomsky"
    if options.architecture == DECODER:
        settings, output = DECODER_SETTINGS, "runs/lengths"
    given = {}
    for name in SETTINGS_HELP:
        value = getattr(options, name)
        if value is not None:
            given[name] = value
    options.settings = settings = replace(settings, **given)
    options.output = options.output or Path(output)

    # Tasks depend on the architecture, and some have a shortest input.
    options.tasks = options.tasks or list(settings.tasks)
    for task in options.tasks:
        if task not in settings.tasks:
            choice = f"--architecture {DECODER}"
            if task in TASKS:
                choice = f"one of {', '.join(settings.tasks)}"
            raise UserError(
                f"--tasks {task}: not a task of --architecture {settings.architecture}; choose "
                f"{choice}"
            )
        shortest = LENGTH_TASKS[task].shortest if task in LENGTH_TASKS else 1
        if settings.train_longest < shortest:
            raise UserError(
                f"--train-longest {settings.train_longest}: the shortest input of {task} has "
                f"{shortest} tokens; choose a larger value, or leave out the task"
            )
    if options.methods == ["all"]:
        options.methods = primary_names()
    options.methods = list(map(canonical_name, options.methods))
    return options
