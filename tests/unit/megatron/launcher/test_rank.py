"""The variables of a rank under Slurm and MPI, and what it does when its launcher stops or dies."""

import os
import signal
from collections.abc import Iterator

import pytest

from megatron.launcher import rank
from megatron.launcher.node import LAUNCHER_VARIABLE
from megatron.launcher.rank import first_host, follow_launcher, set_rank_variables, slurm_port
from tests.support.configs import make_config
from tests.support.errors import assert_rejected

SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
}


@pytest.mark.parametrize(
    ("keys", "variables"),
    [
        ({"launcher": "slurm"}, SLURM),
        ({"deepspeed_slurm": True}, {**SLURM, "SLURM_NTASKS": "8"}),
        ({"launcher": "OpenMPI"}, OPEN_MPI),
        ({"deepspeed_mpi": True}, OPEN_MPI),
    ],
)
def test_ranks_of_slurm_and_mpi(keys, variables):
    config = make_config(**keys, master_addr="node-1")
    environment = dict(variables)
    set_rank_variables(config, environment)
    expected = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "node-1",
        "MASTER_PORT": "29500",
    }
    assert environment == {**variables, **expected}


def test_existing_ranks_are_not_changed():
    environment = dict(SLURM)
    set_rank_variables(make_config(), environment)
    assert environment == SLURM
    environment = {**SLURM, "RANK": "0"}
    set_rank_variables(make_config(launcher="slurm"), environment)
    assert environment == {**SLURM, "RANK": "0"}


def test_several_processes_require_an_address():
    config = make_config(launcher="slurm")
    assert_rejected(r"8.*0.*master_addr", set_rank_variables, config, dict(SLURM))


def test_a_single_process_needs_no_port():
    """Two jobs on one node would choose the same one."""
    environment = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    set_rank_variables(make_config(launcher="slurm"), environment)
    assert "RANK" not in environment
    assert "MASTER_PORT" not in environment


def test_ports_of_slurm_jobs():
    ports = []
    for job, step in ((4711, 0), (4711, 1), (4712, 0), (2**31, 3)):
        environment = {**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        set_rank_variables(make_config(launcher="slurm", master_addr="node-1"), environment)
        ports.append(int(environment["MASTER_PORT"]))
    assert len(set(ports)) == 4
    assert 29500 <= min(ports) <= max(ports) < 32768
    environment = {**SLURM, "SLURM_JOB_ID": "4711"}
    config = make_config(launcher="slurm", master_addr="node-1", master_port=5)
    set_rank_variables(config, environment)
    assert environment["MASTER_PORT"] == "5"


def test_slurm_names_the_first_host():
    environment = {**SLURM, "SLURM_STEP_NODELIST": "gpu-[03-05,9],cpu-1"}
    set_rank_variables(make_config(deepspeed_slurm=True), environment)
    assert environment["MASTER_ADDR"] == "gpu-03"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1,node2", "node1"),
        ("gpu-[03-05,9],cpu-1", "gpu-03"),
        ("rack[1-2]node[01-16],cpu-1", "rack1node01"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


@pytest.fixture
def signals(monkeypatch) -> Iterator[list[str]]:
    """What happens in this process: signals that it receives, signals that it sends itself, and
    seconds it sleeps.
    """
    events: list[str] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1, rank.LAUNCHER_DIED)
    previous = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGTERM, lambda *_: events.append("received SIGTERM"))
    monkeypatch.setattr(
        rank.os,
        "kill",
        lambda pid, number: events.append(number.name if pid == os.getpid() else ""),
    )
    monkeypatch.setattr(rank.os, "getpgrp", lambda: 1)
    monkeypatch.setattr(rank.time, "sleep", lambda seconds: events.append(str(seconds)))
    monkeypatch.setattr(rank.threading.Thread, "start", rank.threading.Thread.run)  # in this thread
    yield events
    signal.set_wakeup_fd(-1)
    for number, handler in previous.items():
        signal.signal(number, handler)


def test_a_rank_stops_on_sigusr1_and_when_its_launcher_has_died(signals, monkeypatch):
    parents = iter([10, 10, 10, 1])
    monkeypatch.delenv(LAUNCHER_VARIABLE, raising=False)
    monkeypatch.setattr(rank.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(rank.select, "select", lambda *_: ([], [], []))
    follow_launcher()
    assert signals == ["SIGTERM", "300", "SIGKILL"]
    signal.raise_signal(signal.SIGUSR1)
    assert signals[3:] == ["received SIGTERM"]


def test_a_signal_that_says_that_the_launcher_has_died(signals, monkeypatch):
    monkeypatch.setenv(LAUNCHER_VARIABLE, "10")
    monkeypatch.setattr(rank.os, "getppid", lambda: 10)
    select = rank.select.select

    def raise_and_select(*arguments):
        signal.raise_signal(rank.LAUNCHER_DIED)
        return select(*arguments)

    monkeypatch.setattr(rank.select, "select", raise_and_select)
    follow_launcher()
    assert signals == ["SIGTERM", "300", "SIGKILL"]


def test_ports_of_slurm_steps():
    """Below 32,768, from which on Linux assigns ports to other sockets."""
    ports = [slurm_port({"SLURM_JOB_ID": str(job)}) for job in range(3000)]
    assert (min(ports), max(ports)) == (29_500, 32_498)
    assert slurm_port({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}) == ports[7] + 1
    assert slurm_port({}) == 29_500
