"""Real ranks that train one configuration after the other, so that the imports are paid for once.

Run as a script, this is one rank: it reads lines {"config": ..., "port": ...} and answers each with a line.
"""

import contextlib
import importlib
import json
import os
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
    """A rank raised; the message holds its traceback."""


class Ranks:
    """`size` processes of one machine. Use as a context manager; `train` may be called any number of times."""

    def __init__(self, size: int):
        self.size = size
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Ranks":
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"}
        for rank in range(self.size):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size)}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, __file__],
                    env={**environment, **ranks},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.stdin.close()
            process.wait(timeout=60)

    def train(self, settings: dict[str, object], constants: dict[str, object] | None = None) -> str:
        """Train on all ranks; rank 0's output. Raises RankFailed with the last lines of the first rank that fails.

        constants: "module:NAME" -> the value it has meanwhile.
        """
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
            if answer != "done":
                raise RankFailed("".join(lines) + str(answer))
            outputs.append("".join(lines))
        return outputs[0]


@contextlib.contextmanager
def replaced(constants: dict[str, object]) -> Iterator[None]:
    before = []
    for name, value in constants.items():
        path, _, constant = name.partition(":")
        module = importlib.import_module(path)
        before.append((module, constant, getattr(module, constant)))
        setattr(module, constant, value)
    try:
        yield
    finally:
        for module, constant, value in before:
            setattr(module, constant, value)


def serve() -> None:
    from megatron.config import Config
    from megatron.training.loop import train

    for line in sys.stdin:
        job = json.loads(line)
        os.environ["MASTER_PORT"] = str(job["port"])
        try:
            with replaced(job["constants"]):
                train(Config.from_flat(job["config"]))
            answer = "done"
        except Exception:
            answer = traceback.format_exc()
        print(f"\n{ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    serve()
