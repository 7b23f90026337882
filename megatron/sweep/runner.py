"""Doing what a plan leaves to do: runs on a pool of devices, one after the other where there is one device."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.sweep.planning import Run, State
from megatron.sweep.processes import last_lines, left_over, start

STOPPING = (signal.SIGINT, signal.SIGTERM)
PAUSE = 0.2
OUTPUT = "output.log"


@dataclass(frozen=True)
class Failure:
    """A run that did not end well: at what, with which exit status, and the end of what it printed."""

    run: Run
    work: str
    status: int
    lines: list[str]
    log: Path


@dataclass
class Job:
    """A run being worked on, and the devices it holds."""

    run: Run
    devices: list[str]
    work: str = "waiting"
    process: subprocess.Popen | None = None
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Listener:
    """What the runner tells as it goes: free text, a finished run, a failure, and, several times a second, the jobs."""

    say: Callable[[str], None]
    finished: Callable[[Run, float], None]
    failed: Callable[[Failure], None]
    tick: Callable[[Sequence[Job]], None]


class Runner:
    """Train and evaluate runs; `devices` are GPU indices, or as many empty texts as runs may go on at once on the CPU.

    root: the folder of deepy.py and evaluate.py.
    """

    def __init__(self, root: Path, devices: Sequence[str], listener: Listener):
        self._root = root
        self._free = list(devices)
        self._listener = listener
        self._jobs: list[Job] = []
        self._received: list[int] = []
        self.failures: list[Failure] = []

    def run(self, runs: Sequence[Run]) -> int | None:
        """Work until nothing is left; the failures are in `failures`. Returns the signal that stopped it, or None.

        A first SIGINT or SIGTERM asks the runs to save and exit, and waits for it; the next one kills them.
        """
        waiting = [run for run in runs if run.state() is not State.FINISHED]
        earlier = {number: signal.signal(number, self._stop) for number in STOPPING}
        try:
            while self._jobs or (waiting and not self._received):
                if not self._received:
                    self._start_what_fits(waiting)
                for job in list(self._jobs):
                    self._advance(job)
                self._listener.tick(self._jobs)
                time.sleep(PAUSE)
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
        return self._received[0] if self._received else None

    def _start_what_fits(self, waiting: list[Run]) -> None:
        while waiting and waiting[0].devices_of(self._free) is not None:
            run = waiting.pop(0)
            taken = run.devices_of(self._free)
            self._free = [device for place, device in enumerate(self._free) if place >= len(taken)]
            job = Job(run, taken)
            self._jobs.append(job)
            there = left_over(run.folder)
            if there:
                self._listener.say(
                    f"{run.name}: processes of an earlier sweep still work on it ({', '.join(map(str, there))}); "
                    "waiting for them to end"
                )

    def _advance(self, job: Job) -> None:
        """Start the job's next process when it has none; when its process has ended, see how."""
        if job.process is None:
            if self._received:
                self._end(job)
            elif not left_over(job.run.folder):
                self._start(job)
            return
        status = job.process.poll()
        if status is None:
            return
        job.process = None
        # Asked to stop, a training saves and ends with status 0, before its last step.
        if self._received:
            self._end(job)
            return
        if status == 0 and job.work == "evaluating":
            job.run.note_evaluated()
        if status == 0 and self._is_done(job):
            if job.run.state() is State.FINISHED:
                self._listener.finished(job.run, time.monotonic() - job.started)
                self._end(job)
            return
        log = job.run.folder / OUTPUT
        failure = Failure(job.run, job.work, status, last_lines(log), log)
        self.failures.append(failure)
        self._listener.failed(failure)
        self._end(job)

    def _is_done(self, job: Job) -> bool:
        return job.run.trained() if job.work == "training" else job.run.evaluated()

    def _start(self, job: Job) -> None:
        run = job.run
        config = str(run.write_config())
        if run.trained():
            job.work = "evaluating"
            words = [
                str(self._root / "evaluate.py"),
                config,
                "--output",
                str(run.results),
                "--replace",
                *run.evaluation,
            ]
        else:
            job.work = "training"
            words = [str(self._root / "deepy.py"), str(self._root / "train.py"), config]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if job.devices[0]:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(job.devices)
        job.process = start([sys.executable, *words], run.folder, environment, run.folder / OUTPUT)

    def _end(self, job: Job) -> None:
        self._jobs.remove(job)
        self._free += job.devices

    def _stop(self, number: int, _frame: object) -> None:
        self._received.append(number)
        again = len(self._received) > 1
        for job in self._jobs:
            if job.process is not None and job.process.poll() is None:
                # deepy.py kills what it started when it is asked a second time.
                job.process.send_signal(signal.SIGTERM)
        self._listener.say(
            "killing the runs" if again else "asked the runs to save and exit; the same again kills them"
        )
