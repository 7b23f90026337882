"""Starts the ranks of several hosts with pdsh, srun or mpirun, forwards signals, and reports a host
that failed.

srun and mpirun start every rank. pdsh starts node.py on every host, which starts the ranks of that
host.
"""

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from megatron.launcher.commands import node_command, pdsh_command, signal_command
from megatron.launcher.node import (
    KILL_SIGNAL,
    STATUS_OF_LOST_CONNECTION,
    Node,
    describe_signal,
    exit_status_of,
    stop_signals,
)
from megatron.launcher.rank import LAUNCHER_DIED
from megatron.utils.errors import UserError
from megatron.utils.processes import signal_without_parent

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
PID_FILE = "/tmp/deepy-{}."  # of a run; node.py appends the index of its host
# Seconds until the ranks of other hosts are killed after a host failed. Most lose the connection
# and end earlier.
_SECONDS_AFTER_FAILURE = 60
_SECONDS_TO_KILL = 15
_NODE_FAILURE = re.compile(r": (error: rank \d+ on \S+ (?:was killed|exited) .*)")
_PDSH_STATUS = re.compile(r"pdsh@[^:]+: ([^:]+): ssh exited with exit code (\d+)")
_SSH_FAILED = 255
# "srun: error: node-2: task 1: Killed", "srun: error: node-1: tasks 0-3: Segmentation fault (core
# dumped)"
_SRUN_FAILURE = re.compile(
    r"srun: error: ([^:\s]+): tasks? (\d+)[-,\d]*: (.*?)(?: \(core dumped\))?$"
)
# "mpirun noticed that process rank 1 with PID 4711 on node node-2 exited on signal 9 (Killed)."
_MPI_FAILURE = re.compile(
    r"noticed that process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)"
)
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}


def check_hosts(
    hosts: Sequence[str], directory: str, files: Sequence[str], environment: Mapping[str, str]
) -> str:
    """Check over ssh that every host has the working directory and the files; returns the first
    host's address.

    Raises UserError with one line for each host that does not, or if ssh is not installed.
    """
    if shutil.which(SSH[0]) is None:
        raise UserError(
            "ssh is not installed here; install it, or set no_ssh_check: true if mpirun does not "
            "need it"
        )

    # A script that prints the missing paths, then the addresses of the host.
    missing, lines = "missing: ", []
    for path in map(shlex.quote, (directory, *files)):
        lines.append(f"test -e {path} || echo {missing}{path}")
    lines.append("hostname -I 2> /dev/null || echo")
    script = f"sh -c {shlex.quote('; '.join(lines))}"
    options = shlex.split(environment.get("PDSH_SSH_ARGS_APPEND", ""))

    def check(host: str) -> tuple[str, str]:
        """(IP address, problem); one of them is empty."""
        command = [*SSH, *options, host, script]
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        lines = process.stdout.splitlines()
        paths = [line.removeprefix(missing) for line in lines if line.startswith(missing)]
        if paths:
            return "", f"there is no {', '.join(paths)}"
        if process.returncode or not lines:
            problems = process.stderr.strip().splitlines()
            return "", (problems or [f"ssh exited with status {process.returncode}"])[-1]
        return (lines[-1].split() or [host])[0], ""

    with ThreadPoolExecutor(max_workers=32) as pool:
        results = list(pool.map(check, hosts))
    problems = []
    for host, (_, problem) in zip(hosts, results, strict=True):
        if problem:
            problems.append(f"  {host}: {problem}")
    if problems:
        heading = f"{len(problems)} of {len(hosts)} host(s) of the hostfile cannot be used:"
        advice = (
            "Every host must accept ssh without a password, and have this project, its Python "
            "environment and the working directory at the same paths (docs/clusters.md); "
            "no_ssh_check: true skips this check"
        )
        raise UserError("\n".join([heading, *problems, advice]))
    return results[0][0]


def run_job(command: Sequence[str], environment: Mapping[str, str], ranks: int) -> int:
    """Run srun or mpirun, and return its exit status; 128 + N if signal N killed it or the rank
    that failed first.

    The first of `stop_signals` is forwarded as SIGUSR1, which srun and mpirun pass on to the ranks;
    they save and exit. The second one is forwarded as SIGTERM, on which srun and mpirun kill the
    ranks. If this process is killed, they pass LAUNCHER_DIED on to the ranks. Must be called in the
    main thread.
    """
    # In a new session, so that a signal from the terminal reaches only this process.
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=signal_without_parent(LAUNCHER_DIED),
    )
    stderr = process.stderr
    assert stderr is not None
    stopping = False
    failure = None

    def stop(again: bool) -> None:
        nonlocal stopping
        stopping = True
        number = signal.SIGTERM if again else signal.SIGUSR1
        process.send_signal(number)

    def copy() -> None:
        nonlocal failure
        for line in stderr:
            with contextlib.suppress(OSError):
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
            # srun kills the other ranks after the first one has failed.
            failure = failure or parse_failure(line.decode(errors="replace"))

    # The failed rank determines the status, but not after a stop, which makes ranks fail.
    copier = threading.Thread(target=copy, daemon=True)
    copier.start()
    with _forward_signals(stop, ranks):
        status = process.wait()
    copier.join(timeout=5)  # another process may keep the pipe open
    if failure is not None and failure.signal is not None and not stopping:
        print(
            describe_signal(failure.rank, failure.host, failure.signal), file=sys.stderr, flush=True
        )
        return 128 + failure.signal  # srun returns the status of a rank that it has killed
    return exit_status_of(status)


