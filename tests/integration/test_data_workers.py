"""Training with worker processes that read the data."""

import multiprocessing

import pytest

from megatron.checkpoint.directory import saved_iterations
from megatron.training.engine import Engine
from tests.support.runs import metrics, trained


def test_a_killed_data_worker_ends_the_run(tmp_path, data_path, monkeypatch):
    """As by the kernel when memory is full. The resumed run equals one without this."""
    trained(tmp_path / "expected", data_path)
    train_step = Engine.train_step

    def kill_workers(engine, batches, learning_rate, iteration):
        if iteration == 3:
            for worker in multiprocessing.active_children():
                worker.kill()
        return train_step(engine, batches, learning_rate, iteration)

    keys = {"num_workers": 1, "save_interval": 1, "eval_iters": 0}
    monkeypatch.setattr(Engine, "train_step", kill_workers)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        trained(tmp_path, data_path, **keys)
    assert 3 in saved_iterations(tmp_path / "checkpoints")
    monkeypatch.setattr(Engine, "train_step", train_step)
    trained(tmp_path, data_path, **keys)
    assert metrics(tmp_path) == metrics(tmp_path / "expected")
