"""The variables of a rank under Slurm and MPI, and what it does when its launcher stops or dies."""

import os
import signal

import pytest

from megatron.config import Config, UserError
from megatron.launcher import rank
from megatron.launcher.rank import first_host, follow_launcher, set_rank_variables

KEYS = {"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 16, "pos-emb": "none"}

SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("keys", "variables"),
    [
        ({"launcher": "slurm"}, SLURM),
        ({"deepspeed_slurm": True}, SLURM),
        ({"launcher": "OpenMPI"}, OPEN_MPI),
        ({"deepspeed_mpi": True}, OPEN_MPI),
    ],
)
def test_ranks_of_slurm_and_mpi(keys, variables):
    config = Config.from_flat({**KEYS, **keys, "master_addr": "node-1"})
    environment = dict(variables)
    set_rank_variables(config, environment)
    expected = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}
    assert environment == {**variables, **expected}


def test_existing_ranks_are_not_changed():
    environment = dict(SLURM)
    set_rank_variables(Config.from_flat(KEYS), environment)
    assert environment == SLURM
    environment = {**SLURM, "RANK": "0"}
    set_rank_variables(Config.from_flat({**KEYS, "launcher": "slurm"}), environment)
    assert environment == {**SLURM, "RANK": "0"}


def test_several_processes_require_an_address():
    config = Config.from_flat({**KEYS, "launcher": "slurm"})
    with pytest.raises(UserError, match="8 processes, but the address of rank 0 is unknown; set master_addr"):
        set_rank_variables(config, dict(SLURM))
    environment = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    set_rank_variables(config, environment)
    assert environment["MASTER_ADDR"] == "127.0.0.1"


def test_slurm_names_the_first_host():
    environment = {**SLURM, "SLURM_STEP_NODELIST": "gpu-[03-05,9],cpu-1"}
    set_rank_variables(Config.from_flat({**KEYS, "deepspeed_slurm": True}), environment)
    assert environment["MASTER_ADDR"] == "gpu-03"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu-[03-05,9],cpu-1", "gpu-03"),
        ("n[7,9]-ib", "n7-ib"),
        ("127.0.0.[1-2]", "127.0.0.1"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_rank_stops_on_sigusr1_and_when_its_launcher_dies(monkeypatch):
    received = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
    sent, slept = [], []
    monkeypatch.setattr(rank.os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(rank.time, "sleep", slept.append)
    monkeypatch.setattr(rank.threading.Thread, "start", rank.threading.Thread.run)  # in this thread
    parents = iter([10, 10, 10, 1])
    monkeypatch.setattr(rank.os, "getppid", lambda: next(parents))
    try:
        follow_launcher()
        signal.raise_signal(signal.SIGUSR1)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    assert received == ["SIGTERM"]
    assert sent == [(os.getpid(), signal.SIGTERM), (os.getpid(), signal.SIGKILL)]
    assert slept == [1, 1, 300]
