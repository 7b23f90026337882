"""Rank processes that train one configuration after another, so that modules are imported only once.

As a script, this is one rank: it reads lines {"config": ..., "port": ..., "constants": ...} and answers each with one
line.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ANSWER = "@answer "


class RankFailed(AssertionError):
    """A rank raised an exception; the message contains its traceback."""


class Ranks:
    """`size` rank processes on this machine. A context manager."""

    def __init__(self, size: int):
        self.size = size
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.stdin.close()
            process.wait(timeout=60)

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"}
        for rank in range(self.size):
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size)}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, __file__],
                    env={**environment, **variables},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes.clear()

    def train(
        self,
        settings: dict[str, object],
        constants: dict[str, object] | None = None,
        stop_last_rank_at: str | None = None,
    ) -> str:
        """Train on all ranks and return the output of rank 0. Raises RankFailed if a rank fails.

        constants: "module:NAME" -> value for the constant during this training.
        stop_last_rank_at: send SIGTERM to the last rank when this text occurs in the output of rank 0.
        """
        if not self._processes:
            self._start()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for process in self._processes:
            process.stdin.write(json.dumps({"config": settings, "port": port, "constants": constants or {}}) + "\n")
            process.stdin.flush()
        outputs = []
        for process in self._processes:
            lines, answer = deque(maxlen=400), None
            for line in process.stdout:
                if line.startswith(ANSWER):
                    answer = json.loads(line.removeprefix(ANSWER))
                    break
                lines.append(line)
                if stop_last_rank_at is not None and stop_last_rank_at in line:
                    stop_last_rank_at = None
                    self._processes[-1].send_signal(signal.SIGTERM)
            if answer != "done":
                self._kill()  # the other ranks may wait for this one
                raise RankFailed("".join(lines) + str(answer))
            outputs.append("".join(lines))
        return outputs[0]


@contextlib.contextmanager
def replaced(constants: dict[str, object]) -> Iterator[None]:
    """Replace constants of modules, given as "module:NAME"."""
    originals = []
    for path, value in constants.items():
        module_name, _, name = path.partition(":")
        module = importlib.import_module(module_name)
        originals.append((module, name, getattr(module, name)))
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


def serve() -> None:
    from megatron.config import Config
    from megatron.training.loop import train

    for line in sys.stdin:
        request = json.loads(line)
        os.environ["MASTER_PORT"] = str(request["port"])
        try:
            with replaced(request["constants"]):
                train(Config.from_flat(request["config"]))
            answer = "done"
        except Exception:
            answer = traceback.format_exc()
        print(f"\n{ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    serve()
