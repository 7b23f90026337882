"""Training on two hosts, emulated on this machine: pdsh, mpirun, srun and sbatch with one rank per host.

`make test-hosts` installs the Debian packages and runs these tests.
"""

import json
import signal
from pathlib import Path

import psutil
import pytest

from megatron.checkpoint.directory import saved_iterations
from megatron.config import Config
from megatron.training.loop import train
from tests.support.hosts import HOSTS, MPI_HOSTS, Cluster, free_ports, kill_trees, rank_process, wait_for_none
from tests.support.runs import metrics, training_settings

pytestmark = pytest.mark.slow

KEYS = {"save_interval": None, "eval_iters": 0}
LAUNCHERS = {
    "pdsh": {},
    "openmpi": {"launcher": "openmpi"},
    "slurm": {"launcher": "slurm"},
}
# What names the host whose rank was killed.
MESSAGES = {
    "pdsh": "error: the ssh connection to 127.0.0.2 was lost, or its processes were killed",
    "openmpi": "on node host-2",
    "slurm": "error: 127.0.0.2: task 1: Killed",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as two_hosts:
        yield two_hosts


@pytest.fixture(scope="module")
def expected_losses(tmp_path_factory, data_path) -> dict[int, float]:
    """The first losses of one rank with the same global batch."""
    folder = tmp_path_factory.mktemp("one_rank")
    train(Config.from_flat(training_settings(folder, data_path, train_iters=5, load=None, save=None, **KEYS)))
    return metrics(folder)


class Run:
    """A training on both hosts in `folder`, and its output so far."""

    def __init__(self, cluster: Cluster, folder: Path, data_path: str, launcher: str, **keys: object):
        self.folder = folder
        hosts = MPI_HOSTS if launcher == "openmpi" else HOSTS
        (folder / "hostfile").write_text("".join(f"{host} slots=1\n" for host in hosts))
        (port,) = free_ports(1)
        settings = {"train_iters": 100_000, **KEYS, "hostfile": "hostfile", "master_port": port, **LAUNCHERS[launcher]}
        if launcher != "slurm":
            settings["master_addr"] = HOSTS[0]
        settings = training_settings(folder, data_path, **{**settings, **keys})
        (folder / "config.yml").write_text(json.dumps(settings))
        variables = {"HF_HOME": f"{folder}/a b\"c'$d%n", "WANDB_API_KEY": "not-for-ps"}
        self.process = cluster.deepy(folder, "config.yml", **variables)
        self.variables = variables
        self.output = ""

    def wait_for_line(self, text: str) -> None:
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(self.output)

    def finish(self) -> int:
        """Wait until no process is left, and return the exit status."""
        self.output += self.process.communicate(timeout=120)[0]
        wait_for_none(self.folder)
        return self.process.returncode

    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if "rror" in line]


@pytest.fixture
def start(cluster, tmp_path, data_path):
    """start(launcher, **keys): a Run, whose processes are killed at the end of the test."""
    runs = []

    def start_run(launcher: str, **keys: object) -> Run:
        runs.append(Run(cluster, tmp_path, data_path, launcher, **keys))
        return runs[-1]

    yield start_run
    for run in runs:
        if run.process.poll() is None:
            kill_trees(run.process.pid)
            print(run.output + run.process.communicate()[0])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_hosts_train_as_one_rank_and_save_after_sigterm(launcher, start, expected_losses):
    run = start(launcher)
    run.wait_for_line("iteration 5/")
    variables = rank_process(run.folder, 1).environ()
    assert variables["HF_HOME"] == run.variables["HF_HOME"]
    # pdsh can pass variables only on command lines, which all users of a host see, so it passes no secrets.
    assert ("WANDB_API_KEY" in variables) == (launcher != "pdsh")
    command_lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in command_lines if any("not-for-ps" in word for word in words)]
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 0, run.output
    assert "2 ranks on cpu" in run.output
    assert "SIGTERM: asked 2 process(es) to save and exit; repeat to kill them" in run.output
    assert "received a signal to stop" in run.output
    assert "not-for-ps" not in run.output
    assert run.errors() == []
    assert len(saved_iterations(run.folder / "checkpoints")) == 1
    losses = metrics(run.folder)
    assert {step: losses[step] for step in range(1, 6)} == pytest.approx(expected_losses, abs=1e-4)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_killed_host_ends_the_run(launcher, start, cluster):
    """The rank on the second host and the process that started it are killed."""
    run = start(launcher)
    run.wait_for_line("iteration 2/")
    rank = rank_process(run.folder, 1)
    kill_trees(rank.parent().pid)
    assert run.finish() != 0
    assert MESSAGES[launcher] in run.output
    assert "Traceback" not in run.output
