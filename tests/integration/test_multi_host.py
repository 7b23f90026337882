"""Training on two hosts, emulated on this machine: pdsh, mpirun, srun and sbatch with one rank per
host.

`make test-hosts` installs the Debian packages and runs these tests.
"""

import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from megatron.checkpoint.directory import saved_iterations
from tests.support.hosts import (
    HOSTS,
    MPI_HOSTS,
    Cluster,
    kill_trees,
    processes_in,
    rank_process,
    wait_for_none,
)
from tests.support.processes import free_ports, wait_for
from tests.support.runs import ROOT, metrics, trained, training_settings, unwrapped
from tests.support.sweeps import run_sweep, write_sweep

pytestmark = pytest.mark.slow

KEYS = {"save_interval": None, "eval_iters": 0}
LAUNCHERS = ("pdsh", "openmpi", "slurm")
IGNORES_SIGTERM = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from megatron.launcher.script_arguments import parse_arguments
parse_arguments("ignores SIGTERM")
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: open("signalled" + rank, "w").close())
open("ready" + rank, "w").close()
while True:
    time.sleep(1)
"""

# Launcher -> the part of its output that names the host whose rank was killed.
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
    trained(folder, data_path, train_iters=5, load=None, save=None, **KEYS)
    return metrics(folder)


class Run:
    """A training on both hosts in `folder`, and its output so far."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        data_path: str,
        launcher: str,
        second_host: str | None = None,
        script: str | None = None,
    ):
        self.folder = folder
        first, second = MPI_HOSTS if launcher == "openmpi" else HOSTS
        (folder / "hostfile").write_text(f"{first} slots=1\n{second_host or f'{second} slots=1'}\n")
        (port,) = free_ports(1)
        settings = {"train_iters": 100_000, **KEYS, "hostfile": "hostfile", "master_port": port}
        settings |= {"launcher": launcher} if launcher != "pdsh" else {}
        if launcher != "slurm":
            settings["master_addr"] = HOSTS[0]
        settings = training_settings(folder, data_path, **settings)
        (folder / "config.yml").write_text(json.dumps(settings))
        variables = {"HF_HOME": f"{folder}/a b\"c'$d%n", "WANDB_API_KEY": "not-for-ps"}
        if script is not None:
            (folder / "train.py").write_text(script)  # takes precedence over ours
        command = [sys.executable, str(ROOT / "deepy.py"), "train.py", "config.yml"]
        self.process = cluster.run_in(folder, command, **variables)
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
        self.output += self.process.communicate(timeout=240)[0]
        wait_for_none(self.folder)
        return self.process.returncode

    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if "error: " in line]


@pytest.fixture
def start(cluster, tmp_path, data_path):
    """start(launcher, ...): a Run, whose processes are killed at the end of the test."""
    runs = []

    def start_run(launcher: str, **options: str) -> Run:
        runs.append(Run(cluster, tmp_path, data_path, launcher, **options))
        return runs[-1]

    yield start_run
    for run in runs:
        if run.process.poll() is None:
            kill_trees(run.process.pid, *[process.pid for process in processes_in(run.folder)])
            print(run.output + run.process.communicate()[0])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_hosts_train_as_one_rank_and_save_after_sigterm(launcher, start, expected_losses):
    run = start(launcher)
    run.wait_for_line("iteration 5/")
    variables = rank_process(run.folder, 1).environ()
    assert variables["HF_HOME"] == run.variables["HF_HOME"]
    # pdsh can pass variables only on command lines, which all users of a host see, so it passes no
    # secrets.
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
def test_killed_host_ends_the_run(launcher, start):
    """The rank on the second host is killed, and the process that started it: node.py or Open MPI's
    daemon.

    Not slurmstepd: srun would wait until Slurm declares the node down, although all ranks have
    ended.
    """
    run = start(launcher)
    run.wait_for_line("iteration 2/")
    rank = rank_process(run.folder, 1)
    kill_trees(rank.pid if launcher == "slurm" else rank.parent().pid)
    assert run.finish() != 0
    assert MESSAGES[launcher] in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_last_line_names_the_rank_that_was_killed(launcher, start):
    run = start(launcher)
    run.wait_for_line("iteration 2/")
    rank_process(run.folder, 1).kill()
    assert run.finish() == 128 + signal.SIGKILL
    host = MPI_HOSTS[1] if launcher == "openmpi" else HOSTS[1]
    last = run.output.splitlines()[-1]
    meaning = "usually: the host ran out of memory (see dmesg), or kill -9"
    assert last == f"error: rank 1 on {host} was killed by SIGKILL (9); {meaning}"
    if launcher == "pdsh":
        assert run.errors() == [last]
        assert "rank 0 on" in run.output
        assert "stops: another rank has ended; its messages say why" in run.output


def test_ranks_save_when_an_ssh_connection_is_lost(start):
    run = start("pdsh")
    run.wait_for_line("iteration 2/")
    node = rank_process(run.folder, 1).parent()
    assert node.parent().name().startswith("sshd")
    node.parent().kill()
    assert run.finish() == 255
    assert "saved " in run.output
    assert run.errors() == [
        "error: the ssh connection to 127.0.0.2 was lost, or its processes were killed"
    ]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_save_when_deepy_is_killed(launcher, start):
    run = start(launcher)
    run.wait_for_line("iteration 2/")
    run.process.kill()
    assert run.finish() == -signal.SIGKILL
    assert len(saved_iterations(run.folder / "checkpoints")) == 1


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_second_signal_kills_ranks_that_do_not_stop(launcher, start):
    run = start(launcher, script=IGNORES_SIGTERM)
    wait_for(lambda: len(list(run.folder.glob("ready?"))) == 2)
    run.process.send_signal(signal.SIGINT)
    wait_for(lambda: len(list(run.folder.glob("signalled?"))) == 2)
    run.process.send_signal(signal.SIGINT)
    assert run.finish() != 0
    assert "SIGINT again: killing all processes" in run.output


