"""The process group of a single process, seeds, and signals."""

import signal
from collections.abc import Iterator

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


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("", r"'no-such-host\.invalid'.*master_addr"),
        ("MASTER_ADDR", "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
    ],
)
def test_unknown_or_missing_first_host(tmp_path, monkeypatch, missing, message):
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "no-such-host.invalid",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing, raising=False)
    with pytest.raises(UserError, match=message):
        distributed.initialize(Config.from_flat(training_settings(tmp_path, "data")))


def test_more_ranks_than_gpus_on_a_host(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match=r"local rank 2.*2 visible GPU"):
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
