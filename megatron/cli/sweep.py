"""`kerple sweep`: trains, evaluates and reports a sweep."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.cli.evaluation_options import check_modes, check_run
from megatron.config import UserError
from megatron.evaluation.records import read_results
from megatron.launcher.resources import visible_gpus
from megatron.sweep.definition import Sweep, read_sweep
from megatron.sweep.planning import State, Status, SweepRun, missing_data, plan, select
from megatron.sweep.runner import Display, Runner
from megatron.utils.command_line import OptionParser, integer
from megatron.utils.files import check_writable
from megatron.utils.processes import Lock
from megatron.utils.ranks import Report

# The command `kerple` of this installation or checkout.
KERPLE = [sys.executable, str(Path(__file__).resolve().parents[2] / "kerple_command.py")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sweep, or show its plan.

    Returns 1 if a run failed in this process, 128 + N if signal N stopped the sweep, and 0
    otherwise: all selected runs are finished, or other sweep processes work on them or have failed
    in them. Raises UserError before anything is started if options or the sweep file are invalid,
    or the file contradicts the contents of its output folder.
    """
    # Options.
    parser = OptionParser(
        description="Train and evaluate the unfinished runs of a sweep, and write its report."
    )
    parser.add_argument(
        "sweep", metavar="SWEEP.yml", help="the sweep file (see docs/experiments.md)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show the unfinished work, try one step of each model, and exit",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="only runs whose name matches a pattern, such as 'github/*/1235'",
    )
    parser.add_argument(
        "--jobs",
        type=integer(1, 1024),
        metavar="N",
        help="number of parallel runs on a CPU (default: 1)",
    )

    # The runs, and checks of all their evaluations before any training.
    options = parser.parse_args(argv)
    console = Console(soft_wrap=True)
    sweep = read_sweep(options.sweep)
    all_runs = plan(sweep)
    runs = select(all_runs, options.only)
    for run in runs:
        place = f"{sweep.path}: evaluation of run {run.name}"
        has_data = not missing_data([run])
        for words in run.evaluation:
            check_run(words, run.config, place, has_data=has_data)
    for words in sweep.evaluation:
        check_modes(words, [run.config for run in all_runs], f"{sweep.path}: evaluation")

    # A plan does not need the data, which another machine may have.
    missing = missing_data(runs)
    devices = _select_devices(options.jobs, runs)
    if options.dry_run:
        for prefix in missing:
            console.print(
                f"missing: {prefix}.idx (create it with prepare_data.py)",
                highlight=False,
                markup=False,
            )
        _print_plan(console, sweep, runs)
        _try_models(runs)
        return 0

    # What would fail after the training.
    if missing:
        raise UserError(
            f"{sweep.path}: {missing[0]}.idx does not exist; create it with prepare_data.py first"
        )
    check_writable(sweep.output, f"{sweep.path}: output")
    # If a package is missing, fail now and not after the training.
    importlib.import_module("megatron.reporting.report")
    return _run(console, sweep, all_runs, runs, devices)


def _try_models(runs: Sequence[SweepRun]) -> None:
    """A trial step of each different model in its dtype. Raises UserError."""
    from megatron.training.startup import try_model  # imports DeepSpeed

    models = {(run.config.model.model_dump_json(), run.config.precision.dtype): run for run in runs}
    for run in models.values():
        try_model(run.config, f"run {run.name}")


def _select_devices(jobs: int | None, runs: Sequence[SweepRun]) -> list[str]:
    """GPU indices; on a CPU, one empty string per parallel run."""
    devices = list(map(str, visible_gpus() or ()))
    if jobs is not None and devices:
        raise UserError(
            f"--jobs is for CPUs, but this machine has GPUs ({' '.join(devices)}); select them "
            "with CUDA_VISIBLE_DEVICES"
        )
    if not devices:
        return [""] * (jobs or 1)
    for run in runs:
        if run.num_gpus > len(devices):
            raise UserError(
                f"run {run.name} requires {run.num_gpus} GPUs (num_gpus), but only {len(devices)} "
                "are available"
            )
    return devices


def _run(
    console: Console,
    sweep: Sweep,
    all_runs: Sequence[SweepRun],
    runs: Sequence[SweepRun],
    devices: Sequence[str],
) -> int:
    """Run the selected `runs` and report on all runs of the sweep. Returns the exit status."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    # The runner reports damaged files of a run.
    statuses, unfinished = [], []
    for run in runs:
        try:
            status = run.status()
        except UserError:
            status = Status(State.TRAIN, 0, run.steps)
        statuses.append(status)
        if status.state is not State.FINISHED:
            unfinished.append(run)
    say(f"{sweep.title}: {len(runs)} runs, {len(runs) - len(unfinished)} of them already finished")
    display = Display(runs, statuses, console)
    with display.progress:
        runner = Runner(KERPLE, devices, display)
        stopped_by, claimed_elsewhere = runner.run(unfinished)
    for failure in runner.failures:
        say(f"failed: {failure.run.name} in {failure.task}: {failure.log or failure.error}")
    _report(sweep, all_runs, say)
    for reason in claimed_elsewhere:
        say(reason)
    if stopped_by is not None:
        say("stopped; run the same command again to resume")
        return 128 + stopped_by
    if claimed_elsewhere:
        say(
            f"{len(claimed_elsewhere)} runs are left to other sweep processes; the last one "
            "reports on all runs"
        )
    return int(bool(runner.failures))


def _report(sweep: Sweep, runs: Sequence[SweepRun], say: Report) -> None:
    """Write the report of the finished runs, after another process that is writing it."""
    from megatron.plots.checkpoints import add_weight_figures
    from megatron.reporting.report import Sources, write_report

    busy = f"{sweep.output}: another sweep process is writing the report"
    lock = Lock(sweep.output / "report.lock", busy)
    lock.acquire(timeout=-1)
    try:
        # Runs of other configurations in the folder are left out.
        finished = []
        for run in runs:
            try:
                run.check_folder()
                if run.status().state is State.FINISHED:
                    finished.append(run)
            except UserError as error:
                say(f"note: run {run.name} is not in the report: {error}")
        if finished:
            sources = Sources(read_results(run.results for run in finished))
            add_weight_figures(sources)
            report = write_report(sources, sweep.output / "report", sweep.title)
            for note in sources.notes:
                say(f"note: {note}")
            say(f"report of {len(finished)} of {len(runs)} runs: {report}")
    finally:
        lock.release()


def _print_plan(console: Console, sweep: Sweep, runs: Sequence[SweepRun]) -> None:
    title = Text(f"{sweep.title}: {len(runs)} runs in {sweep.output}")
    table = Table(title=title, title_justify="left")
    table.add_column("run")
    table.add_column("state")
    table.add_column("steps left", justify="right")
    table.add_column("tokens left", justify="right")

    # A damaged run has its error as the state.
    total_steps = total_tokens = 0
    for run in runs:
        try:
            status = run.status()
        except UserError as error:
            table.add_row(run.name, Text(str(error)))
            continue
        state = status.state.value
        if status.state is State.RESUME:
            state += f" from {status.saved_iteration:,}"
        tokens = status.steps_left * run.tokens_per_step
        table.add_row(run.name, state, f"{status.steps_left:,}", f"{tokens:,}")
        total_steps += status.steps_left
        total_tokens += tokens
    table.add_section()
    table.add_row("total", "", f"{total_steps:,}", f"{total_tokens:,}")
    console.print(table)
    for words in sweep.evaluation:
        console.print(f"evaluation: {' '.join(words)}", highlight=False, markup=False)
