"""A process that has imported the project's modules and runs Python scripts as forks of itself
(`forks.py`).

Starting the interpreter and importing torch, DeepSpeed and megatron-core takes longer than most
small runs. The process that runs the tests is not forked for this: what its tests imported, changed
and left running would be in the fork. Linux only.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support import forks

MESSAGE_SIZE = 1 << 17


class ForkServer:
    """Starts the process. `Popen` is a replacement for `subprocess.Popen`."""

    def __init__(self) -> None:
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.fork_server", str(other.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self._process = subprocess.Popen(
            command, cwd=forks.ROOT, env=environment, pass_fds=[other.fileno()]
        )
        other.close()
        server = self

        class Popen(forks.ForkedPython):
            """`subprocess.Popen` that runs `[python, SCRIPT.py, ...]` in a fork of the server."""

            def _start_script(
                self, words: Sequence[str], given: Mapping[str, Any], streams: Sequence[int]
            ) -> int:
                assert not given["pass_fds"]
                assert given["preexec_fn"] is None
                directory = os.getcwd() if given["cwd"] is None else os.fspath(given["cwd"])
                environment = dict(os.environ if given["env"] is None else given["env"])
                return server.start(
                    words, directory, environment, streams, new_session=given["start_new_session"]
                )

        self.Popen = Popen

    def start(
        self,
        words: Sequence[str],
        directory: str,
        environment: Mapping[str, str],
        streams: Sequence[int],
        *,
        new_session: bool = False,
    ) -> int:
        """Run `python WORDS` as a child of this process; returns its process id.

        streams: file descriptors of standard input, output and error; -1 for those of this process.
        """
        request = json.dumps([words, directory, environment, new_session]).encode()
        descriptors = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        forks.adopt_orphans(True)
        try:
            socket.send_fds(self._connection, [request], descriptors)
            answer = self._connection.recv(MESSAGE_SIZE)
        finally:
            forks.adopt_orphans(False)
        assert answer, "the server has ended"
        return int(answer)

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


def serve(connection: socket.socket) -> None:
    """Start a script for each message, until the other side closes the connection."""
    forks.import_modules()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_SIZE, 3)
        if not message:
            return
        connection.send(str(start_orphan(*json.loads(message), descriptors)).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def start_orphan(
    words: Sequence[str],
    directory: str,
    environment: Mapping[str, str],
    new_session: bool,
    streams: Sequence[int],
) -> int:
    """Run `python WORDS` in a fork of a fork that ends at once, so that the process that asked for
    it adopts it.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        between = os.getpid()

        def prepare() -> None:
            while os.getppid() == between:
                time.sleep(0.001)
            if new_session:
                os.setsid()

        pid = forks.fork_script(words, directory, environment, streams, prepare=prepare)
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.waitpid(child, 0)
    pid = int(os.read(reader, 32))
    os.close(reader)
    os.close(writer)
    return pid


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