class Failure(NamedTuple):
    """A rank that srun or mpirun reports. `signal` is None if it exited with a status."""

    rank: int
    host: str
    signal: int | None


def parse_failure(line: str) -> Failure | None:
    """The failure of a rank in a line of srun or mpirun; None if there is none, or if the rank only
    noticed that another one has ended.
    """
    if match := _MPI_FAILURE.search(line):
        return Failure(int(match[1]), match[2], int(match[3]))
    if (
        not (match := _SRUN_FAILURE.match(line))
        or match[3] == f"Exited with exit code {STATUS_OF_LOST_CONNECTION}"
    ):
        return None
    return Failure(int(match[2]), match[1], _SIGNALS.get(match[3]))


def run_pdsh(
    nodes: Sequence[Node],
    command: Sequence[str],
    variables: Mapping[str, str],
    environment: Mapping[str, str],
) -> int:
    """Run `command` once per rank on the hosts `nodes`, and return the largest exit status of the
    hosts.

    The first of `stop_signals` is forwarded to all ranks as SIGTERM; they save and exit. The second
    one kills them. If a host fails, the ranks of the others are killed after a minute. The last
    line names the rank that was killed, or the host that was lost. If this process is killed, so is
    pdsh; its connections end, and the ranks save and exit. Must be called in the main thread.

    Args:
        variables: environment variables of the ranks.
        environment: of pdsh.
    """
    # ssh and signals reach the ranks through node.py.
    hosts = [str(node.host) for node in nodes]
    pid_file = PID_FILE.format(secrets.token_hex(8))
    # Without keep-alive messages, ssh would not notice for a long time that a host has lost power.
    options = (
        "-o ServerAliveInterval=15 -o ServerAliveCountMax=4 "
        f"{environment.get('PDSH_SSH_ARGS_APPEND', '')}"
    )
    environment = {**environment, "PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": options.strip()}
    failed: list[str] = []
    reasons: list[str] = []
    lost = False
    senders: list[subprocess.Popen[bytes]] = []

    def send(name: str) -> None:
        """Send a signal to node.py on every host that still runs it."""
        command = pdsh_command(hosts, signal_command(pid_file, name))
        null = subprocess.DEVNULL
        senders.append(
            subprocess.Popen(
                command,
                env=environment,
                stdin=null,
                stdout=null,
                stderr=null,
                start_new_session=True,
            )
        )

    def end_connections() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def stop(again: bool) -> None:
        if not again:
            send("TERM")
        else:
            send(KILL_SIGNAL.name.removeprefix("SIG"))

            # A host that cannot be reached, or has not started node.py yet. It stops when its
            # connection ends.
            timers.append(threading.Timer(_SECONDS_TO_KILL, end_connections))
            timers[-1].start()

    def end_other_hosts() -> None:
        print(
            f"killing the ranks that still run, because {failed[0]} failed",
            file=sys.stderr,
            flush=True,
        )
        stop(again=True)

    # Start pdsh, and read from its messages which host failed, and why.
    timers = [threading.Timer(_SECONDS_AFTER_FAILURE, end_other_hosts)]
    process = subprocess.Popen(
        pdsh_command(hosts, node_command(nodes, pid_file, command, variables)),
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=signal_without_parent(signal.SIGKILL),
    )
    assert process.stderr is not None
    with _forward_signals(stop, sum(len(node.slots) for node in nodes)):
        for line in process.stderr:
            if match := _NODE_FAILURE.search(line):
                reasons.append(match[1])
            elif match := _PDSH_STATUS.match(line):
                failed.append(match[1])
                if len(failed) == 1:
                    timers[0].start()
                # Otherwise node.py on this host has printed the reason.
                if int(match[2]) == _SSH_FAILED:
                    reasons.append(
                        f"error: the ssh connection to {match[1]} was lost, or its processes were "
                        "killed"
                    )
                    lost = True
            else:
                with contextlib.suppress(OSError):
                    print(line.rstrip("\n"), file=sys.stderr, flush=True)
        status = process.wait()
        for timer in timers:
            timer.cancel()
    if lost:
        send("0")  # only removes the file of a node.py that was killed
    for sender in senders:
        sender.wait()
    for reason in sorted(reasons, key=lambda reason: "was killed by" in reason):
        print(reason, file=sys.stderr, flush=True)
    return exit_status_of(status)


@contextlib.contextmanager
def _forward_signals(stop: Callable[[bool], None], ranks: int) -> Iterator[None]:
    """Within the block, the first stop signal calls `stop(False)`, further ones `stop(True)`."""
    # A closed terminal sends SIGHUP after another signal, which does not ask for more.
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if received and number == signal.SIGHUP:
            return
        received.append(number)
        again = len(received) > 1
        action = f": asked {ranks} process(es) to save and exit; repeat to kill them"
        if again:
            action = " again: killing all processes"
        with contextlib.suppress(OSError):
            print(signal.Signals(number).name + action, file=sys.stderr, flush=True)
        stop(again)

    previous = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
