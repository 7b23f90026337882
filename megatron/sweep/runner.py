"""Trains and evaluates the unfinished runs of a sweep in processes, on a pool of devices.

Several sweep processes, also on several hosts, can share an output folder: before a process works
on a run, it claims the run with a lock in its folder. If a sweep process dies, its training
processes save and exit. The sweep process that claims such a run next waits until they have exited.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console

from megatron.evaluation.records import has_results
from megatron.sweep.planning import State, Status, SweepRun
from megatron.utils.errors import UserError
from megatron.utils.processes import Lock, LockBusyError, available_cores, signal_without_parent
from megatron.utils.progress import Progress, readable_time

OUTPUT = "output.log"
CLAIM = "claim.lock"
# The task of a run whose files the sweep cannot read or write before it starts a process.
PREPARATION = "preparation"
# Environment variable of all processes of a run: the folder of the run.
RUN_VARIABLE = "SWEEP_RUN"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: a batch system's warning
POLL_INTERVAL = 0.2  # seconds
REFRESH_INTERVAL = 2.0  # seconds between reads of the training logs
LOG_LINES = 12  # shown of a process that failed
LOG_INTERVAL = 60.0  # seconds between progress lines if there is no terminal
# In the progress, an evaluation counts as this share of the run's training steps.
EVALUATION_SHARE = 0.1


@dataclass
class Job:
    """A run in progress, the lock that claims it, and the devices it occupies."""

    run: SweepRun
    claim: Lock
    devices: list[str]
    task: str = "waiting"
    process: subprocess.Popen[bytes] | None = None
    signals_sent: int = 0
    started_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Failure:
    """A run that failed: in which task, how, and the log of the process that failed. Without a log,
    the error is that of the sweep, which cannot read or write the run's files.
    """

    run: SweepRun
    task: str
    error: str
    log: Path | None = None


class Display:
    """Progress of a sweep: a line that changes on a terminal, lines elsewhere. A context manager.

    The percentage counts training steps, and the evaluation of a run as `EVALUATION_SHARE` of its
    steps. The time left is estimated from the pace so far.
    """

    def __init__(self, runs: Sequence[SweepRun], statuses: Sequence[Status], console: Console):
        self._total = len(runs)
        self._finished = sum(status.state is State.FINISHED for status in statuses)
        self._failed = 0
        self._refreshed_at = time.monotonic()

        # The work of each run, in steps. An evaluation is a share of them.
        self._steps_left: dict[str, int] = {}
        self._work: dict[str, float] = {}
        for run, status in zip(runs, statuses, strict=True):
            self._steps_left[run.name] = self._work[run.name] = status.steps_left
            if status.state is not State.FINISHED:
                self._work[run.name] += EVALUATION_SHARE * run.steps
        self._done = dict.fromkeys(self._work, 0.0)
        total = sum(self._work.values())
        self.progress = Progress("sweep", total, log_interval=LOG_INTERVAL, console=console)

    def finished(self, run: SweepRun, how: str) -> None:
        self._finished += 1
        self._done[run.name] = self._work[run.name]
        self.progress.print(f"[{self._counts()}] {run.name}: finished {how}")

    def failed(self, failure: Failure) -> None:
        self._failed += 1
        self._done[failure.run.name] = self._work[failure.run.name]
        text = (
            f"[{self._counts()}] {failure.run.name}: FAILED in {failure.task} ({failure.error}); "
            "the sweep continues"
        )
        if failure.log is None:
            self.progress.print(text)
            return
        self.progress.print(f"{text}. The last lines of {failure.log}:")
        for line in last_lines(failure.log):
            self.progress.print(f"    {line}")

    def update(self, jobs: Sequence[Job]) -> None:
        """Show the progress of the running jobs, at most every `REFRESH_INTERVAL`."""
        now = time.monotonic()
        if now - self._refreshed_at < REFRESH_INTERVAL:
            return
        self._refreshed_at = now
        texts = []
        for job in jobs:
            run, text = job.run, f"{job.run.name} {job.task}"
            steps_left = self._steps_left[run.name]
            if job.task == "training":
                # Steps before this sweep started took none of its time.
                iteration = run.logged_iteration()
                trained = iteration - (run.steps - steps_left)
                self._done[run.name] = min(max(trained, 0), steps_left)
                text += f" ({iteration:,}/{run.steps:,})"
            elif job.task == "evaluation":
                self._done[run.name] = steps_left
            texts.append(text)
        self.progress.update(
            sum(self._done.values()), f"{self._counts()} runs finished | {', '.join(texts)}"
        )

    def _counts(self) -> str:
        counts = f"{self._finished}/{self._total}"
        if self._failed:
            counts += f", {self._failed} failed"
        return counts


class Runner:
    """Trains and evaluates runs.

    Args:
        kerple: the command `kerple`, as a list of words.
        devices: GPU indices; on a CPU, one empty string per parallel run.
    """

    def __init__(self, kerple: Sequence[str], devices: Sequence[str], display: Display):
        self._kerple = list(kerple)
        self._free_devices = list(devices)
        self._display = display
        self._jobs: list[Job] = []
        self._signals: list[int] = []
        self.failures: list[Failure] = []
        # CPU runs in parallel share the cores; with a thread per core each, they would slow each
        # other down.
        self._threads: int | None = None
        if len(devices) > 1 and not devices[0] and "OMP_NUM_THREADS" not in os.environ:
            self._threads = max(1, available_cores() // len(devices))
            display.progress.print(
                f"{self._threads} thread(s) per run (OMP_NUM_THREADS is not set)"
            )

    def run(self, runs: Sequence[SweepRun]) -> tuple[int | None, list[str]]:
        """Train and evaluate the unfinished `runs` that no other sweep process works on. `failures`
        lists those that failed here.

        After the first of STOP_SIGNALS, training processes save and exit, and this waits for them.
        The second signal kills them.

        Returns:
            the signal that stopped the sweep or None, and why runs that other processes work on
            were left out.
        """
        waiting = list(runs)
        claimed_elsewhere = dict[str, str]()
        by_name = {run.name: run for run in runs}
        has_worked = False
        failed_before = {run.name: run.failed_at() for run in runs}
        previous = {number: signal.signal(number, self._handle_signal) for number in STOP_SIGNALS}
        try:
            while self._jobs or (waiting and not self._signals):
                # Start as many runs as there are devices. On a CPU, their names are empty.
                while waiting and not self._signals:
                    count = 1
                    if any(self._free_devices):
                        count = waiting[0].num_gpus
                    if len(self._free_devices) < count:
                        break
                    run = waiting.pop(0)
                    try:
                        has_worked |= self._claim(run, count, failed_before[run.name])
                    except LockBusyError as error:
                        claimed_elsewhere[run.name] = str(error)
                    except UserError as error:
                        self._fail(Failure(run, PREPARATION, str(error)))

                # Look at those that run.
                for job in list(self._jobs):
                    self._advance(job)
                self._display.update(self._jobs)
                time.sleep(POLL_INTERVAL)
                if has_worked and not self._jobs and not waiting:
                    # Some of the other processes may have died in the meantime: try the runs that
                    # they had claimed.
                    waiting = [by_name[name] for name in claimed_elsewhere]
                    has_worked = False
                    claimed_elsewhere.clear()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        first_signal = next(iter(self._signals), None)
        return first_signal, list(claimed_elsewhere.values())

    def _claim(self, run: SweepRun, num_devices: int, failed_before: int | None) -> bool:
        """Claim a run and make it a job. Returns False if another process has finished it, or tried
        it and failed.

        Raises:
            LockBusyError: another process is working on it.
            UserError: its folder contains a run with another configuration, or damaged files.
        """
        claim = Lock(run.folder / CLAIM, f"{run.name}: another sweep process is working on it")
        claim.acquire()
        try:
            # A process with another sweep file may have written to it after the plan was made.
            run.check_folder()
            finished = run.status().state is State.FINISHED
        except UserError:
            claim.release()
            raise
        if finished:
            self._display.finished(run, "by another sweep process")
            claim.release()
            return False
        if run.failed_at() not in (None, failed_before):
            self._display.progress.print(
                f"{run.name}: failed in another sweep process; see {run.folder / OUTPUT}"
            )
            claim.release()
            return False
        run.forget_failure()
        devices = self._free_devices[:num_devices]
        self._free_devices = self._free_devices[num_devices:]
        self._jobs.append(Job(run, claim, devices))
        if pids := find_processes(run.folder):
            self._display.progress.print(
                f"{run.name}: processes of an earlier sweep are still running "
                f"({', '.join(map(str, pids))}); waiting for them to exit"
            )
        return True

    def _advance(self, job: Job) -> None:
        """Start the next process of a job, forward a signal to its process, or handle its exit."""
        if job.process is None:
            if self._signals:
                self._remove(job)
            elif not find_processes(job.run.folder):
                try:
                    self._start(job)
                except UserError as error:
                    self._fail(Failure(job.run, PREPARATION, str(error)))
                    self._remove(job)
            return
        exit_status = job.process.poll()
        if exit_status is None:
            # Signals are forwarded here, not in the handler, so one that arrives while a process
            # starts reaches it too. The launcher kills its processes at the second one.
            if job.signals_sent < len(self._signals):
                job.process.send_signal(signal.SIGTERM)
                job.signals_sent += 1
            return
        job.process = None
        # A training that was asked to stop exits with 0 before its last iteration.
        if self._signals:
            self._remove(job)
            return
        try:
            failure = self._handle_exit(job, exit_status)
        except UserError as error:
            failure = Failure(job.run, job.task, str(error))
        if failure is not None:
            self._fail(failure)
            self._remove(job)

    def _handle_exit(self, job: Job, exit_status: int) -> Failure | None:
        """Record that the last process of a job has succeeded, and remove the job if its run is
        finished; or record and return its failure. Raises UserError if the run's files are damaged
        or cannot be written.
        """
        # A process can exit with 0 without its result.
        run = job.run
        has_succeeded = exit_status == 0
        if has_succeeded and job.task == "training":
            has_succeeded = run.is_trained()
        elif has_succeeded:
            has_succeeded = has_results(run.results)
        if has_succeeded:
            if job.task == "evaluation":
                run.mark_evaluated()
            if run.status().state is State.FINISHED:
                seconds = time.monotonic() - job.started_at
                self._display.finished(run, f"in {readable_time(seconds)}")
                self._remove(job)
            return None
        run.mark_failed(job.task, exit_status)
        return Failure(run, job.task, f"exit status {exit_status}", run.folder / OUTPUT)

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        self._display.failed(failure)

    def _start(self, job: Job) -> None:
        run = job.run
        config = str(run.write_config())
        if run.is_trained():
            job.task = "evaluation"
            command = [*self._kerple, "evaluate", config, "--output", str(run.results), "--replace"]
            # The sweep has checked that another run supports the mode.
            command.append("--skip-unsupported")
            command += run.start_evaluation()
        else:
            job.task = "training"
            command = [*self._kerple, "train", config]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if job.devices[0]:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(job.devices)
        if self._threads is not None:
            environment["OMP_NUM_THREADS"] = str(self._threads)
        job.process = start_process(command, run.folder, environment, run.folder / OUTPUT)

    def _remove(self, job: Job) -> None:
        self._jobs.remove(job)
        self._free_devices += job.devices
        job.claim.release()

    def _handle_signal(self, number: int, _frame: object) -> None:
        self._signals.append(number)
        line = "killing the runs"
        if len(self._signals) == 1:
            line = "stopping: the runs save and exit; repeat the signal to kill them"
        self._display.progress.print(line)


def start_process(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a process of the run in `folder`, in its own session, appending its output to `log`.

    On Linux it receives SIGTERM when this process dies. The launcher forwards it to the training
    processes, which save and exit.
    """
    with open(log, "ab") as stream:
        return subprocess.Popen(
            command,
            env={**environment, RUN_VARIABLE: str(folder.resolve())},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=signal_without_parent(signal.SIGTERM),
        )


def find_processes(folder: Path) -> list[int]:
    """Ids of the running processes of the run in `folder`: those of an earlier sweep that died."""
    value = str(folder.resolve())
    pids = []
    for process in psutil.process_iter():
        try:
            if (
                process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(RUN_VARIABLE) == value
            ):
                pids.append(process.pid)
        except (psutil.Error, OSError):
            continue  # it has exited, or belongs to another user
    return pids


def last_lines(log: Path) -> list[str]:
    """The last LOG_LINES non-empty lines of a log, without what was overwritten."""
    try:
        with open(log, "rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 65_536))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
    return [line for line in lines if line][-LOG_LINES:]