@pytest.mark.parametrize("command", ["train.py", "kerple_command.py train", "deepy.py train.py"])
def test_sbatch(command, cluster, tmp_path, data_path, expected_losses):
    (port,) = free_ports(1)
    settings = training_settings(tmp_path, data_path, train_iters=100_000, master_port=port, **KEYS)
    (tmp_path / "config.yml").write_text(json.dumps(settings))
    line = f"{sys.executable} {ROOT}/{command} config.yml --set "
    if command.startswith("deepy.py"):
        hostfile = "scontrol show hostnames | sed 's/$/ slots=1/' > hostfile"
        line = f"{hostfile}\nexec {line} hostfile=hostfile launcher=slurm\n"
    else:
        # Only srun starts ranks, so the first command is an error.
        line += "deepspeed_slurm=true"
        line = f"{line} && exit 1\nsrun --kill-on-bad-exit=1 {line}\n"
    options = "--nodes=2 --ntasks-per-node=1 --output=output --open-mode=append"
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n#SBATCH {options}\n{line}")
    output = tmp_path / "output"
    output.write_text("")
    job = cluster.run_in(tmp_path, ["sbatch", "--parsable", "job.sh"]).communicate()[0].strip()
    wait_for(lambda: "iteration 5/" in output.read_text())
    # What Slurm does at --signal=TERM@300, before the time limit.
    cluster.run_in(tmp_path, ["scancel", "--signal=TERM", job]).wait()
    wait_for_none(tmp_path)
    assert "received a signal to stop" in unwrapped(output.read_text())
    expected_errors = 0 if command.startswith("deepy.py") else 1
    assert output.read_text().count("error: deepspeed_slurm") == expected_errors
    assert len(saved_iterations(tmp_path / "checkpoints")) == 1
    losses = metrics(tmp_path)
    assert {step: losses[step] for step in range(1, 6)} == pytest.approx(expected_losses, abs=1e-4)


def test_slurm_array_of_a_sweep(cluster, tmp_path):
    """Two tasks share six runs. One of them receives Slurm's signal before its time limit; another
    array resumes.
    """
    axes = {
        "pos_emb": ["kerple_log.yml", "alibi.yml"],
        "seed": [{"seed": seed} for seed in (1, 2, 3)],
    }
    sweep = write_sweep(tmp_path, axes=axes)
    options = (
        f"--array=1-2 --exclusive --signal=B:TERM@300 --open-mode=append --output={tmp_path}/%a.log"
    )
    script = (
        f"#!/bin/bash\n#SBATCH {options}\nexec {sys.executable} {ROOT}/kerple_command.py sweep "
        f"{sweep}\n"
    )
    (tmp_path / "sweep.sh").write_text(script)
    logs = {task: tmp_path / f"{task}.log" for task in (1, 2)}

    def submit() -> str:
        return (
            cluster.run_in(tmp_path, ["sbatch", "--parsable", "sweep.sh"]).communicate()[0].strip()
        )

    def is_finished() -> bool:
        queue = cluster.run_in(tmp_path, ["squeue", "--noheader"])
        return not queue.communicate()[0].strip() and queue.returncode == 0

    job = submit()
    wait_for(lambda: all(log.is_file() and "6 runs" in log.read_text() for log in logs.values()))
    cluster.run_in(tmp_path, ["scancel", "--batch", "--signal=TERM", f"{job}_1"]).wait()
    wait_for(
        lambda: "stopped; run the same command again to resume" in logs[1].read_text(), seconds=900
    )
    submit()
    wait_for(is_finished, seconds=900)
    assert sum(log.read_text().count(": finished in ") for log in logs.values()) == 6
    assert "6 runs, 6 of them already finished" in run_sweep(sweep), [
        log.read_text() for log in logs.values()
    ]


@pytest.mark.parametrize(
    ("launcher", "host", "message"),
    [
        (
            "pdsh",
            "no-such-host slots=1",
            "no-such-host: ssh: Could not resolve hostname no-such-host",
        ),
        (
            "pdsh",
            "127.0.0.3 slots=1",
            "127.0.0.3: ssh: connect to host 127.0.0.3 port {port}: Connection refused",
        ),
        (
            "openmpi",
            "no-such-host slots=1",
            "no-such-host: ssh: Could not resolve hostname no-such-host",
        ),
        (
            "slurm",
            "no-such-host slots=1",
            "srun: error: Unable to allocate resources: Invalid node name specified",
        ),
        (
            "pdsh",
            "127.0.0.2 slots=none",
            "line 2: expected HOST slots=N with N >= 1, not '127.0.0.2 slots=none'",
        ),
    ],
)
def test_errors_in_the_hostfile(launcher, host, message, start, cluster):
    run = start(launcher, second_host=host)
    assert run.finish() != 0
    assert message.format(port=cluster.ssh_port) in run.output
    assert len(run.errors()) == 1
    assert "Traceback" not in run.output


def test_torchrun_without_ssh(cluster, tmp_path, data_path, expected_losses):
    (port,) = free_ports(1)
    settings = training_settings(tmp_path, data_path, train_iters=5, **KEYS)
    (tmp_path / "config.yml").write_text(json.dumps(settings))
    options = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
    script = [str(ROOT / "train.py"), "config.yml"]
    hosts = [
        cluster.run_in(tmp_path, [*torchrun, f"--node-rank={index}", *script]) for index in (0, 1)
    ]
    outputs = [host.communicate(timeout=240)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert metrics(tmp_path) == pytest.approx(expected_losses, abs=1e-4)
