"""The process group of a single process, seeds, and signals."""

import random
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.config import Config, UserError
from megatron.launcher.node import LAUNCHER_VARIABLE
from megatron.model.settings import Layout
from megatron.training import distributed
from tests.support.runs import training_settings


@pytest.fixture
def layout(tmp_path, monkeypatch) -> Iterator[Layout]:
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    config = Config.from_flat(training_settings(tmp_path, "data", distributed_backend="nccl"))
    yield distributed.initialize(config)
    distributed.shutdown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="nccl is available")
def test_a_process_without_a_launcher_trains_alone_on_gloo(capsys, layout):
    assert layout.describe() == "1 rank on cpu: data parallel 1, pipeline 1, tensor parallel 1"
    assert layout.is_main
    assert torch.distributed.get_backend() == "gloo"
    assert "distributed-backend: nccl requires a GPU" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_recorded(number, layout):
    default = signal.getsignal(signal.SIGINT)
    with distributed.DistributedSignalHandler() as signals:
        assert not signals.received_by_any_rank()
        signal.raise_signal(number)
        assert signals.received_by_any_rank()
    assert signal.getsignal(signal.SIGINT) == default


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """The default action of SIGHUP: a test run that was started with nohup ignores it."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


def test_sighup_is_a_request_to_stop_even_if_it_arrives_twice(layout, default_sighup):
    with distributed.DistributedSignalHandler() as signals:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert signals.received_by_any_rank()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_an_ignored_sighup_remains_ignored(layout, default_sighup):
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with distributed.DistributedSignalHandler() as signals:
        signal.raise_signal(signal.SIGHUP)
        assert not signals.received_by_any_rank()


def test_deepy_forwards_a_sigterm_that_its_rank_has_received(layout, monkeypatch):
    """As with `pkill -f train.py`. deepy.py kills its ranks with SIGKILL."""
    monkeypatch.setenv(LAUNCHER_VARIABLE, "1")
    with distributed.DistributedSignalHandler() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM


HOST = {
    "RANK": "1",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "no-such-host.invalid",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("variables", "gpus", "message"),
    [
        (HOST, 0, r"'no-such-host\.invalid'.*master_addr"),
        ({**HOST, "MASTER_ADDR": None}, 0, "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
        ({"LOCAL_RANK": "2", "DS_ACCELERATOR": None}, 2, "local rank 2.*2 visible GPU"),
    ],
)
def test_ranks_that_cannot_start(tmp_path, monkeypatch, variables, gpus, message):
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    if gpus:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(UserError, match=message):
        distributed.initialize(Config.from_flat(training_settings(tmp_path, "data")))


def test_signal_that_arrives_after_another_rank_stopped_is_ignored(layout, monkeypatch):
    """A launcher's signal reaches the ranks of other hosts later, perhaps when this rank has
    already saved.
    """
    previous = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda flag, op, group: flag.fill_(1))
    try:
        with distributed.DistributedSignalHandler() as signals:
            assert signals.received_by_any_rank()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize("rank", range(12))
def test_places_of_ranks(rank, tmp_path, monkeypatch):
    """Tensor parallelism varies fastest, then the replica, then the stage."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 12)
    monkeypatch.setattr("megatron.core.parallel_state.model_parallel_is_initialized", lambda: True)
    keys = {"pipe_parallel_size": 2, "model_parallel_size": 2, "train_batch_size": 12}
    layout = distributed.initialize(Config.from_flat(training_settings(tmp_path, "data", **keys)))
    stage, data_rank, tensor_rank = np.unravel_index(rank, (2, 3, 2))
    assert (layout.pipeline_size, layout.data_size, layout.tensor_size) == (2, 3, 2)
    assert (layout.stage, layout.data_rank, layout.tensor_rank) == (stage, data_rank, tensor_rank)


def test_tensor_parallel_ranks_share_a_seed():
    seeds = {}
    for rank in range(12):
        stage, data_rank, _ = np.unravel_index(rank, (2, 3, 2))
        layout = SimpleNamespace(rank=rank, stage=int(stage), data_rank=int(data_rank))
        distributed.seed_everything(7, layout)
        drawn = random.random(), np.random.random(), torch.rand(()).item()  # noqa: NPY002
        seeds.setdefault((stage, data_rank), set()).add(drawn)
    assert all(len(drawn) == 1 for drawn in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds) == 6
