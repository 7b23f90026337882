"""Starts the ranks of one host, forwards signals to them, and reports the rank that failed.

deepy.py calls `run_node` for the ranks of this machine. For several hosts, pdsh starts this file on
each of them:

    python node.py INDEX NODES PID_FILE_PREFIX COMMAND OF A RANK

It imports only the standard library, so it starts in a fraction of a second and does not depend on
the working directory.
"""

import base64
import contextlib
import dataclasses
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# The process id of deepy.py or node.py, in the environment of its ranks. A rank stops when this is
# not its parent.
LAUNCHER_VARIABLE = "LAUNCHER_PID"
# deepy.py sends it to node.py on the other hosts.
KILL_SIGNAL = signal.SIGUSR2
# A rank prints its own message before it exits with one of these: a UserError, the loss of the
# connection to another rank, or an unexpected error (megatron/utils/command_line.py).
EXPLAINED_STATUSES = (2, 3, 70)
STATUS_OF_LOST_CONNECTION = 3
# Usual causes of signals that nobody sent on purpose.
_MEANINGS: dict[int, str] = {
    signal.SIGKILL: "the host ran out of memory (see dmesg), or kill -9",
    signal.SIGSEGV: "native code crashed, such as a driver or an extension",
    signal.SIGABRT: "native code aborted, such as NCCL after a timeout; its message is above",
    signal.SIGBUS: "a file was truncated while it was read, or /dev/shm is full",
    signal.SIGTERM: "a user or the scheduler stopped it",
}
# Seconds after a rank has failed in which the others can print their own messages. They can no
# longer save.
_SECONDS_AFTER_FAILURE = 10
_SECONDS_TO_SAVE = 300

Streams = tuple[int | None, int | None, int | None]  # file descriptors of stdin, stdout and stderr


