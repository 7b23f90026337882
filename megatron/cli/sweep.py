"""tools/sweep.py: from a sweep's file to its report."""

import argparse
import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron.cli.evaluate_options import check_options
from megatron.config import UserError
from megatron.config.option_parser import OptionParser
from megatron.evaluation.records import read_results
from megatron.reporting.report import Sources, write_report
from megatron.sweep.definition import Sweep, read_sweep
from megatron.sweep.planning import Run, State, missing_data, plan
from megatron.sweep.progress import SweepProgress
from megatron.sweep.runner import Runner
from megatron.utils.progress import readable_time

DESCRIPTION = "Train and evaluate what is missing of a sweep, and write its report."


def main(root: Path, argv: Sequence[str] | None = None) -> int:
    """Returns 0 when every run is finished, 1 when one has failed, 128 + N when signal N stopped it. Raises UserError
    before anything is started if the file, or what lies in its folder, is wrong.
    """
    options = _options(argv)
    console = Console(soft_wrap=True)
    sweep = read_sweep(options.sweep)
    check_options(sweep.evaluation, f"{sweep.path}: evaluation")
    runs = plan(sweep)
    devices = _devices(options, runs)
    missing = missing_data(runs)
    if options.dry_run:
        _show_plan(console, sweep, runs, devices, options.rate)
        for prefix in missing:
            console.print(f"missing: {prefix}.idx (prepare_data.py makes it)", highlight=False)
        return 0
    if missing:
        raise UserError(f"{sweep.path}: there is no {missing[0]}.idx: make the data with prepare_data.py first")
    with _only_one(sweep.output):
        return _work(console, root, sweep, runs, devices)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(prog="sweep.py", description=DESCRIPTION)
    parser.add_argument("sweep", metavar="SWEEP.yml", help="the file of the sweep (docs/experiments.md)")
    parser.add_argument("--dry-run", action="store_true", help="show what is left to do, and do nothing")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--devices", nargs="+", metavar="N", help="GPUs to use, by index, a run on each; default: all that are visible"
    )
    where.add_argument("--jobs", type=int, metavar="N", help="on the CPU: runs at once (default: 1)")
    parser.add_argument(
        "--rate", type=float, metavar="TOKENS/S", help="of training, for the estimate of --dry-run; default: as logged"
    )
    return parser.parse_args(argv)


def _devices(options: argparse.Namespace, runs: Sequence[Run]) -> list[str]:
    """GPU indices, or an empty text for every run that may go on at once on the CPU."""
    visible = _visible_gpus()
    if options.devices is not None:
        wrong = [device for device in options.devices if device not in visible]
        if wrong:
            there = " ".join(visible) or "none"
            raise UserError(f"--devices {' '.join(wrong)}: there is no such GPU; visible: {there}")
        visible = options.devices
    if options.jobs is not None:
        if visible:
            raise UserError(f"--jobs is for the CPU; there are GPUs ({' '.join(visible)}): choose them with --devices")
        if options.jobs < 1:
            raise UserError(f"--jobs must be at least 1, not {options.jobs}")
    if not visible:
        return [""] * (options.jobs or 1)
    large = next((run for run in runs if run.devices > len(visible)), None)
    if large is not None:
        raise UserError(f"run {large.name} takes {large.devices} GPUs (num_gpus), but there are {len(visible)}")
    return list(visible)


def _visible_gpus() -> list[str]:
    import torch

    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


@contextlib.contextmanager
def _only_one(output: Path) -> Iterator[None]:
    """Two sweeps in one folder would train the same runs at once. The lock ends with the process that holds it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        stream = open(output / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{output}: cannot be written to: {error.strerror}") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{output}: another sweep is at work there; wait for it, or stop it first") from None
        yield


def _work(console: Console, root: Path, sweep: Sweep, runs: Sequence[Run], devices: Sequence[str]) -> int:
    states = [run.state() for run in runs]
    finished = states.count(State.FINISHED)
    console.print(f"{sweep.title}: {len(runs)} runs, {finished} of them finished before", highlight=False, markup=False)
    with SweepProgress(runs, console) as progress:
        runner = Runner(root, devices, progress.listener)
        stopped = runner.run(runs)
    done = [run for run in runs if run.state() is State.FINISHED]
    if done:
        sources = Sources(read_results((run.results for run in done), strict=False))
        report = write_report(sources, sweep.output / "report", sweep.title)
        for note in sources.notes:
            console.print(f"note: {note}", highlight=False, markup=False)
        console.print(f"report of {len(done)} of {len(runs)} runs: {report}", highlight=False, markup=False)
    for failure in runner.failures:
        console.print(f"failed: {failure.run.name} at {failure.work}: {failure.log}", highlight=False, markup=False)
    if stopped is not None:
        console.print("stopped; the same command goes on from here", highlight=False)
        return 128 + stopped
    return 1 if runner.failures else 0


def _show_plan(console: Console, sweep: Sweep, runs: Sequence[Run], devices: Sequence[str], rate: float | None) -> None:
    table = Table(title=f"{sweep.title}: {len(runs)} runs in {sweep.output}", title_justify="left")
    for heading, justify in (("run", "left"), ("state", "left"), ("steps left", "right"), ("tokens left", "right")):
        table.add_column(heading, justify=justify)
    steps = tokens = 0
    for run in runs:
        state, left = run.state(), run.steps_left()
        at = f" from {run.saved():,}" if state is State.RESUME else ""
        table.add_row(run.name, state.value + at, f"{left:,}", f"{left * run.tokens_per_step:,}")
        steps, tokens = steps + left, tokens + left * run.tokens_per_step
    table.add_section()
    table.add_row("all", "", f"{steps:,}", f"{tokens:,}")
    console.print(table)
    console.print(f"evaluation: {' '.join(sweep.evaluation)}", highlight=False, markup=False)
    logged = [found for found in map(Run.rate, runs) if found]
    rate = rate or (sum(logged) / len(logged) if logged else None)
    at_once = len(devices)
    if devices[0]:
        at_once = max(1, at_once // max(run.devices for run in runs))
    where = f"{len(devices)} GPU(s)" if devices[0] else "the CPU"
    estimate = "time is not known before a run has logged its speed (or --rate)"
    if rate is not None:
        estimate = f"about {readable_time(tokens / rate / at_once)} of training at {rate:,.0f} tokens/s each"
    console.print(f"on {where}, {at_once} run(s) at once: {estimate}", highlight=False)
