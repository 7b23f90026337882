"""Trainings on several ranks of this machine."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tests.support.checkpoints import write_yaml
from tests.support.fork_server import ForkServer
from tests.support.forks import CONSTANTS, ROOT
from tests.support.processes import free_ports

TIME_LIMIT = 600.0  # seconds, after which a training is killed


class Ranks:
    """`size` ranks, which are forks of a process that has imported their modules: that takes longer
    than most runs.
    """

    def __init__(self, fork_server: ForkServer, size: int):
        self.fork_server, self.size = fork_server, size

    def train(
        self,
        settings: dict[str, object],
        constants: dict[str, object] | None = None,
        stop_last_rank_at: str | None = None,
    ) -> str:
        """Train on all ranks and return the output of rank 0. Raises AssertionError with all
        outputs if a rank fails.

        constants: "module:NAME" -> value for the constant during this training.
        stop_last_rank_at: send SIGTERM to the last rank when this text occurs in the output of rank
            0.
        """
        (port,) = free_ports(1)
        variables = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(self.size),
        }
        variables |= {"OMP_NUM_THREADS": "1", CONSTANTS: json.dumps(constants or {})}
        with tempfile.TemporaryDirectory() as folder:
            config = write_yaml(Path(folder) / "config.yml", settings)
            processes = [
                self.fork_server.Popen(
                    [sys.executable, str(ROOT / "train.py"), str(config)],
                    env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(self.size)
            ]
            limit = threading.Timer(TIME_LIMIT, lambda: [process.kill() for process in processes])
            limit.start()
            outputs = [""] * self.size
            for line in processes[0].stdout:
                outputs[0] += line
                if stop_last_rank_at is not None and stop_last_rank_at in line:
                    stop_last_rank_at = None
                    processes[-1].send_signal(signal.SIGTERM)
            for rank, process in enumerate(processes):
                outputs[rank] += process.communicate()[0]
            limit.cancel()
        assert not any(process.returncode for process in processes), "\n".join(outputs)
        return outputs[0]