@dataclasses.dataclass(frozen=True)
class Node:
    """The ranks of one host.

    Attributes:
        host: the host's name, for messages; None if all ranks run on this machine.
        slots: indices of GPUs, one per rank; on the CPU, any list of this length.
        first_rank: rank of the first process.
        world_size: number of ranks on all hosts.
        master_addr, master_port: address of rank 0.
    """

    host: str | None
    slots: list[int]
    first_rank: int
    world_size: int
    master_addr: str
    master_port: int

    def variables(self, index: int) -> dict[str, str]:
        """What torch.distributed and DeepSpeed read from the environment of process `index`."""
        return {
            "RANK": str(self.first_rank + index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_SIZE": str(len(self.slots)),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def encode(value: Any) -> str:
    """A JSON value as one word that is safe in any shell: letters, digits, `-`, `_` and `=`. It is
    compressed, because Linux limits a word to 128 KiB.
    """
    text = json.dumps(value, separators=(",", ":"))
    return base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode()


def decode(word: str) -> Any:
    """The inverse of `encode`. Raises ValueError or zlib.error for any other word."""
    return json.loads(zlib.decompress(base64.urlsafe_b64decode(word.encode())))


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT, SIGUSR1 (a batch system's warning) and, unless nohup has set it to be
    ignored, SIGHUP.

    A shell may send SIGHUP several times, so it never counts as the second signal.
    """
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1] + [signal.SIGHUP] * (not nohup)


def run_node(
    node: Node,
    command: Sequence[str],
    environment: Mapping[str, str],
    connected: Callable[[], bool] | None = None,
    streams: Streams = (None, None, None),
) -> int:
    """Run one process per rank until all have ended. Must be called in the main thread.

    The first of `stop_signals` is forwarded to all ranks as SIGTERM; they save and exit. The second
    one, or KILL_SIGNAL, kills them. If a rank fails, the others are killed after ten seconds, and
    the last line says why. If `connected` returns False, no one can stop the ranks or read their
    output any longer, so they are asked to save and exit. If no one can send the second signal any
    longer, they are killed after five minutes.

    Args:
        environment: of the ranks, without the variables of `Node.variables`.
        connected: whether deepy.py still runs, on another host; None if this process is deepy.py.
        streams: of the ranks; by default those of this process.

    Returns:
        The exit status of the rank that failed first (128 + N if signal N killed it), or 0.
    """
    ranks = _Ranks(node, connected)
    numbers = (*stop_signals(), KILL_SIGNAL)
    previous_handlers = {number: signal.signal(number, ranks.receive) for number in numbers}
    try:
        ranks.start(command, environment, streams)
        while ranks.running:
            time.sleep(0.1)
            ranks.forward_signals()
            ranks.note_failures()
            ranks.kill_late()
        return ranks.exit_status()
    finally:
        ranks.kill()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


class _Ranks:
    """The processes of one host, for `run_node`."""

    def __init__(self, node: Node, connected: Callable[[], bool] | None):
        self.node = node
        self.connected = connected
        self.parent = os.getppid()
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.received: list[str] = []  # the names of signals
        self.handled = 0  # how many of them
        self.stopping = self.killed = False
        self.kill_at = math.inf  # time.monotonic()
        self.failures: list[
            tuple[int, int]
        ] = []  # (rank, exit status or -signal), without ranks that were killed here
        self.status = 0  # of the first rank that failed

    def receive(self, number: int, _frame: object) -> None:
        if not (self.received and number == signal.SIGHUP):
            self.received.append(signal.Signals(number).name)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], streams: Streams
    ) -> None:
        stdin, stdout, stderr = streams
        for index in range(len(self.node.slots)):
            variables = {
                **environment,
                **self.node.variables(index),
                LAUNCHER_VARIABLE: str(os.getpid()),
            }
            # In a session of its own, a rank does not receive Ctrl-C, which would end its data
            # workers at once.
            self.running[self.node.first_rank + index] = subprocess.Popen(
                command,
                env=variables,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def kill(self) -> None:
        self.killed = True
        for process in self.running.values():
            _kill(process)

    def forward_signals(self) -> None:
        """Forward new signals to the ranks. Stop them if no one can send signals any longer."""
        # The first signal, or the end of deepy.py on another host, asks the ranks to save.
        received = len(self.received)  # another signal can arrive at any time
        is_new, self.handled = received > self.handled, received
        if is_new and (self.stopping or KILL_SIGNAL.name in self.received):
            if self.node.host is None:
                _report(self.node, f"{self.received[-1]} again: killing all processes")
            self.kill()
        elif is_new or not (self.stopping or self.connected is None or self.connected()):
            self.stopping = True
            if self.received and self.node.host is None:
                asked = (
                    f"asked {len(self.running)} process(es) to save and exit; repeat to kill them"
                )
                _report(self.node, f"{self.received[0]}: {asked}")
            for process in self.running.values():
                process.terminate()
        if self.stopping and not self.has_launcher():
            self.kill_within(_SECONDS_TO_SAVE)

    def has_launcher(self) -> bool:
        """Whether the process that started this one, or deepy.py on another host, still runs."""
        if self.connected is None:
            return os.getppid() == self.parent
        return self.connected()

    def note_failures(self) -> None:
        """Remove the ranks that have ended. After a failure, the others end soon."""
        for rank, code in _ended(self.running):
            _kill(self.running.pop(rank))  # its data workers
            if code == 0:
                continue
            self.status = self.status or exit_status_of(code)
            if not self.killed and not (self.stopping and (code > 0 or code == -signal.SIGTERM)):
                self.failures.append((rank, code))
            seconds = _SECONDS_TO_SAVE if self.stopping else _SECONDS_AFTER_FAILURE
            self.kill_within(seconds)

    def kill_within(self, seconds: float) -> None:
        self.kill_at = min(self.kill_at, time.monotonic() + seconds)

    def kill_late(self) -> None:
        if self.running and time.monotonic() > self.kill_at:
            _report(
                self.node, f"killing rank {', '.join(map(str, self.running))}, which did not exit"
            )
            self.kill()
            self.kill_at = math.inf

    def exit_status(self) -> int:
        """The result of `run_node`; reports the failure that caused the others."""
        if not self.failures:
            return self.status
        # A rank that lost the connection to another one has only noticed the failure.
        causes = [failure for failure in self.failures if failure[1] != STATUS_OF_LOST_CONNECTION]
        rank, code = (causes or self.failures)[0]
        _report_failure(self.node, rank, code)
        return exit_status_of(code)


def _ended(running: Mapping[int, "subprocess.Popen[bytes]"]) -> list[tuple[int, int]]:
    """(rank, exit status or -signal) of the ranks that have ended. If several have ended at about
    the same time, the one that a signal killed is the cause, and comes first.
    """
    codes = {rank: process.poll() for rank, process in running.items()}
    ended = [(rank, code) for rank, code in codes.items() if code is not None]
    return sorted(ended, key=lambda each: (each[1], each[0]))


def rank_environment(environment: Mapping[str, str], slots: Sequence[int]) -> dict[str, str]:
    """The environment of ranks on these slots: their GPUs, or on the CPU a share of its cores."""
    result = dict(environment)
    if result.get("DS_ACCELERATOR") != "cpu":
        result["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    elif len(slots) > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // len(slots))
        result.setdefault("OMP_NUM_THREADS", str(threads))
    return result


def describe_signal(rank: int, host: str, number: int) -> str:
    """The line that says which rank was killed, by which signal, and what that usually means."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = "a signal"
    line = f"error: rank {rank} on {host} was killed by {name} ({number})"
    if number in _MEANINGS:
        line += f"; usually: {_MEANINGS[number]}"
    return line


def exit_status_of(code: int) -> int:
    """What a shell reports for a process with the `returncode` of subprocess."""
    return 128 - code if code < 0 else code


def _report_failure(node: Node, rank: int, code: int) -> None:
    """Name the rank that failed, unless its own message is enough."""
    host = node.host or socket.gethostname()
    if code < 0:
        _print(describe_signal(rank, host, -code))
    elif node.world_size > 1 and code not in EXPLAINED_STATUSES:
        _print(f"error: rank {rank} on {host} exited with status {code}; its message is above")


def _report(node: Node, text: str) -> None:
    if node.host is not None:
        text += f" (host {node.host})"
    _print(text)


def _print(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        # The terminal or connection is closed. The text stays in the buffer, and the exit status
        # would be 120 if it could not be written at the end either.
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stderr.fileno())


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and everything it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _standard_input_is_open() -> bool:
    """False once the other end of the ssh connection, which pdsh keeps open, is closed."""
    readable, _, _ = select.select([0], [], [], 0)
    return not readable or os.read(0, 1) != b""


def _copy(source: int, target: int) -> None:
    """Copy the ranks' output. Without a connection, they can still print, and so save."""
    while data := os.read(source, 1 << 16):
        with contextlib.suppress(OSError):
            os.write(target, data)


def main(words: Sequence[str]) -> int:
    """Run the ranks of this host for pdsh."""
    index, nodes, pid_file, *command = words
    node, pid_path = Node(**decode(nodes)[int(index)]), Path(pid_file + index)
    environment = rank_environment(os.environ, node.slots)
    copies = []
    (output_source, output), (errors_source, errors) = os.pipe(), os.pipe()
    for source, target in ((output_source, 1), (errors_source, 2)):
        copies.append(threading.Thread(target=_copy, args=(source, target), daemon=True))
        copies[-1].start()
    # Other users can see the name and might create the file, so an existing file is an error.
    with open(os.open(pid_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(str(os.getpid()))
    try:
        streams = subprocess.DEVNULL, output, errors
        return run_node(node, command, environment, _standard_input_is_open, streams)
    finally:
        os.close(output)
        os.close(errors)
        for copy in copies:
            copy.join(timeout=5)
        with contextlib.suppress(OSError):
            pid_path.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
